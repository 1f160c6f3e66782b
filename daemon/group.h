/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.h - one group: its ranks, its state, and the queue of what they are to do.
 *
 * Cells and requests (jobs) run one after another in order of arrival; complete and inspect
 * requests need not wait for their turn in the queue. Results travel through output and through a
 * request's own callback, never as return values.
 */
#ifndef DDIPD_GROUP_H
#define DDIPD_GROUP_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>
#include <uv.h>

#include "err.h"
#include "frame.h"
#include "job.h"
#include "json.h"
#include "ladder.h"
#include "once.h"
#include "oom.h"
#include "output.h"
#include "sweep.h"
#include "worker.h"

struct pool;
struct group;
struct cell;
struct request;
struct stacks;

enum group_state {
    GROUP_STARTING, /* processes start, or join a new generation */
    GROUP_READY,
    GROUP_DEGRADED, /* a rank is dead or did not join; the others live */
    GROUP_FAILED,   /* never became ready */
    GROUP_STOPPING,
};

enum rank_state {
    RANK_STARTING, /* no HELLO yet */
    RANK_PRESENT,  /* connected, in no process group */
    RANK_JOINING,
    RANK_IDLE,
    RANK_BUSY,
    RANK_DEAD,
};

struct rank {
    struct group *group;
    int index;             /* the rank */
    struct worker *worker; /* NULL: no process */
    enum rank_state state;
    uint32_t cell;        /* the newest cell sent to it: stray output belongs to it */
    int gpu;              /* place among the daemon's GPUs, or -1 */
    bool leaving;         /* told to go: its exit is no accident */
    bool respawn;         /* to be started again once it is gone */
    bool killed;          /* by us, because it was stuck: it is started again by itself */
    bool raising;         /* its code has ended in an exception, which is being formatted */
    bool lost_peers;      /* ... which only says that a connection to another rank ended */
    bool untold;          /* ... which came before anybody was stopped, and has not been told yet */
    uint64_t old_frames;  /* frames up to this number were made under an earlier daemon */
    uint64_t released_ns; /* since when an error that follows from another waits for that */
    int64_t memory_bytes; /* resident, as last told; -1: not yet */
    struct oom oom;
    struct buf crash; /* what it wrote to fd 2 from Python's "Fatal Python error" on */
};

/* What a request to create a group said, with defaults filled in. */
struct group_spec {
    char *name, *app, *python, *cwd, *backend;
    json *env; /* object of strings, or NULL */
    int ranks;
    int *gpus; /* per rank, or NULL */
    double grace_s;
    uid_t uid;
    struct once_key once; /* what it was asked for under; a copy */
};

/* Somebody waits for the group to be ready (err NULL), to have failed, or to be gone. */
struct group_wait {
    TAILQ_ENTRY(group_wait) link;
    bool for_gone;
    void (*done)(void *ctx, struct group *g, const struct err *err);
    void *ctx;
};

TAILQ_HEAD(cell_list, cell);
TAILQ_HEAD(request_list, request);
TAILQ_HEAD(stacks_list, stacks);

struct group {
    TAILQ_ENTRY(group) link;
    struct pool *pool;
    struct group_spec spec;
    enum group_state state;
    struct err reason; /* why it is degraded or failed */
    char *dir;         /* what outlives the daemon: the journal and the roster */
    double created;
    uint32_t generation;
    bool was_ready;         /* at least once */
    bool gone;              /* stopped, and no process is left */
    enum group_state found; /* what an earlier daemon's journal told */
    bool adopting;          /* waits for ranks that an earlier daemon started */
    bool aborted;           /* the present generation was: the next cell needs a new one */
    bool roster_failing;    /* group.json is not as it should be: it could not be written */
    struct rank *ranks;     /* spec.ranks of them */

    struct worker *store;
    char store_host[64];
    int store_port; /* 0: not there yet */

    struct output *output;
    struct job_list queue;
    size_t queue_len;
    struct job *running;
    struct cell_list cells; /* newest last */
    size_t cells_len;
    uint32_t last_cell, last_request;
    struct once *once;            /* keys that cells were asked for with */
    struct request_list requests; /* sent to ranks */
    struct stacks_list stacks;    /* not answered yet */
    uint32_t last_stacks;

    TAILQ_HEAD(, group_wait) waits;
    struct ladder ladder;
    uv_timer_t next_timer;  /* 0 ms: looks for the next job from the loop, never from a callback */
    uv_timer_t start_timer; /* the deadline of GROUP_STARTING */
    uv_timer_t stop_timer;  /* processes told to leave are killed */
    uv_timer_t release_timer;
    uint64_t release_until_ms; /* on the loop's clock: then the stuck ranks are killed */
    uv_timer_t commit_timer;   /* the disk took nothing: tries again */
    struct sweep_wait sweep;   /* stopped: what the ranks had started is being ended */
    bool sweeping;
    int handles;
};

/* "busy" is a ready group with a running job; the text has it as "ready". */
const char *group_state_name(const struct group *g);
const char *group_state_text(const struct group *g);
bool group_state_parse(const char *text, enum group_state *state);

/* A group without processes whose events are in dir; spec's and dir's contents are taken in any
 * case. NULL: *err, nothing is left. */
struct group *group_make(struct pool *pool, struct group_spec *spec, char *dir,
                         struct err *err) ERR_MUST_CHECK;
/* Starts the processes. spec's contents are taken in any case. NULL: *err, nothing is left. */
struct group *group_new(struct pool *pool, struct group_spec *spec, struct err *err) ERR_MUST_CHECK;
void group_spec_deinit(struct group_spec *spec);

/* Ends all jobs, then all processes; group_wait with for_gone tells when. */
void group_stop(struct group *g, const char *why);
/* Starts the given ranks again (mask[i], NULL: all and the store); the others keep their state. */
int group_restart(struct group *g, const bool *mask, struct err *err) ERR_MUST_CHECK;
/* Interrupts a cell that is running or waiting (0: the running one). Returns its number, or 0 when
 * there is nothing to interrupt. */
uint32_t group_interrupt(struct group *g, uint32_t cell);

/* w is the caller's until done was called or group_unwait. */
void group_wait(struct group *g, struct group_wait *w);
void group_unwait(struct group *g, struct group_wait *w);

/* For rank.c and start.c: something that may move the group along. */
void group_rank_present(struct group *g);
void group_finish_stop(struct group *g); /* if the last process is gone */
void group_rank_joined(struct group *g);
void group_start_failed(struct group *g, const struct err *err);
void group_rank_gone(struct group *g, struct rank *r, const struct err *why); /* NULL: as told */

/* For ladder.c: a cell that had to be stopped is over. */
void group_cell_stopped(struct group *g);

/* For adopt.c. */
void group_tell(struct group *g, bool gone, const struct err *err); /* those who wait */
void group_set_state(struct group *g, enum group_state state, const char *why);
void group_degrade(struct group *g, struct rank *r, const struct err *why);
void group_again(struct group *g, const char *why); /* a new generation, of all ranks */

/* For cell.c and request.c. */
int group_check_ready(const struct group *g, struct err *err) ERR_MUST_CHECK;
void group_event(struct group *g, uint32_t cell, int rank, const struct buf *members);
int group_commit(struct group *g);       /* -1: logged; what was added is kept */
void group_write_later(struct group *g); /* tries again what the disk has not taken */

#endif
