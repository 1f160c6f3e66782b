/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json.c - typed getters over cJSON, and a writer that appends to a buf.
 *
 * cJSON accepts bytes that are no UTF-8, cuts strings at \u0000 and only bounds nesting at 1000
 * levels; json_parse refuses all three before cJSON sees the text.
 */
#include "json.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Walks the text outside cJSON: UTF-8, depth, and "\u0000" inside strings. */
static int json_precheck(const char *text, size_t len, bool allow_nul, struct err *err)
{
    size_t valid = util_utf8_valid(text, len);
    if (valid < len)
        return err_set(err, ERR_SYNTAX, "the JSON text is not UTF-8 at byte %zu", valid);
    int depth = 0;
    bool quoted = false;
    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        if (c == '\0')
            return err_set(err, ERR_SYNTAX, "the JSON text has a NUL byte at byte %zu", i);
        if (quoted) {
            if (c == '"')
                quoted = false;
            else if (c == '\\' && !allow_nul && len - i >= 6 && memcmp(text + i, "\\u0000", 6) == 0)
                return err_set(err, ERR_SYNTAX, "the JSON text has a NUL character at byte %zu", i);
            else if (c == '\\')
                i++;
        } else if (c == '"') {
            quoted = true;
        } else if (c == '{' || c == '[') {
            if (++depth > JSON_DEPTH_MAX)
                return err_set(err, ERR_SYNTAX, "the JSON text nests deeper than %d levels",
                               JSON_DEPTH_MAX);
        } else if (c == '}' || c == ']') {
            depth--;
        }
    }
    return 0;
}

static json *json_read(const char *text, size_t len, bool allow_nul, struct err *err)
{
    if (json_precheck(text, len, allow_nul, err) < 0)
        return NULL;
    const char *end = NULL;
    json *j = cJSON_ParseWithLengthOpts(text, len, &end, false);
    size_t at = end ? (size_t)(end - text) : 0;
    if (j) {
        while (at < len && strchr(" \t\r\n", text[at]))
            at++;
        if (at == len)
            return j;
        cJSON_Delete(j);
    }
    err_set(err, ERR_SYNTAX, "malformed JSON at byte %zu of %zu", at, len);
    return NULL;
}

json *json_parse(const char *text, size_t len, struct err *err)
{
    return json_read(text, len, false, err);
}

json *json_parse_cut(const char *text, size_t len, struct err *err)
{
    return json_read(text, len, true, err);
}

void json_free(json *j)
{
    cJSON_Delete(j);
}

json *json_copy(const json *j)
{
    json *copy = cJSON_Duplicate(j, true);
    if (!copy)
        abort(); /* as util_malloc does */
    return copy;
}

bool json_is_object(const json *j)
{
    return cJSON_IsObject(j);
}

bool json_is_array(const json *j)
{
    return cJSON_IsArray(j);
}

const json *json_get(const json *object, const char *key)
{
    const json *j = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNull(j) ? NULL : j;
}

const json *json_first(const json *j)
{
    return j ? j->child : NULL;
}

const json *json_next(const json *child)
{
    return child->next;
}

const char *json_key(const json *child)
{
    return child->string;
}

const char *json_string(const json *j)
{
    return cJSON_IsString(j) ? j->valuestring : NULL;
}

bool json_integer(const json *j, int64_t *out)
{
    if (!cJSON_IsNumber(j) || fabs(j->valuedouble) > 9007199254740992.0 ||
        j->valuedouble != floor(j->valuedouble))
        return false;
    *out = (int64_t)j->valuedouble;
    return true;
}

static const char *json_kind(const json *j)
{
    return cJSON_IsString(j)   ? "a string"
           : cJSON_IsNumber(j) ? "a number"
           : cJSON_IsBool(j)   ? "true or false"
           : cJSON_IsArray(j)  ? "an array"
           : cJSON_IsObject(j) ? "an object"
                               : "null";
}

static int json_wrong(const json *j, const char *key, const char *expected, struct err *err)
{
    return err_set(err, ERR_INVALID, "\"%s\" must be %s, not %s", key, expected, json_kind(j));
}

int json_get_string(const json *object, const char *key, const char **out, struct err *err)
{
    const json *j = json_get(object, key);
    if (!j)
        return 0;
    if (!cJSON_IsString(j))
        return json_wrong(j, key, "a string", err);
    *out = j->valuestring;
    return 1;
}

int json_get_bool(const json *object, const char *key, bool *out, struct err *err)
{
    const json *j = json_get(object, key);
    if (!j)
        return 0;
    if (!cJSON_IsBool(j))
        return json_wrong(j, key, "true or false", err);
    *out = cJSON_IsTrue(j);
    return 1;
}

