/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stacks.h - asks ranks where their threads are, and reads the answers.
 *
 * The question goes to the worker library's thread, so it is answered whatever Python is doing. Who
 * has not answered within STACKS_DEADLINE_MS is told about by the state of its process.
 */
#ifndef DDIPD_STACKS_H
#define DDIPD_STACKS_H

#include "group.h"
#include "trace.h"

#define STACKS_DEADLINE_MS 2000
#define STACKS_TEXT_MAX (128u * 1024) /* of a rank; what is longer is cut */

struct stacks_rank {
    bool asked, pending;
    char *text; /* faulthandler's; NULL: no answer */
    size_t len;
    uint64_t main;       /* the thread that runs cells */
    enum rank_state was; /* when it was asked */
    char problem[160];   /* why there is no answer; "": there is one, or none yet */
};

struct stacks {
    TAILQ_ENTRY(stacks) link;
    struct group *group;
    uint32_t id;
    uint64_t asked_ns;
    struct stacks_rank *ranks; /* group->spec.ranks of them */
    uv_timer_t timer;          /* the deadline */
    bool all;                  /* all threads, or the main one alone */
    /* Called once: from the loop, or within stacks_end_now. The struct is freed after. */
    void (*done)(void *ctx, struct stacks *s);
    void *ctx;
};

/* ranks: mask, NULL: all. all: other threads too, not the one alone that runs cells. done is not
 * called before it has returned. */
struct stacks *stacks_new(struct group *g, const bool *ranks, bool all,
                          void (*done)(void *ctx, struct stacks *s), void *ctx);
/* The asker has gone; done will not be called. */
void stacks_abandon(struct stacks *s);
/* No more waiting: done is called with what there is. */
void stacks_end_now(struct stacks *s);
/* The group goes away: the same for all of its questions. */
void stacks_end_all(struct group *g);

/* A rank's FRAME_TRACE; and its death. */
void stacks_on_trace(struct group *g, struct rank *r, uint32_t id, const char *text, size_t len);
void stacks_rank_lost(struct group *g, struct rank *r);

/* The line of the user's code a rank is in: the innermost one in the code of a cell. */
struct stacks_place {
    uint32_t execution, cell; /* In[N]; the number here, 0: not known. execution 0: in no cell */
    int64_t line;
    struct trace_text function; /* borrowed from the rank's text */
    struct trace_text source;   /* borrowed from the cell's code; empty: not known */
    char where[200];            /* "Cell In[3], line 7", or what else there is to say */
};
/* l: a frame in a cell's code. */
void stacks_place_line(struct group *g, const struct trace_line *l, struct stacks_place *place);
void stacks_find(const struct stacks *s, int rank, struct stacks_place *place);

/* Members key (groups of ranks at one place, the largest first) and "differ" (who is not where most
 * are). */
void stacks_summary(const struct stacks *s, const char *key, struct jw *w);
/* Members where and user. */
void stacks_place_json(const struct stacks_place *place, struct jw *w);

#endif
