/* SPDX-License-Identifier: Apache-2.0 */
/* test_json.c - json.c: what is refused, what getters say, what the writer writes. */
#include "json.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "tap.h"

/* Parses a copy of exactly that many bytes, so that a sanitizer sees a read past them. */
static json *parse(const char *text, size_t len, struct err *err)
{
    char *copy = util_malloc(len);
    if (len)
        memcpy(copy, text, len);
    json *j = json_parse(copy, len, err);
    free(copy);
    return j;
}

/* "" when the text is taken, else the error's message. */
static const char *fault(const char *text, size_t len)
{
    static struct err err;
    err = (struct err)ERR_INIT;
    json *j = parse(text, len, &err);
    if (!j && err.code != ERR_SYNTAX)
        return "refused with the wrong code";
    json_free(j);
    return err.msg;
}

#define FAULT(literal) fault(literal, sizeof(literal) - 1)

static void check_syntax(void)
{
    static const char *const good[] = {
        "{}",   "[]",      " {\"a\" : [1, 2] }\r\n\t",  "\"x\"", "1", "true",
        "null", "-0.5e-3", "\"\\u00e4\\ud83d\\ude00\"", "[[[]]]"};
    static const char *const bad[] = {"",         " ",           "{",          "}",       "{\"a\"}",
                                      "{\"a\":}", "[1,]",        "tru",        "{'a':1}", "\"x",
                                      "\"\\x\"",  "\"\\ud800\"", "{\"a\":1,}", "nul",     "-",
                                      "{a:1}",    "[1 2]",       "\"\\u12\""};
    for (size_t i = 0; i < UTIL_COUNT(good); i++)
        is_str(fault(good[i], strlen(good[i])), "", "good JSON is taken");
    for (size_t i = 0; i < UTIL_COUNT(bad); i++)
        ok(strstr(fault(bad[i], strlen(bad[i])), "malformed JSON at byte "), "`%s` is malformed",
           bad[i]);
}

static void check_refusals(void)
{
    is_str(FAULT("{} x"), "malformed JSON at byte 3 of 4", "trailing text");
    is_str(FAULT("{}{}"), "malformed JSON at byte 2 of 4", "a second object");
    is_str(FAULT("{}\0"), "the JSON text has a NUL byte at byte 2", "a NUL byte at the end");
    is_str(FAULT("{\0}"), "the JSON text has a NUL byte at byte 1", "a NUL byte inside");
    is_str(FAULT("\"a\0b\""), "the JSON text has a NUL byte at byte 2", "a NUL byte in a string");
    is_str(FAULT("\"a\\u0000b\""), "the JSON text has a NUL character at byte 2", "an escaped NUL");
    is_str(FAULT("{\"\\u0000\":1}"), "the JSON text has a NUL character at byte 2", "in a key too");
    is_str(FAULT("\"\\\\u0000\""), "", "but not a backslash and the letters u0000");
    is_str(FAULT("\"\\\\\\u0000\""), "the JSON text has a NUL character at byte 3",
           "a backslash, then a NUL");
    is_str(FAULT("\"\xff\""), "the JSON text is not UTF-8 at byte 1", "bytes that are no UTF-8");
    is_str(FAULT("\"\xed\xa0\x80\""), "the JSON text is not UTF-8 at byte 1", "a surrogate");
    is_str(FAULT("\"\xc3"), "the JSON text is not UTF-8 at byte 1", "half a character at the end");
    is_str(FAULT("\xef\xbb\xbf{}x"), "malformed JSON at byte 5 of 6",
           "a byte order mark is skipped");
}

static void nest(struct buf *b, int depth, char open, char close)
{
    buf_reset(b);
    for (int i = 0; i < depth; i++)
        buf_addc(b, open);
    for (int i = 0; i < depth; i++)
        buf_addc(b, close);
}

static void check_depth(void)
{
    struct buf b = BUF_INIT;
    nest(&b, JSON_DEPTH_MAX, '[', ']');
    is_str(fault((char *)b.data, b.len), "", "the deepest allowed");
    nest(&b, JSON_DEPTH_MAX + 1, '[', ']');
    is_str(fault((char *)b.data, b.len), "the JSON text nests deeper than 64 levels", "one deeper");
    nest(&b, 1000000, '[', ']');
    is_str(fault((char *)b.data, b.len), "the JSON text nests deeper than 64 levels", "a million");
    buf_reset(&b);
    buf_adds(&b, "[\"[[[\\\"[[[");
    for (int i = 0; i < 100; i++)
        buf_adds(&b, "[{");
    buf_adds(&b, "\"]");
    is_str(fault((char *)b.data, b.len), "", "brackets in strings do not count");
    buf_deinit(&b);
}

static void check_cut(void)
{
    struct err err = ERR_INIT;
    static const char text[] = "{\"a\":\"one\\u0000two\",\"b\":2}";
    json *j = json_parse_cut(text, sizeof(text) - 1, &err);
    ok(j != NULL, "json_parse_cut takes an escaped NUL");
    is_str(json_string(json_get(j, "a")), "one", "and cuts there");
    ok(json_get(j, "b") != NULL, "what follows is there");
    json_free(j);
    ok(!json_parse_cut("\"a\0b\"", 5, &err) && err.code == ERR_SYNTAX, "a NUL byte is refused");
    ok(!json_parse_cut("\"\xff\"", 3, &err), "and what is no UTF-8");
}

