/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire.h - frames and file descriptors over one Unix stream socket, non-blocking.
 *
 * It owns the socket, the bytes read and not yet parsed, the descriptors that came with them, and
 * the frames queued for sending. It does not watch the socket: its owner polls and calls.
 */
#ifndef DDIPD_WIRE_H
#define DDIPD_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "frame.h"
#include "util.h"

#define WIRE_FDS 16

struct wire_out;

struct wire {
    int fd; /* -1: closed */
    struct buf in;
    size_t used;       /* bytes of `in` already handed out */
    int fds[WIRE_FDS]; /* received, not yet taken */
    size_t fds_len;
    TAILQ_HEAD(, wire_out) out;
    size_t out_bytes;
};

/* One non-blocking sendmsg with nfds descriptors. Returns bytes sent, 0: the socket is full, -1:
 * the peer is gone. */
ssize_t wire_write(int fd, const void *data, size_t len, const int *fds, size_t nfds);

enum wire_status { WIRE_FRAME, WIRE_EMPTY, WIRE_CLOSED, WIRE_BAD };

void wire_init(struct wire *w, int fd); /* takes fd */
void wire_deinit(struct wire *w);       /* closes every descriptor it holds */

/* Reads once, at most `limit` bytes. WIRE_FRAME: bytes came, call wire_next until it says
 * otherwise. */
enum wire_status wire_fill(struct wire *w, size_t limit);

/*
 * WIRE_FRAME: *f borrows from w until the next wire_fill; fds[0..f->nfds) are the caller's to
 * close. WIRE_BAD: *why says what the peer did wrong.
 */
enum wire_status wire_next(struct wire *w, uint32_t max, struct frame *f, int fds[FRAME_MAX_FDS],
                           const char **why);

/* Queues f with f->nfds descriptors of its own copies (fds stay the caller's), and sends what it
 * can. -1: the peer is gone. */
int wire_send(struct wire *w, const struct frame *f, const int *fds);
/* Sends what is queued. -1: the peer is gone; otherwise true in *pending if some is left. */
int wire_flush(struct wire *w, bool *pending);

#endif
