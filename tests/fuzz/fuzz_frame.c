/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_frame.c - the frame decoder: whole, and the same bytes arriving piece by piece.
 *
 * The first byte of an input chooses the largest payload, the second how large the pieces are.
 */
#include "frame.h"

#include "fuzz.h"
#include "util.h"

/* What decoding says of one input: a line per frame, and how it ends. */
static void note(struct buf *out, const struct frame *f)
{
    uint8_t header[FRAME_HEADER];
    frame_put_header(header, f);
    buf_add(out, header, sizeof(header));
    buf_add(out, f->payload, f->length);
}

static void check_frame(const uint8_t *at, size_t left, uint32_t max, const struct frame *f,
                        size_t used)
{
    uint8_t header[FRAME_HEADER];
    frame_put_header(header, f);
    fuzz_check(memcmp(header, at, FRAME_HEADER) == 0); /* decode and encode are inverse */
    fuzz_check(used == FRAME_HEADER + (size_t)f->length && used <= left);
    fuzz_check(f->length <= max && f->nfds <= FRAME_MAX_FDS && f->type != 0);
    fuzz_check(f->payload == at + FRAME_HEADER);
}

static enum frame_status decode(const uint8_t *data, size_t size, uint32_t max, struct buf *out,
                                const char **why)
{
    size_t at = 0, used = 0;
    for (;;) {
        struct frame f;
        enum frame_status st = frame_get(data + at, size - at, max, &f, &used, why);
        fuzz_check((st == FRAME_BAD) == (*why != NULL));
        if (st == FRAME_MORE)
            fuzz_check(used > size - at && used <= FRAME_HEADER + (size_t)max);
        if (st != FRAME_OK)
            return st;
        check_frame(data + at, size - at, max, &f, used);
        note(out, &f);
        at += used;
    }
}

/* As a connection does it: bytes come, whole frames go. */
static enum frame_status decode_pieces(const uint8_t *data, size_t size, size_t piece, uint32_t max,
                                       struct buf *out, const char **why)
{
    struct buf in = BUF_INIT;
    enum frame_status st = FRAME_MORE;
    for (size_t at = 0; at < size && st != FRAME_BAD; at += piece) {
        struct frame f;
        size_t used;
        buf_add(&in, data + at, piece < size - at ? piece : size - at);
        while ((st = frame_get(in.data, in.len, max, &f, &used, why)) == FRAME_OK) {
            note(out, &f);
            buf_consume(&in, used);
        }
    }
    buf_deinit(&in);
    return st;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint32_t limits[] = {0, 1, 16, 4096, FRAME_MAX, UINT32_MAX - FRAME_HEADER};
    if (size < 3)
        return 0;
    uint32_t max = limits[data[0] % UTIL_COUNT(limits)];
    size_t piece = data[1] % 64 + 1;
    struct buf whole = BUF_INIT, pieces = BUF_INIT;
    const char *why = NULL, *again = NULL;
    uint8_t *copy = fuzz_copy(data + 2, size - 2);
    enum frame_status st = decode(copy, size - 2, max, &whole, &why);
    enum frame_status other = decode_pieces(copy, size - 2, piece, max, &pieces, &again);
    fuzz_check(st == other && why == again);
    fuzz_check(whole.len == pieces.len);
    fuzz_check(!whole.len || memcmp(whole.data, pieces.data, whole.len) == 0);
    buf_deinit(&whole);
    buf_deinit(&pieces);
    free(copy);
    return 0;
}