/* --- getters --- */

static json *sample(void)
{
    static const char text[] =
        "{\"s\":\"text\",\"e\":\"\",\"t\":true,\"f\":false,\"n\":null,\"i\":42,\"m\":-3,\"d\":2.5,"
        "\"big\":9007199254740992,\"bigger\":9007199254740994,\"huge\":1e300,\"inf\":1e999,"
        "\"a\":[1,\"x\"],\"o\":{\"k\":1},\"S\":\"other case\"}";
    struct err err = ERR_INIT;
    return parse(text, sizeof(text) - 1, &err);
}

static void check_tree(const json *j)
{
    int count = 0;
    for (const json *c = json_first(j); c; c = json_next(c))
        count++;
    ok(count == 15, "all members are visited");
    is_str(json_key(json_first(j)), "s", "with their keys");
    ok(json_is_object(j) && !json_is_array(j) && json_is_array(json_get(j, "a")), "kinds");
    ok(!json_get(j, "missing") && !json_get(j, "n"), "absent and null are the same");
    ok(!json_get(NULL, "x") && !json_get(json_get(j, "i"), "x"), "what is no object has no member");
    is_str(json_string(json_get(j, "S")), "other case", "keys differ by case");
    ok(!json_string(json_get(j, "i")) && !json_string(NULL), "no string");
    json *copy = json_copy(j);
    is_str(json_string(json_get(copy, "s")), "text", "a copy has it too");
    json_free(copy);
}

static void check_string_bool(const json *j)
{
    struct err err = ERR_INIT;
    const char *s = "untouched";
    bool b = true;
    ok(json_get_string(j, "missing", &s, &err) == 0 && json_get_string(j, "n", &s, &err) == 0,
       "no string there");
    is_str(s, "untouched", "leaves the value alone");
    ok(json_get_string(j, "s", &s, &err) == 1 && strcmp(s, "text") == 0, "a string");
    ok(json_get_string(j, "i", &s, &err) == -1 && err.code == ERR_INVALID, "a number is none");
    is_str(err.msg, "\"i\" must be a string, not a number", "and the error says so");
    ok(json_get_bool(j, "f", &b, &err) == 1 && !b, "false");
    ok(json_get_bool(j, "t", &b, &err) == 1 && b, "true");
    ok(json_get_bool(j, "n", &b, &err) == 0 && b, "null is absent");
    ok(json_get_bool(j, "s", &b, &err) == -1, "a string is neither");
    is_str(err.msg, "\"s\" must be true or false, not a string", "and the error says so");
    ok(json_get_bool(j, "a", &b, &err) == -1 && strstr(err.msg, "not an array"), "an array");
    ok(json_get_bool(j, "o", &b, &err) == -1 && strstr(err.msg, "not an object"), "an object");
}

static void check_numbers(const json *j)
{
    struct err err = ERR_INIT;
    int64_t i = 7;
    double d = 7;
    ok(json_get_int(j, "i", 42, 42, &i, &err) == 1 && i == 42, "a whole number at both bounds");
    ok(json_get_int(j, "m", -3, 0, &i, &err) == 1 && i == -3, "a negative one");
    ok(json_get_int(j, "missing", 0, 9, &i, &err) == 0 && i == -3, "absent");
    ok(json_get_int(j, "i", 0, 41, &i, &err) == -1 && i == -3, "too large");
    is_str(err.msg, "\"i\" must be a whole number from 0 to 41, not 42", "and the error says so");
    ok(json_get_int(j, "d", 0, 9, &i, &err) == -1, "a fraction");
    is_str(err.msg, "\"d\" must be a whole number from 0 to 9, not 2.5", "and the error says so");
    ok(json_get_int(j, "t", 0, 9, &i, &err) == -1, "true is no number");
    is_str(err.msg, "\"t\" must be a whole number, not true or false", "and the error says so");
    ok(json_get_int(j, "big", 0, INT64_MAX, &i, &err) == 1 && i == 1ll << 53, "2^53");
    ok(json_get_int(j, "bigger", 0, INT64_MAX, &i, &err) == -1, "what a double cannot count");
    ok(json_get_int(j, "huge", 0, INT64_MAX, &i, &err) == -1, "1e300 is no whole number here");
    ok(json_get_int(j, "inf", 0, INT64_MAX, &i, &err) == -1, "nor is 1e999");
    ok(json_get_double(j, "d", 2.5, 2.5, &d, &err) == 1 && d == 2.5, "a number at both bounds");
    ok(json_get_double(j, "i", 0, 41.5, &d, &err) == -1 && d == 2.5, "out of range");
    is_str(err.msg, "\"i\" must be a number from 0 to 41.5, not 42", "and the error says so");
    ok(json_get_double(j, "inf", 0, DBL_MAX, &d, &err) == -1, "infinity");
    ok(json_get_double(j, "s", 0, 1, &d, &err) == -1 &&
           json_get_double(j, "n", 0, 1, &d, &err) == 0,
       "a string, and null");
}

