/* SPDX-License-Identifier: Apache-2.0 */
/*
 * once.h - what clients asked for under an Idempotency-Key, so that asking again does nothing new.
 *
 * A group remembers the key it was made under, and the last ONCE_MAX keys of its cells. They
 * outlive the daemon: the first in group.json, the others in the journal, with the cell's
 * execute_input and in the heads.
 */
#ifndef DDIPD_ONCE_H
#define DDIPD_ONCE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "err.h"
#include "json.h"

#define ONCE_MAX 256
#define ONCE_KEY_MAX 128 /* characters; with ONCE_MAX it bounds what a journal's head repeats */
#define ONCE_HASH_INIT 0xcbf29ce484222325u

struct once;

struct once_key {
    uid_t uid;       /* keys of different users have nothing in common */
    const char *key; /* NULL: the client gave none, nothing is remembered */
    uint64_t hash;   /* of what was asked */
};

struct once *once_new(void);
void once_free(struct once *o);

/* FNV-1a, to be continued with another call. */
uint64_t once_hash(uint64_t hash, const void *data, size_t len);

/* Is it fit to be kept? */
int once_key_check(const struct once_key *key, struct err *err) ERR_MUST_CHECK;
/* 1: the same request as was made before; 0: another key; -1: another request under that key. */
int once_key_match(const struct once_key *was, const struct once_key *is,
                   struct err *err) ERR_MUST_CHECK;
struct once_key once_key_copy(const struct once_key *key); /* with a text of its own */
void once_key_deinit(struct once_key *key);                /* of a copy */
/* Members of an object, none without a key; and back, the text borrowed. uid is its own member. */
void once_key_write(const struct once_key *key, struct jw *w);
struct once_key once_key_read(const json *j);

/* As once_key_match; 1: *cell is what was made then. */
int once_find(const struct once *o, const struct once_key *key, uint32_t *cell,
              struct err *err) ERR_MUST_CHECK;
void once_add(struct once *o, const struct once_key *key, uint32_t cell);
/* All, as the elements of an array; and back, one of them or an execute_input. */
void once_write(const struct once *o, struct jw *w);
void once_read(struct once *o, const json *j);

#endif
