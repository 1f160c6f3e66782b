/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pipe.h - one of a rank's fds 1 and 2, read so that no byte is lost or told twice.
 *
 * Positions count bytes since the rank's start. Bytes are looked at (tee) while they stay in the
 * pipe, and taken out of it only when the journal has them: a daemon that is killed in between
 * leaves them to the next one. While no daemon is there the rank's library takes bytes out and
 * sends them as frames that say their position.
 *
 *   ...journalled | delivered, not journalled | held | in the pipe, not looked at yet
 *                 taken                       at     got
 */
#ifndef DDIPD_PIPE_H
#define DDIPD_PIPE_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"
#include "frame.h"
#include "util.h"

/* What looking needs; one for all pipes of the daemon. */
struct pipe_tools {
    int scratch[2], null_fd;
};

struct pipe {
    int fd;          /* -1: none */
    uint64_t taken;  /* out of the pipe, by whomever */
    uint64_t got;    /* position after the last byte we have had in hand */
    struct buf held; /* the bytes before `got` that are not delivered yet */
};

enum pipe_status { PIPE_MORE, PIPE_EMPTY, PIPE_END };

int pipe_tools_open(struct pipe_tools *t, struct err *err) ERR_MUST_CHECK;
void pipe_tools_close(struct pipe_tools *t);

/* Where the next byte to be delivered stands. */
uint64_t pipe_at(const struct pipe *p);

/* A daemon takes up reading (again): everything up to `at` is in the journal. */
void pipe_resume(struct pipe *p, uint64_t at, const struct frame_pipes *shared, int num);

/* Adds to what is held, not past `max` bytes. Does nothing while frames are to bring what comes
 * first. */
enum pipe_status pipe_look(struct pipe *p, const struct pipe_tools *t, size_t max);

/* Text the library took out, ending at `end` (modulo 2^32); what is known already is left out.
 * Returns how many bytes before it we will never see. */
uint64_t pipe_add(struct pipe *p, uint32_t end, const uint8_t *text, size_t len);

/* Bytes up to `end` were dropped by the library. Returns how many we will never see. */
uint64_t pipe_skip(struct pipe *p, uint64_t end);

/* The first len held bytes were delivered. */
void pipe_delivered(struct pipe *p, size_t len);

/* What was delivered is in the journal: takes it out. The start of a character that is not complete
 * goes into the shared memory, or the pipe would stay readable for as long as the rest is missing.
 */
void pipe_take(struct pipe *p, const struct pipe_tools *t, struct frame_pipes *shared, int num);

#endif
