/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_json.c - texts from outside: parsed, looked at with every getter, written and parsed again.
 *
 * The first byte of an input chooses between json_parse and json_parse_cut.
 */
#include "json.h"

#include "fuzz.h"

static void look_at_member(const json *object, const char *key)
{
    struct err err = ERR_INIT;
    const char *text = "untouched";
    bool flag = false;
    int64_t number = -77;
    double real = -77;
    int s = json_get_string(object, key, &text, &err);
    fuzz_check(s >= 0 ? (s == 1) == (strcmp(text, "untouched") != 0) || s == 1
                      : err.code == ERR_INVALID);
    int b = json_get_bool(object, key, &flag, &err);
    int i = json_get_int(object, key, -1000, 1000, &number, &err);
    int d = json_get_double(object, key, -1e6, 1e6, &real, &err);
    fuzz_check(i != 1 || (number >= -1000 && number <= 1000));
    fuzz_check(d != 1 || (real >= -1e6 && real <= 1e6));
    fuzz_check((i != 1 || d == 1) && (s == 1) + (b == 1) + (d == 1) <= 1);
    fuzz_check(json_get(object, key) || (s == 0 && b == 0 && i == 0 && d == 0));
}

static void look(const json *j, int depth)
{
    int64_t number = 0;
    fuzz_check(depth <= JSON_DEPTH_MAX + 1);
    fuzz_check(!json_is_object(j) || !json_is_array(j));
    fuzz_check(!json_string(j) ||
               util_utf8_valid(json_string(j), strlen(json_string(j))) == strlen(json_string(j)));
    (void)json_integer(j, &number);
    for (const json *c = json_first(j); c; c = json_next(c)) {
        if (json_is_object(j))
            look_at_member(j, json_key(c));
        look(c, depth + 1);
    }
}

static char *print(const json *j)
{
    struct buf b = BUF_INIT;
    struct jw w = JW_INIT(&b);
    jw_json(&w, NULL, j);
    return buf_take(&b);
}

/* Written and parsed, it is written the same. (Numbers may lose digits the first time.) */
static void round_trip(const json *j)
{
    struct err err = ERR_INIT;
    char *first = print(j);
    json *again = json_parse(first, strlen(first), &err);
    fuzz_check(again);
    char *second = print(again);
    json *third = json_parse(second, strlen(second), &err);
    char *last = print(third);
    fuzz_check(strcmp(second, last) == 0);
    json *copy = json_copy(j);
    char *copied = print(copy);
    fuzz_check(strcmp(copied, first) == 0);
    json_free(copy);
    json_free(again);
    json_free(third);
    free(first);
    free(second);
    free(last);
    free(copied);
}

/* Any bytes as a string: what is written is JSON, and whole if they were UTF-8. */
static void quote(const uint8_t *data, size_t size)
{
    struct buf b = BUF_INIT;
    struct err err = ERR_INIT;
    json_quote(&b, (const char *)data, size);
    json *j = json_parse_cut((const char *)b.data, b.len, &err);
    fuzz_check(j && json_string(j));
    size_t valid = util_utf8_valid((const char *)data, size);
    size_t len = strnlen((const char *)data, size);
    if (valid == size)
        fuzz_check(strlen(json_string(j)) == len && memcmp(json_string(j), data, len) == 0);
    json_free(j);
    buf_deinit(&b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct err err = ERR_INIT;
    if (size < 1)
        return 0;
    char *copy = (char *)fuzz_copy(data + 1, size - 1);
    json *j = data[0] % 2 ? json_parse_cut(copy, size - 1, &err) : json_parse(copy, size - 1, &err);
    fuzz_check(j ? err.code == ERR_NONE : err.code == ERR_SYNTAX && err.msg[0]);
    if (j) {
        look(j, 1);
        round_trip(j);
        fuzz_check(!memchr(copy, '\0', size - 1));
    }
    json_free(j);
    quote((const uint8_t *)copy, size - 1);
    free(copy);
    return 0;
}
