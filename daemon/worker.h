/* SPDX-License-Identifier: Apache-2.0 */
/*
 * worker.h - one process of a group (a rank, or its store): frames, output pipes, exit.
 *
 * Life: worker_new -> a process is started and worker_set_pid says so (or worker_adopt) -> the
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

#include "channel.h"
#include "err.h"

struct hub;
struct worker;

#define WORKER_STATUS_UNKNOWN (-1) /* no child of ours, so the kernel does not say */

/* label goes in front of log lines ("group=default rank=0"). */
struct worker *worker_new(struct hub *hub, const char *label, const struct worker_events *events,
                          void *ctx, struct err *err) ERR_MUST_CHECK;

/* What an earlier daemon left about a process. */
struct worker_past {
    pid_t pid;
    uint64_t started; /* kin_start_time: a pid can be another process by now */
    const char *secret;
    uint64_t seen;        /* the newest frame in the journal */
    uint64_t pipe_end[2]; /* positions in fd 1 and 2 up to which the journal has all */
};

/* As worker_new, for a process that is there and will connect again. ERR_GONE: it is not there. */
struct worker *worker_adopt(struct hub *hub, const char *label, const struct worker_events *events,
                            void *ctx, const struct worker_past *past,
                            struct err *err) ERR_MUST_CHECK;

/* What proves the process to be this worker's when it connects. Never log it. */
const char *worker_secret(const struct worker *w);
pid_t worker_pid(const struct worker *w);        /* 0: not started */
uint64_t worker_started(const struct worker *w); /* kin_start_time */
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
/* A batch that on_batch could not commit is committed now. */
void worker_resume(struct worker *w);
/* The process has dropped text it wrote to fd 1 and 2, up to these positions, and counted it. */
void worker_skip(struct worker *w, const uint64_t until[2]);
/* Ends the process, its descendants first, as soon as there is one. The reason is logged. */
void worker_kill(struct worker *w, const char *reason);

/* Forgets the worker; on_exit will not come any more. A live process is killed. */
void worker_close(struct worker *w);

#endif
