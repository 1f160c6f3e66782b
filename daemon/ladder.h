/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ladder.h - a cell that will not end by itself is stopped, rung by rung, namespaces kept.
 *
 * Rungs: wait (a grace), interrupt every rank (KeyboardInterrupt), abort the process group on every
 * rank (whoever waits in a collective gets an exception), kill the ranks that are still stuck.
 * Every rung is an event of the cell, and another tells where its ranks were just before. An
 * aborted group joins a new generation before its next cell.
 */
#ifndef DDIPD_LADDER_H
#define DDIPD_LADDER_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

struct group;
struct cell;
struct rank;
struct stacks;

enum ladder_rung { LADDER_NONE, LADDER_GRACE, LADDER_INTERRUPT, LADDER_ABORT, LADDER_KILL };

struct ladder {
    struct group *group;
    uv_timer_t timer;
    enum ladder_rung rung;
    uint32_t cell;
    bool asked;              /* somebody interrupted; otherwise a rank failed */
    uint64_t abort_until_ns; /* then the stuck ranks are killed */
    char why[256];
    struct stacks *stacks; /* where ranks are, asked for before a rung; NULL: not now */
    const char *before;    /* that rung */
    bool looked;           /* before the next rung */
};

void ladder_init(struct ladder *l, struct group *g);
void ladder_close(struct ladder *l, void (*closed)(uv_handle_t *handle));

/* A rank has failed in the cell while others go on: they get the group's grace. */
void ladder_rank_failed(struct ladder *l, struct cell *c, const struct rank *r);
/* A rank has died in the cell: the others may be waiting for it. */
void ladder_rank_lost(struct ladder *l, struct cell *c, const struct rank *r);
/* Somebody wants the cell to stop. Asking again goes one rung up. */
void ladder_interrupt(struct ladder *l, struct cell *c, const char *who);
/* The cell is about to be done: events of it come now or never. */
void ladder_cell_ends(struct ladder *l, const struct cell *c);
/* The cell is done. */
void ladder_cell_done(struct ladder *l, const struct cell *c);

#endif