int json_get_int(const json *object, const char *key, int64_t min, int64_t max, int64_t *out,
                 struct err *err)
{
    const json *j = json_get(object, key);
    int64_t v;
    if (!j)
        return 0;
    if (!cJSON_IsNumber(j))
        return json_wrong(j, key, "a whole number", err);
    if (!json_integer(j, &v) || v < min || v > max)
        return err_set(err, ERR_INVALID, "\"%s\" must be a whole number from %lld to %lld, not %g",
                       key, (long long)min, (long long)max, j->valuedouble);
    *out = v;
    return 1;
}

int json_get_double(const json *object, const char *key, double min, double max, double *out,
                    struct err *err)
{
    const json *j = json_get(object, key);
    if (!j)
        return 0;
    if (!cJSON_IsNumber(j))
        return json_wrong(j, key, "a number", err);
    if (!(j->valuedouble >= min && j->valuedouble <= max))
        return err_set(err, ERR_INVALID, "\"%s\" must be a number from %g to %g, not %g", key, min,
                       max, j->valuedouble);
    *out = j->valuedouble;
    return 1;
}

/* Escapes what JSON does not allow in a string; s is valid UTF-8. */
static void json_escape(struct buf *out, const char *s, size_t len)
{
    static const char shorts[0x20] = {
        ['\b'] = 'b', ['\f'] = 'f', ['\n'] = 'n', ['\r'] = 'r', ['\t'] = 't'};
    size_t plain = 0;
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c != '"' && c != '\\')
            continue;
        buf_add(out, s + plain, i - plain);
        plain = i + 1;
        char letter = c >= 0x20 ? (char)c : shorts[c];
        if (letter) {
            buf_addc(out, '\\');
            buf_addc(out, letter);
        } else {
            buf_addf(out, "\\u%04x", c);
        }
    }
    buf_add(out, s + plain, len - plain);
}

void json_quote(struct buf *out, const char *s, size_t len)
{
    buf_addc(out, '"');
    while (len) {
        size_t valid = util_utf8_valid(s, len);
        json_escape(out, s, valid);
        if (valid == len)
            break;
        buf_adds(out, "\xef\xbf\xbd");
        s += valid + 1;
        len -= valid + 1;
    }
    buf_addc(out, '"');
}

static void jw_key(struct jw *w, const char *key)
{
    if (w->comma)
        buf_addc(w->out, ',');
    w->comma = true;
    if (key) {
        json_quote(w->out, key, strlen(key));
        buf_addc(w->out, ':');
    }
}

static void jw_open(struct jw *w, const char *key, char bracket)
{
    jw_key(w, key);
    buf_addc(w->out, bracket);
    w->comma = false;
}

static void jw_close(struct jw *w, char bracket)
{
    buf_addc(w->out, bracket);
    w->comma = true;
}

void jw_object(struct jw *w, const char *key)
{
    jw_open(w, key, '{');
}

void jw_array(struct jw *w, const char *key)
{
    jw_open(w, key, '[');
}

void jw_end_object(struct jw *w)
{
    jw_close(w, '}');
}

void jw_end_array(struct jw *w)
{
    jw_close(w, ']');
}

void jw_text(struct jw *w, const char *key, const char *value, size_t len)
{
    jw_key(w, key);
    json_quote(w->out, value, len);
}

void jw_string(struct jw *w, const char *key, const char *value)
{
    if (value)
        jw_text(w, key, value, strlen(value));
    else
        jw_null(w, key);
}

void jw_int(struct jw *w, const char *key, int64_t value)
{
    jw_key(w, key);
    buf_addf(w->out, "%lld", (long long)value);
}

void jw_double(struct jw *w, const char *key, double value)
{
    if (!isfinite(value)) {
        jw_null(w, key);
        return;
    }
    jw_key(w, key);
    buf_addf(w->out, "%.6f", value);
    struct buf *b = w->out;
    while (b->data[b->len - 1] == '0')
        b->len--;
    b->len -= b->data[b->len - 1] == '.';
}

void jw_bool(struct jw *w, const char *key, bool value)
{
    jw_key(w, key);
    buf_adds(w->out, value ? "true" : "false");
}

void jw_null(struct jw *w, const char *key)
{
    jw_key(w, key);
    buf_adds(w->out, "null");
}

void jw_raw(struct jw *w, const char *key, const char *json_text, size_t len)
{
    jw_key(w, key);
    buf_add(w->out, json_text, len);
}

void jw_json(struct jw *w, const char *key, const json *value)
{
    char *text = value ? cJSON_PrintUnformatted(value) : NULL;
    if (text)
        jw_raw(w, key, text, strlen(text));
    else
        jw_null(w, key);
    free(text);
}
