/* SPDX-License-Identifier: Apache-2.0 */
/*
 * channel.h - the connection with a process: frames both ways, and the text of its fds 1 and 2.
 *
 * What comes is delivered in the order in which the process made it, nothing twice, in batches: a
 * batch is committed by the callee, and only then is it acknowledged to the process and taken out
 * of its pipes. While a commit fails nothing more is read, so the process waits and memory stays
 * bounded.
 */
#ifndef DDIPD_CHANNEL_H
#define DDIPD_CHANNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "frame.h"
#include "pipe.h"
#include "wire.h"

struct hub;

/* What the owner of a process is told. */
struct worker_events {
    /* The process is known. It may have said HELLO already. May be NULL. */
    void (*on_pid)(void *ctx);
    /* HELLO and every frame after it, in order, none twice. fds are closed after the call unless
     * the callee sets them to -1. False: the callee cannot take it now; it is offered again in a
     * few milliseconds, and nothing else of the process before. Only if may_wait. */
    bool (*on_frame)(void *ctx, const struct frame *f, int fds[FRAME_MAX_FDS], bool may_wait);
    /* Bytes the process wrote to fd 1 or 2, ending at position `end`; never cut inside a UTF-8
     * character. */
    void (*on_output)(void *ctx, int fd, const char *text, size_t len, uint64_t end);
    /* Bytes written to fd 1 or 2 that nobody has any more. */
    void (*on_lost_text)(void *ctx, int fd, uint64_t bytes);
    /* A batch of the above is over: commit it. False: the journal takes nothing now; then nothing
     * more comes until worker_resume. */
    bool (*on_batch)(void *ctx);
    /* The process is gone. status: as from waitpid, or WORKER_STATUS_UNKNOWN; last_words: what it
     * printed before HELLO. */
    void (*on_exit)(void *ctx, int status, const char *last_words);
};

struct channel;

struct channel_text {
    struct channel *channel;
    int num; /* 1 stdout, 2 stderr */
    uv_poll_t poll;
    struct pipe pipe;
};

struct channel {
    struct hub *hub;
    const char *label;
    const struct worker_events *events; /* NULL: nobody listens any more */
    void *ctx;
    void (*on_idle)(struct channel *c); /* after channel_close: nothing is left to wait for */
    struct wire wire;
    uv_poll_t poll;
    bool connected;
    uv_timer_t pace;
    uint64_t window_ns; /* start of the window, and the batches in it */
    unsigned window_batches;
    struct channel_text texts[2];
    struct frame_pipes *counters; /* shared with the rank; NULL: not yet */
    uint64_t seen, acked;         /* the process's own frame numbers */
    bool batch;                   /* delivered, not committed yet */
    bool stalled;                 /* the journal takes nothing: neither do we */
    bool refused;                 /* the callee did not take a frame: it is offered again */
    bool last;                    /* the process is gone: nothing can wait */
    bool closing;
    int depth;   /* callbacks under way */
    int handles; /* not closed yet */
};

void channel_init(struct channel *c, struct hub *hub, const char *label,
                  const struct worker_events *events, void *ctx);
/* Frees what it holds, in time: on_idle comes, maybe from within. */
void channel_close(struct channel *c, void (*on_idle)(struct channel *c));
bool channel_idle(const struct channel *c);

/* Callbacks run between these two, so that closing inside one frees nothing under our feet. */
bool channel_enter(struct channel *c);
void channel_leave(struct channel *c);

/* An earlier daemon's journal has all up to this frame, and to these positions of fd 1 and 2. */
void channel_start_from(struct channel *c, uint64_t seen, const uint64_t pipe_end[2]);
/* Takes the connection and the descriptors that came with HELLO. */
void channel_attach(struct channel *c, struct wire *wire, const struct frame *hello,
                    int fds[FRAME_MAX_FDS]);

/* Queues a frame; fd -1: none. Lost when there is no connection. */
void channel_send(struct channel *c, enum frame_type type, uint32_t cell, uint32_t arg,
                  const void *payload, size_t len, int fd);

/* The process is gone: reads what it has left. False: the journal does not take it now. */
bool channel_finish(struct channel *c);
/* Tries again to commit. False: still no. */
bool channel_resume(struct channel *c);
/* Bytes of fd 1 and 2 up to these positions were dropped by the process, and counted by it. */
void channel_skip(struct channel *c, const uint64_t until[2]);

#endif