/* --- the writer --- */

static const char *quoted(const char *value, size_t len)
{
    static struct buf b;
    buf_reset(&b);
    json_quote(&b, value, len);
    return buf_cstr(&b);
}

static void check_quote(void)
{
    is_str(quoted("", 0), "\"\"", "nothing");
    is_str(quoted("a\"\\/b", 5), "\"a\\\"\\\\/b\"", "quotes and backslashes");
    is_str(quoted("\b\f\n\r\t", 5), "\"\\b\\f\\n\\r\\t\"", "short escapes");
    is_str(quoted("\0\x1f\x7f", 3), "\"\\u0000\\u001f\x7f\"", "other control characters");
    is_str(quoted("\xc3\xa4\xf0\x9f\x98\x80", 6), "\"\xc3\xa4\xf0\x9f\x98\x80\"", "UTF-8 as it is");
    is_str(quoted("a\xff\xfe"
                  "b",
                  4),
           "\"a\xef\xbf\xbd\xef\xbf\xbd"
           "b\"",
           "each bad byte is replaced");
    is_str(quoted("\xe2\x82", 2), "\"\xef\xbf\xbd\xef\xbf\xbd\"", "also of a cut character");
    is_str(quoted("\xed\xa0\x80", 3), "\"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"",
           "and a surrogate");
}

/* Random bytes: what is written is JSON, and means the same text but for what was repaired. */
static void check_quote_random(void)
{
    uint32_t seed = 12345, wrong = 0;
    for (int round = 0; round < 20000; round++) {
        char bytes[24], valid[25];
        size_t len = round % sizeof(bytes);
        for (size_t i = 0; i < len; i++) {
            seed = seed * 1664525u + 1013904223u;
            bytes[i] = (char)(seed >> 24);
            bytes[i] = bytes[i] || round % 2 ? bytes[i] : 'n'; /* NUL in every other round */
        }
        const char *text = quoted(bytes, len);
        struct err err = ERR_INIT;
        json *j = json_parse_cut(text, strlen(text), &err);
        snprintf(valid, sizeof(valid), "%.*s", (int)len, bytes);
        bool whole = util_utf8_valid(valid, strlen(valid)) == strlen(valid);
        wrong += !j || (whole && strcmp(json_string(j), valid) != 0);
        json_free(j);
    }
    ok(wrong == 0, "20000 random texts are written as JSON that says the same");
}

static void check_writer(const json *j)
{
    struct buf b = BUF_INIT;
    struct jw w = JW_INIT(&b);
    jw_object(&w, NULL);
    jw_string(&w, "a\"", "x");
    jw_string(&w, "none", NULL);
    jw_array(&w, "list");
    jw_int(&w, NULL, INT64_MIN);
    jw_int(&w, NULL, INT64_MAX);
    jw_object(&w, NULL);
    jw_end_object(&w);
    jw_array(&w, NULL);
    jw_bool(&w, NULL, true);
    jw_end_array(&w);
    jw_end_array(&w);
    jw_bool(&w, "no", false);
    jw_raw(&w, "raw", "{\"x\":1}", 7);
    jw_json(&w, "tree", json_get(j, "a"));
    jw_json(&w, "nothing", NULL);
    jw_text(&w, "part", "abcdef", 3);
    jw_end_object(&w);
    is_str(buf_cstr(&b),
           "{\"a\\\"\":\"x\",\"none\":null,\"list\":[-9223372036854775808,9223372036854775807,{},"
           "[true]],\"no\":false,\"raw\":{\"x\":1},\"tree\":[1,\"x\"],\"nothing\":null,"
           "\"part\":\"abc\"}",
           "every kind of value, nested, with its commas");
    buf_deinit(&b);
}

static const char *written(double value)
{
    static struct buf b;
    struct jw w = JW_INIT(&b);
    buf_reset(&b);
    jw_double(&w, NULL, value);
    return buf_cstr(&b);
}

static void check_doubles(void)
{
    is_str(written(0), "0", "zero");
    is_str(written(1.5), "1.5", "no zeros at the end");
    is_str(written(100), "100", "but those before the point stay");
    is_str(written(1764518400.123456), "1764518400.123456", "a time, to the microsecond");
    is_str(written(-0.25), "-0.25", "negative");
    is_str(written(1e-9), "0", "too small to show");
    is_str(written(INFINITY), "null", "infinity is null");
    is_str(written(NAN), "null", "and so is what is no number");
    ok(strlen(written(DBL_MAX)) == 309, "the largest is digits, not an overrun");
}

int main(void)
{
    json *j = sample();
    check_syntax();
    check_refusals();
    check_depth();
    check_cut();
    ok(j != NULL, "the sample is good");
    check_tree(j);
    check_string_bool(j);
    check_numbers(j);
    check_quote();
    check_quote_random();
    check_writer(j);
    check_doubles();
    json_free(j);
    json_free(NULL);
    return tap_done();
}
