/* SPDX-License-Identifier: Apache-2.0 */
/*
 * frame.c - the wire between ddipd and a rank: bytes <-> frames, pure, no I/O.
 *
 * The header is checked before anything is waited for, so a peer that sends nonsense is found out
 * at once and can never make the reader reserve more than max + FRAME_HEADER bytes.
 */
#include "frame.h"

static void frame_put(uint8_t *out, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        out[i] = (uint8_t)(value >> (8 * i));
}

static uint64_t frame_int(const uint8_t *in, int bytes)
{
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; i--)
        value = value << 8 | in[i];
    return value;
}

void frame_put_header(uint8_t out[FRAME_HEADER], const struct frame *f)
{
    out[0] = FRAME_VERSION;
    out[1] = f->type;
    out[2] = f->flags;
    out[3] = f->nfds;
    frame_put(out + 4, f->length, 4);
    frame_put(out + 8, f->number, 8);
    frame_put(out + 16, f->cell, 4);
    frame_put(out + 20, f->arg, 4);
    frame_put(out + 24, f->out, 4);
    frame_put(out + 28, f->err, 4);
}

enum frame_status frame_get(const uint8_t *data, size_t len, uint32_t max, struct frame *f,
                            size_t *used, const char **why)
{
    *used = FRAME_HEADER;
    *why = NULL;
    if (len >= 1 && data[0] != FRAME_VERSION)
        *why = "unknown protocol version";
    else if (len >= 2 && data[1] == 0)
        *why = "frame type 0";
    else if (len >= 3 && (data[2] & ~FRAME_FLAGS_KNOWN) != 0)
        *why = "unknown flag";
    else if (len >= 4 && data[3] > FRAME_MAX_FDS)
        *why = "too many file descriptors";
    else if (len >= 8 && frame_int(data + 4, 4) > max)
        *why = "payload longer than the limit";
    if (*why)
        return FRAME_BAD;
    if (len < FRAME_HEADER)
        return FRAME_MORE;
    *f = (struct frame){
        .type = data[1],
        .flags = data[2],
        .nfds = data[3],
        .length = (uint32_t)frame_int(data + 4, 4),
        .number = frame_int(data + 8, 8),
        .cell = (uint32_t)frame_int(data + 16, 4),
        .arg = (uint32_t)frame_int(data + 20, 4),
        .out = (uint32_t)frame_int(data + 24, 4),
        .err = (uint32_t)frame_int(data + 28, 4),
        .payload = data + FRAME_HEADER,
    };
    *used = FRAME_HEADER + (size_t)f->length;
    return len < *used ? FRAME_MORE : FRAME_OK;
}
