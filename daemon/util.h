/* SPDX-License-Identifier: Apache-2.0 */
/* util.h - memory that never fails, growable bytes, and small things over libc. */
#ifndef DDIPD_UTIL_H
#define DDIPD_UTIL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "err.h"

#define UTIL_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* These abort when memory is out: after that no promise of this program could be kept. */
void *util_malloc(size_t size);
void *util_calloc(size_t count, size_t size);
void *util_realloc(void *ptr, size_t size);
char *util_strdup(const char *s);
char *util_strndup(const char *s, size_t n);
char *util_printf(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Growable bytes. data is not NUL-terminated unless buf_cstr was called last. */
struct buf {
    uint8_t *data;
    size_t len, cap;
};

#define BUF_INIT                                                                                   \
    {                                                                                              \
        0                                                                                          \
    }

void buf_deinit(struct buf *b);
void buf_reset(struct buf *b);                 /* empties; gives memory back when it is large */
uint8_t *buf_room(struct buf *b, size_t more); /* room for `more` bytes after len */
void buf_add(struct buf *b, const void *data, size_t len);
void buf_adds(struct buf *b, const char *s);
void buf_addc(struct buf *b, char c);
void buf_addf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void buf_consume(struct buf *b, size_t n); /* drops the first n bytes */
const char *buf_cstr(struct buf *b);       /* NUL-terminates; valid until the next change */
char *buf_take(struct buf *b);             /* NUL-terminated heap string; b is empty after */

double util_now(void);            /* wall clock, seconds since the epoch, UTC */
uint64_t util_monotonic_ns(void); /* for durations */

int util_random(void *out, size_t len, struct err *err) ERR_MUST_CHECK;
/* `bytes` random bytes as lower-case hex; out holds 2 * bytes + 1. */
int util_random_hex(char *out, size_t bytes, struct err *err) ERR_MUST_CHECK;
/* Compares in time that depends on the lengths alone. */
bool util_equal_secret(const char *a, const char *b);

/* Whole decimal number in [min, max], nothing before or after it. */
int util_parse_u64(const char *s, uint64_t min, uint64_t max, uint64_t *out);

/* Parent folders are made 0700 as well. */
int util_mkdirs(const char *path, mode_t mode, struct err *err) ERR_MUST_CHECK;
/* Writes a new file and renames it over path, so readers see the old bytes or the new ones. */
int util_write_file(const char *path, mode_t mode, const void *data, size_t len,
                    struct err *err) ERR_MUST_CHECK;
/* Reads a file of at most max bytes into b. */
int util_read_file(const char *path, size_t max, struct buf *b, struct err *err) ERR_MUST_CHECK;
/* Removes a folder and the plain files in it, and its sub-folders likewise. */
void util_remove_tree(const char *path);

/* Length of the valid UTF-8 prefix of s. */
size_t util_utf8_valid(const char *s, size_t len);
/* How many bytes at the end of s start a character that is not complete yet (0 to 3). */
size_t util_utf8_partial(const char *s, size_t len);
/* [A-Za-z0-9][A-Za-z0-9_.-]{0,63}: fit for a URL segment and a folder name. */
bool util_is_slug(const char *s);

#endif
