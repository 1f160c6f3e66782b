/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json.h - typed getters over cJSON, and a writer that appends to a buf.
 *
 * Reading builds a tree (json_parse ... json_free). Writing never does: events and answers are
 * appended key by key. Strings written from outside are repaired to valid UTF-8 (U+FFFD).
 */
#ifndef DDIPD_JSON_H
#define DDIPD_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"
#include "util.h"

typedef struct cJSON json;

/* Whole text, strict UTF-8, no NUL characters, at most `JSON_DEPTH_MAX` levels. NULL: *err is set.
 */
#define JSON_DEPTH_MAX 64
json *json_parse(const char *text, size_t len, struct err *err) ERR_MUST_CHECK;
/* Allows "\u0000" in strings, which are cut there in the tree: for looking at a text that is passed
 * on as it is. */
json *json_parse_cut(const char *text, size_t len, struct err *err) ERR_MUST_CHECK;
void json_free(json *j);
json *json_copy(const json *j);

bool json_is_object(const json *j);
bool json_is_array(const json *j);
const json *json_get(const json *object, const char *key); /* NULL: absent, or JSON null */
const json *json_first(const json *j);                     /* first child of an array or object */
const json *json_next(const json *child);
const char *json_key(const json *child);
const char *json_string(const json *j);         /* NULL when j is no string */
bool json_integer(const json *j, int64_t *out); /* false when j is no whole number */

/*
 * Typed getters. 1: found and *out set; 0: absent (or null), *out untouched; -1: wrong type or out
 * of range, *err names the key, what was expected and what was there.
 */
int json_get_string(const json *object, const char *key, const char **out,
                    struct err *err) ERR_MUST_CHECK;
int json_get_bool(const json *object, const char *key, bool *out, struct err *err) ERR_MUST_CHECK;
int json_get_int(const json *object, const char *key, int64_t min, int64_t max, int64_t *out,
                 struct err *err) ERR_MUST_CHECK;
int json_get_double(const json *object, const char *key, double min, double max, double *out,
                    struct err *err) ERR_MUST_CHECK;

/* The writer. Calls nest like the text does; commas are its own business. */
struct jw {
    struct buf *out;
    bool comma;
};

#define JW_INIT(buffer)                                                                            \
    {                                                                                              \
        .out = (buffer), .comma = false                                                            \
    }

void jw_object(struct jw *w, const char *key); /* key NULL: top level or array element */
void jw_array(struct jw *w, const char *key);
void jw_end_object(struct jw *w);
void jw_end_array(struct jw *w);
void jw_string(struct jw *w, const char *key, const char *value); /* value NULL: null */
void jw_text(struct jw *w, const char *key, const char *value, size_t len);
void jw_int(struct jw *w, const char *key, int64_t value);
void jw_double(struct jw *w, const char *key, double value); /* microsecond precision */
void jw_bool(struct jw *w, const char *key, bool value);
void jw_null(struct jw *w, const char *key);
void jw_raw(struct jw *w, const char *key, const char *json_text, size_t len);
void jw_json(struct jw *w, const char *key, const json *value);

/* Appends value as a quoted JSON string, repaired to valid UTF-8. */
void json_quote(struct buf *out, const char *value, size_t len);

#endif
