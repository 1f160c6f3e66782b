/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cell.h - one execution: a piece of code on some ranks of a group.
 *
 * Its events are in the group's output; `done` is always the last of them and comes exactly once,
 * when every participating rank has finished it or is dead.
 */
#ifndef DDIPD_CELL_H
#define DDIPD_CELL_H

#include <stdbool.h>
#include <stdint.h>

#include "group.h"

enum cell_status { CELL_NONE, CELL_OK, CELL_ERROR, CELL_INTERRUPTED, CELL_LOST };

struct cell_rank {
    bool takes_part;
    enum cell_status status; /* CELL_NONE: not done yet */
    double duration_s;
    int64_t collectives; /* that its process group had begun by then; -1: not said */
};

struct cell {
    TAILQ_ENTRY(cell) link;
    struct job job;
    struct group *group;
    uint32_t number;
    uid_t uid;
    char *code;
    char *app_command; /* NULL: none */
    bool silent;
    int store_history;                 /* -1: not said */
    int64_t execution_count;           /* what the front end calls the cell; 0: not said */
    double timeout_s;                  /* 0: none */
    double created, started, finished; /* 0: not yet */
    uint64_t first_seq, last_seq;      /* its events' numbers; last_seq: once it is done */
    enum cell_status status;           /* CELL_NONE: not done yet */
    struct cell_rank *ranks;           /* group->spec.ranks of them */
    bool interrupt_asked;              /* while nobody was connected to hear of it */
    uv_timer_t timer;
};

struct cell_spec {
    const char *code;
    size_t code_len;
    const char *app_command; /* for the group's app, before the code; NULL: none */
    const bool *ranks;       /* NULL: all */
    bool silent;
    int store_history;
    int64_t execution_count;
    double timeout_s;
    struct once_key once; /* its uid asks; the text is borrowed */
};

const char *cell_status_name(enum cell_status s); /* NULL for CELL_NONE */
const char *cell_state_name(const struct cell *c);

/* Accepts a cell: journals it and queues it. NULL: *err says why not. Never runs anything before it
 * has returned to the loop. */
struct cell *cell_new(struct group *g, const struct cell_spec *spec,
                      struct err *err) ERR_MUST_CHECK;
/* The cell that output of cell `number` belongs to: itself, or none once it is done. */
uint32_t cell_for_output(struct group *g, uint32_t number);
struct cell *cell_find(struct group *g, uint32_t number);
struct cell *cell_running(const struct group *g); /* NULL: none, or the running job is no cell */
void cell_close(struct cell *c);                  /* forgets the record */

/* A rank has reported FRAME_DONE for cell `number`. */
void cell_rank_done(struct group *g, struct rank *r, uint32_t number, uint64_t rank_seq,
                    const json *report);
/* Is it known why ranks of the cell may have lost their connections to others? */
bool cell_cause_known(struct group *g, uint32_t number);
/* For ladder.c. */
void cell_rank_raising(struct group *g, struct rank *r, uint32_t number, bool lost_peers);
bool cell_rank_runs(const struct cell *c, int rank);

/* For recall.c and roster.c: a cell that an earlier daemon accepted. */
struct cell *cell_make(struct group *g, uint32_t number);
void cell_input_members(const struct cell *c, struct jw *w); /* of execute_input */
enum cell_status cell_status_parse(const char *name);
void cell_drop_old(struct group *g);
void cell_resume(struct cell *c); /* it goes on, on the ranks that are there */

#endif
