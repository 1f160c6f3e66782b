/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_frame.c - the frame codec against the golden vectors (proto/vectors/frames.json).
 *
 * tests/client/test_vectors.py reads the same vectors with a decoder of its own.
 */
#include "frame.h"

#include <stdlib.h>

#include "json.h"
#include "tap.h"

static const char *vectors_path = "proto/vectors/frames.json";

static json *read_vectors(void)
{
    struct buf text = BUF_INIT;
    struct err err = ERR_INIT;
    json *all = NULL;
    if (util_read_file(vectors_path, 1 << 20, &text, &err) == 0)
        all = json_parse((const char *)text.data, text.len, &err);
    ok(all != NULL, "the vectors can be read%s", err.msg);
    buf_deinit(&text);
    return all;
}

static void from_hex(struct buf *out, const char *hex)
{
    for (; hex && hex[0] && hex[1]; hex += 2) {
        char two[3] = {hex[0], hex[1], '\0'};
        buf_addc(out, (char)strtoul(two, NULL, 16));
    }
}

static uint64_t field(const json *frame, const char *key)
{
    int64_t value = -1;
    const json *j = json_get(frame, key);
    if (json_string(j))
        return strtoull(json_string(j), NULL, 10);
    return json_integer(j, &value) ? (uint64_t)value : UINT64_MAX;
}

static struct frame frame_of(const json *j)
{
    return (struct frame){.type = (uint8_t)field(j, "type"),
                          .flags = (uint8_t)field(j, "flags"),
                          .nfds = (uint8_t)field(j, "nfds"),
                          .length = (uint32_t)field(j, "length"),
                          .number = field(j, "number"),
                          .cell = (uint32_t)field(j, "cell"),
                          .arg = (uint32_t)field(j, "arg"),
                          .out = (uint32_t)field(j, "out"),
                          .err = (uint32_t)field(j, "err")};
}

static bool same_header(const struct frame *a, const struct frame *b)
{
    return a->type == b->type && a->flags == b->flags && a->nfds == b->nfds &&
           a->length == b->length && a->number == b->number && a->cell == b->cell &&
           a->arg == b->arg && a->out == b->out && a->err == b->err;
}

/* A copy of exactly len bytes, so that a sanitizer sees a read past them. */
static enum frame_status get(const uint8_t *data, size_t len, uint32_t max, struct frame *f,
                             size_t *used, const char **why)
{
    static uint8_t *copy;
    free(copy);
    copy = util_malloc(len);
    if (len)
        memcpy(copy, data, len);
    return frame_get(copy, len, max, f, used, why);
}

/* Every cut of the bytes says MORE, and how many there will be once the header is there. */
static bool grows(const struct buf *bytes)
{
    struct frame f;
    size_t used;
    const char *why;
    for (size_t len = 0; len < bytes->len; len++) {
        size_t want = len < FRAME_HEADER ? FRAME_HEADER : bytes->len;
        if (get(bytes->data, len, FRAME_MAX, &f, &used, &why) != FRAME_MORE || used != want || why)
            return false;
    }
    return true;
}

static void check_good(const json *vector)
{
    const char *name = json_string(json_get(vector, "name"));
    const json *about = json_get(vector, "frame");
    struct buf bytes = BUF_INIT, payload = BUF_INIT;
    struct frame want = frame_of(about), f;
    uint8_t header[FRAME_HEADER];
    size_t used;
    const char *why;
    from_hex(&bytes, json_string(json_get(vector, "hex")));
    from_hex(&payload, json_string(json_get(about, "payload_hex")));
    frame_put_header(header, &want);
    ok(bytes.len == FRAME_HEADER + payload.len && memcmp(header, bytes.data, FRAME_HEADER) == 0,
       "%s: encoded", name);
    bool good = get(bytes.data, bytes.len, FRAME_MAX, &f, &used, &why) == FRAME_OK;
    ok(good && !why && used == bytes.len && same_header(&f, &want) &&
           (!payload.len || memcmp(f.payload, payload.data, payload.len) == 0),
       "%s: decoded", name);
    ok(grows(&bytes), "%s: decoded byte by byte", name);
    buf_add(&bytes, "\xff\xff", 2);
    good = get(bytes.data, bytes.len, FRAME_MAX, &f, &used, &why) == FRAME_OK;
    ok(good && used == bytes.len - 2, "%s: what follows is left alone", name);
    buf_deinit(&bytes);
    buf_deinit(&payload);
}

