/* SPDX-License-Identifier: Apache-2.0 */
/*
 * worker.h - one process of a group (a rank, or its store): frames, output pipes, exit.
 *
 * Life: worker_new -> worker_launch (or a template forks it and worker_set_pid follows) -> the
 * process connects and the hub calls worker_attach -> frames both ways -> the process ends ->
 * on_exit, once, after everything it sent or printed has been delivered -> worker_close.
 *
 * Callbacks may call any worker function but worker_close of the same worker is deferred: the
 * struct is freed from the loop, after the callback has returned.
 */
#ifndef DDIPD_WORKER_H
#define DDIPD_WORKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <uv.h>

#include "err.h"
#include "frame.h"
#include "wire.h"

struct hub;
struct worker;

struct worker_events {
    /* HELLO and every frame after it, in order, none twice. fds are closed after the call unless
     * the callee sets them to -1. */
    void (*on_frame)(void *ctx, const struct frame *f, int fds[FRAME_MAX_FDS]);
    /* Bytes the process wrote to fd 1 or 2; never cut inside a UTF-8 character. */
    void (*on_output)(void *ctx, int fd, const char *text, size_t len);
    /* A batch of the two above is over: commit, then worker_ack. */
    void (*on_batch)(void *ctx);
    /* The process is gone. status: as from waitpid; last_words: what it printed before HELLO. */
    void (*on_exit)(void *ctx, int status, const char *last_words);
};

/* label goes in front of log lines ("group=default rank=0"). */
struct worker *worker_new(struct hub *hub, const char *label, const struct worker_events *events,
                          void *ctx, struct err *err) ERR_MUST_CHECK;

/* What proves the process to be this worker's when it connects. Never log it. */
const char *worker_secret(const struct worker *w);
pid_t worker_pid(const struct worker *w); /* 0: not started */
bool worker_connected(const struct worker *w);

/* The write end that becomes fd 1 and 2 until the process sets up its own; the caller closes it. */
int worker_early_output(struct worker *w, struct err *err) ERR_MUST_CHECK;
void worker_set_pid(struct worker *w, pid_t pid);

/* There will be no process: as if it had ended with exit code `code` after printing `why`. */
void worker_never(struct worker *w, int code, const char *why);

/* The hub's: takes the connection and the descriptors that came with HELLO. */
void worker_attach(struct worker *w, struct wire *wire, const struct frame *hello,
                   int fds[FRAME_MAX_FDS]);
/* The hub's: waitpid said so. */
void worker_reaped(struct worker *w, int status);

/* Queues a frame; fd -1: none (otherwise it stays the caller's). Lost when the process is gone. */
void worker_send(struct worker *w, enum frame_type type, uint32_t cell, uint32_t arg,
                 const void *payload, size_t len, int fd);
/* Everything delivered so far is in the journal. */
void worker_ack(struct worker *w);
/* Signal to the whole process group, as soon as there is one. The reason is logged. */
void worker_kill(struct worker *w, int signal, const char *reason);

/* Forgets the worker; on_exit will not come any more. A live process is killed. */
void worker_close(struct worker *w);

#endif
