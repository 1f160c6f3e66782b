/* SPDX-License-Identifier: Apache-2.0 */
/*
 * frame.h - the wire between ddipd and a rank: bytes <-> frames, pure, no I/O.
 *
 * A frame is a 32-byte little-endian header and a payload (proto/protocol.md has the table):
 *
 *   0 version u8 | 1 type u8 | 2 flags u8 | 3 nfds u8 | 4 length u32 | 8 number u64
 *   16 cell u32  | 20 arg u32 | 24 out u32 | 28 err u32 | 32 payload[length]
 *
 * Numbers may get new values; existing ones never change. Raise FRAME_VERSION when the header or
 * the meaning of an existing type changes.
 */
#ifndef DDIPD_FRAME_H
#define DDIPD_FRAME_H

#include <stddef.h>
#include <stdint.h>

#define FRAME_VERSION 1
#define FRAME_HEADER 32
#define FRAME_MAX (16u * 1024 * 1024) /* largest payload either side accepts */
#define FRAME_MAX_FDS 3               /* file descriptors that may ride with one frame */

enum frame_type {
    /* rank -> daemon. All but HELLO carry the rank's own consecutive `number` and are kept by the
     * rank until the daemon acknowledges that number. */
    FRAME_HELLO = 1,  /* JSON; nfds=3: read ends of fd 1 and 2, their counters; number: the last */
    FRAME_STREAM = 2, /* raw text of `cell`; arg: 1 stdout, 2 stderr */
    FRAME_EVENT = 3,  /* JSON object of `cell`; its first key is "type" */
    FRAME_DONE = 4,   /* JSON: the rank has finished `cell` */
    FRAME_REPLY = 5, /* JSON; answers the REQUEST or QUESTION whose arg is repeated; nfds=1: payload
                      * memfd */
    FRAME_STATE = 6, /* JSON: joined, failed, ... the process group */
    FRAME_GAP = 7,   /* JSON: what the rank had to drop while no daemon was there, and how far its
                      * library has read fd 1 and 2 ("out", "err") */
    FRAME_TRACE = 8, /* text: the Python stacks of the rank's threads; arg: that of the STACKS */

    /* daemon -> rank */
    FRAME_WELCOME = 16,   /* answers HELLO; number: last number the daemon has seen */
    FRAME_ACK = 17,       /* number: everything up to it is in the journal */
    FRAME_EXECUTE = 18,   /* JSON: run `cell` */
    FRAME_INTERRUPT = 19, /* raise KeyboardInterrupt in `cell`, if it is still running */
    FRAME_REQUEST = 20,   /* JSON; arg: request id; nfds=1: payload memfd */
    FRAME_JOIN = 21,      /* JSON: join the process group of a generation */
    FRAME_EXIT = 22,      /* leave now */
    FRAME_ABORT = 23,     /* shut the process group's connections under whoever waits in them */
    FRAME_STACKS = 24,   /* say where you are; arg: a growing id; payload: "all" threads, or none */
    FRAME_QUESTION = 25, /* JSON; a REQUEST that is answered beside the cell that runs */
};

#define FRAME_FLAG_PIPE 0x01   /* STREAM: read from fd 1 or 2; out or err: position after it */
#define FRAME_FLAGS_KNOWN 0x01 /* another bit is an error */

struct frame {
    uint8_t type, flags, nfds;
    uint32_t length;
    uint64_t number;
    uint32_t cell, arg;
    /* From a rank: bytes ever written to fd 1 and 2 when the frame was made, modulo 2^32. What was
     * written before is older than the frame, what comes after is newer. */
    uint32_t out, err;
    const uint8_t *payload; /* borrowed */
};

/*
 * The counters of a rank's pipes, in memory that rank and daemon share (the third descriptor of
 * HELLO, a memory file of exactly this size, sealed). Whoever reads a pipe makes seq odd, reads,
 * adds to taken, and makes seq even; so bytes ever written = taken + what the pipe holds now. carry
 * is the daemon's alone: the start of a character that it has taken out and not told yet.
 */
struct frame_pipes {
    _Atomic uint32_t seq, pad;
    _Atomic uint64_t taken[2];
    struct frame_carry {
        _Atomic uint64_t pos; /* of the first of them */
        _Atomic uint32_t len;
        uint8_t bytes[4];
    } carry[2];
};

enum frame_status { FRAME_OK = 0, FRAME_MORE = 1, FRAME_BAD = -1 };

/* Writes the header of f. */
void frame_put_header(uint8_t out[FRAME_HEADER], const struct frame *f);

/*
 * Reads the first frame of data[0..len). max bounds the payload length.
 *
 * FRAME_OK:   *f is filled, f->payload points into data, *used is the frame's size.
 * FRAME_MORE: the frame is not complete; *used is its size if the header is there, else
 * FRAME_HEADER. FRAME_BAD:  *why says what is wrong; the connection is of no use any more.
 */
enum frame_status frame_get(const uint8_t *data, size_t len, uint32_t max, struct frame *f,
                            size_t *used, const char **why);

#endif