static void check_bad(const json *vector)
{
    const char *name = json_string(json_get(vector, "name"));
    const char *error = json_string(json_get(vector, "error"));
    struct buf bytes = BUF_INIT;
    struct frame f;
    size_t used, at = 0;
    const char *why;
    from_hex(&bytes, json_string(json_get(vector, "hex")));
    while (at <= bytes.len && get(bytes.data, at, FRAME_MAX, &f, &used, &why) == FRAME_MORE)
        at++;
    ok(at <= 8 && at <= bytes.len, "%s: found out within 8 bytes", name);
    is_str(why, error, name);
    buf_deinit(&bytes);
}

/* A frame of `length` bytes under the limit `max`; how far frame_get came with all its bytes. */
static enum frame_status limited(uint32_t length, uint32_t max, const char **why)
{
    struct frame f = {.type = FRAME_STREAM, .length = length};
    uint8_t *data = util_calloc(1, FRAME_HEADER + (size_t)length);
    size_t used;
    frame_put_header(data, &f);
    enum frame_status st = frame_get(data, FRAME_HEADER + (size_t)length, max, &f, &used, why);
    free(data);
    return st;
}

static void check_limits(const json *all)
{
    int64_t header = 0, max = 0;
    const char *why;
    ok(json_integer(json_get(all, "header_bytes"), &header) && header == FRAME_HEADER,
       "the header's size is the vectors'");
    ok(json_integer(json_get(all, "max_payload"), &max) && max == FRAME_MAX,
       "the largest payload is the vectors'");
    ok(limited(FRAME_MAX, FRAME_MAX, &why) == FRAME_OK, "a payload of exactly the limit");
    ok(limited(FRAME_MAX + 1, FRAME_MAX, &why) == FRAME_BAD, "one byte more");
    is_str(why, "payload longer than the limit", "and why");
    ok(limited(100, 100, &why) == FRAME_OK && limited(101, 100, &why) == FRAME_BAD,
       "a smaller limit is kept as well");
    ok(limited(0, 0, &why) == FRAME_OK && limited(1, 0, &why) == FRAME_BAD, "and a limit of 0");
}

/* Two frames in one buffer, as wire.c reads them: the second starts where the first ends. */
static void check_sequence(void)
{
    struct buf bytes = BUF_INIT;
    struct frame f;
    size_t used = 0, at = 0, count = 0;
    const char *why;
    for (uint32_t i = 0; i < 100; i++) {
        struct frame put = {.type = FRAME_STREAM, .length = i, .number = i + 1};
        frame_put_header(buf_room(&bytes, FRAME_HEADER), &put);
        bytes.len += FRAME_HEADER;
        for (uint32_t k = 0; k < i; k++)
            buf_addc(&bytes, (char)i);
    }
    while (frame_get(bytes.data + at, bytes.len - at, FRAME_MAX, &f, &used, &why) == FRAME_OK) {
        bool good = f.number == ++count && f.length == count - 1;
        good = good && (!f.length || f.payload[f.length - 1] == (uint8_t)(count - 1));
        if (!good)
            break;
        at += used;
    }
    ok(count == 100 && at == bytes.len, "100 frames one after another");
    buf_deinit(&bytes);
}

int main(int argc, char **argv)
{
    if (argc > 1)
        vectors_path = argv[1];
    json *all = read_vectors();
    if (!all)
        return tap_done();
    size_t good = 0, bad = 0;
    for (const json *j = json_first(json_get(all, "good")); j; j = json_next(j), good++)
        check_good(j);
    for (const json *j = json_first(json_get(all, "bad")); j; j = json_next(j), bad++)
        check_bad(j);
    ok(good >= 15 && bad >= 10, "%zu good and %zu bad vectors were there", good, bad);
    check_limits(all);
    check_sequence();
    json_free(all);
    return tap_done();
}
