/* SPDX-License-Identifier: Apache-2.0 */
/* sweep.h - ends processes with all that descends from them, without blocking the loop. */
#ifndef DDIPD_SWEEP_H
#define DDIPD_SWEEP_H

#include <stdbool.h>
#include <sys/queue.h>
#include <uv.h>

#include "kin.h"

struct sweep;

/* Somebody waits for all sweeps that were asked for before it. */
struct sweep_wait {
    TAILQ_ENTRY(sweep_wait) link;
    uint64_t last; /* the number of the newest of them */
    void (*done)(void *ctx);
    void *ctx;
};

struct sweep *sweep_new(uv_loop_t *loop);
/* What was asked for is still done, but nobody is told. Frees from the loop. */
void sweep_close(struct sweep *s);

/* Ends the process, if it lives, and its descendants. */
void sweep_add(struct sweep *s, struct kin_root root);
/* False: nothing to wait for. True: w is the caller's until done is called, from the loop. */
bool sweep_wait(struct sweep *s, struct sweep_wait *w);
/* The hub's: waitpid gave this. False: it is none of ours. */
bool sweep_reaped(struct sweep *s, pid_t pid, int status);

#endif
