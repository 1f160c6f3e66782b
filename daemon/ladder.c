/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ladder.c - a cell that will not end by itself is stopped, rung by rung, namespaces kept.
 *
 * An abort while collectives are live can leave a rank hanging for good in gloo, so ranks are
 * always interrupted first and given a moment to settle; and it must reach all ranks of the group,
 * also those the cell is not about, or some of the waiting ones are missed.
 */
#include "ladder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cell.h"
#include "log.h"
#include "pool.h"
#include "rank.h"
#include "stacks.h"

#define LADDER_SETTLE_MS 250
#define LADDER_AGAIN_MS 300
#define LADDER_LOOK_MS 50 /* an abort releases ranks, also those that have not looked yet */
#define LADDER_FORMAT_NS                                                                           \
    (10ull * 1000 * 1000 * 1000) /* patience with a rank that formats an error */
#define LADDER_ABORT_MS 2000     /* how long aborting is tried when nobody asked for the stop */

static void ladder_on_timer(uv_timer_t *timer);

void ladder_init(struct ladder *l, struct group *g)
{
    *l = (struct ladder){.group = g};
    uv_timer_init(g->pool->loop, &l->timer);
    l->timer.data = g;
}

void ladder_close(struct ladder *l, void (*closed)(uv_handle_t *handle))
{
    uv_close((uv_handle_t *)&l->timer, closed);
}

static uint64_t ladder_grace_ms(const struct ladder *l)
{
    return (uint64_t)(l->group->spec.grace_s * 1000);
}

/* --- events --- */

static void ladder_event(struct ladder *l, const struct cell *c, const char *rung)
{
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    jw_string(&w, "type", "status");
    jw_string(&w, "execution_state", "stopping");
    jw_string(&w, "rung", rung);
    jw_string(&w, "reason", l->why);
    jw_array(&w, "ranks");
    for (int i = 0; i < l->group->spec.ranks; i++) {
        if (cell_rank_runs(c, i))
            jw_int(&w, NULL, i);
    }
    jw_end_array(&w);
    group_event(l->group, c->number, OUTPUT_NO_RANK, &members);
    buf_deinit(&members);
    group_commit(l->group);
    log_info("group=%s cell=%u: %s: %s", l->group->spec.name, c->number, rung, l->why);
}

/* --- where ranks are --- */

static void ladder_on_stacks(void *ctx, struct stacks *s)
{
    struct ladder *l = ctx;
    struct cell *c = cell_find(l->group, l->cell);
    l->stacks = NULL;
    if (!c || c->finished > 0)
        return;
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    jw_string(&w, "type", "status");
    jw_string(&w, "execution_state", "stopping");
    jw_string(&w, "before", l->before);
    stacks_summary(s, "stacks", &w);
    group_event(l->group, c->number, OUTPUT_NO_RANK, &members);
    buf_deinit(&members);
    group_commit(l->group);
}

/*
 * Asks where the ranks are that still run, before something is done to them. There is no waiting
 * for the answer: a rank takes frames in order, and makes its dump before it returns to Python.
 */
static void ladder_look(struct ladder *l, const struct cell *c, const char *before)
{
    struct group *g = l->group;
    if (l->stacks) { /* one question at a time: the answer to the last one is still to come */
        if (strcmp(before, "kill") == 0)
            l->before = before;
        return;
    }
    bool *mask = util_calloc((size_t)g->spec.ranks, sizeof(*mask)), any = false;
    for (int i = 0; i < g->spec.ranks; i++) {
        mask[i] = cell_rank_runs(c, i) && !g->ranks[i].raising && rank_alive(&g->ranks[i]);
        any |= mask[i];
    }
    l->before = before;
    if (any)
        l->stacks = stacks_new(g, mask, false, ladder_on_stacks, l);
    free(mask);
}

/* --- rungs --- */

/* Does the rank still wait? One that is formatting an exception has been released. */
static bool ladder_stuck(const struct ladder *l, const struct cell *c, int rank)
{
    return cell_rank_runs(c, rank) && (!l->group->ranks[rank].raising ||
                                       util_monotonic_ns() > l->abort_until_ns + LADDER_FORMAT_NS);
}

static bool ladder_any_stuck(const struct ladder *l, const struct cell *c)
{
    for (int i = 0; i < l->group->spec.ranks; i++) {
        if (ladder_stuck(l, c, i))
            return true;
    }
    return false;
}

static void ladder_set(struct ladder *l, enum ladder_rung rung, uint64_t ms)
{
    l->rung = rung;
    uv_timer_start(&l->timer, ladder_on_timer, ms, 0);
}

/* A rank that formats an exception is let finish, or its traceback would be lost. */
static void ladder_send_interrupt(const struct ladder *l, const struct cell *c)
{
    const struct group *g = l->group;
    for (int i = 0; i < g->spec.ranks; i++) {
        bool due = l->asked ? cell_rank_runs(c, i) : ladder_stuck(l, c, i);
        if (due && g->ranks[i].worker)
            worker_send(g->ranks[i].worker, FRAME_INTERRUPT, c->number, 0, NULL, 0, -1);
    }
}

static void ladder_step_interrupt(struct ladder *l, struct cell *c, uint64_t patience_ms)
{
    ladder_event(l, c, "interrupt");
    ladder_look(l, c, "interrupt");
    ladder_send_interrupt(l, c);
    l->abort_until_ns = util_monotonic_ns();
    l->looked = false;
    ladder_set(l, LADDER_INTERRUPT,
               patience_ms > LADDER_LOOK_MS ? patience_ms - LADDER_LOOK_MS : 0);
}

static void ladder_send_abort(struct ladder *l)
{
    struct group *g = l->group;
    g->aborted = true;
    for (int i = 0; i < g->spec.ranks; i++)
        rank_abort(&g->ranks[i]);
}

static void ladder_step_abort(struct ladder *l, const struct cell *c)
{
    uint64_t patience = l->asked ? ladder_grace_ms(l) : LADDER_ABORT_MS;
    if (patience < LADDER_ABORT_MS)
        patience = LADDER_ABORT_MS;
    l->abort_until_ns = util_monotonic_ns() + patience * 1000000;
    ladder_event(l, c, "abort");
    if (!l->looked)
        ladder_look(l, c, "abort");
    l->looked = false;
    ladder_send_abort(l);
    ladder_set(l, LADDER_ABORT, LADDER_AGAIN_MS);
}

/* Whoever is killed the next time leaves word where it was. */
static void ladder_look_in_time(struct ladder *l, const struct cell *c)
{
    uint64_t next = util_monotonic_ns() + LADDER_AGAIN_MS * 1000000ull;
    if (l->looked || next <= l->abort_until_ns || !ladder_any_stuck(l, c))
        return;
    l->looked = true;
    ladder_look(l, c, "kill");
}

static void ladder_step_kill(struct ladder *l, struct cell *c)
{
    struct group *g = l->group;
    if (l->stacks)
        stacks_end_now(l->stacks); /* whoever has not answered will not any more */
    ladder_event(l, c, "kill");
    ladder_set(l, LADDER_KILL, LADDER_ABORT_MS);
    for (int i = 0; i < g->spec.ranks; i++) {
        if (!ladder_stuck(l, c, i) || !rank_alive(&g->ranks[i]))
            continue;
        g->ranks[i].killed = true;
        worker_kill(g->ranks[i].worker, "stuck after the process group was aborted");
    }
}

static void ladder_look_or_abort(struct ladder *l, struct cell *c)
{
    if (l->looked) {
        ladder_step_abort(l, c);
        return;
    }
    l->looked = true;
    ladder_look(l, c, "abort");
    ladder_set(l, LADDER_INTERRUPT, LADDER_LOOK_MS);
}

static void ladder_on_timer(uv_timer_t *timer)
{
    struct group *g = timer->data;
    struct ladder *l = &g->ladder;
    struct cell *c = cell_find(g, l->cell);
    if (!c || c->finished > 0)
        return;
    switch (l->rung) {
    case LADDER_GRACE:
        if (ladder_any_stuck(l, c))
            ladder_step_interrupt(l, c, LADDER_SETTLE_MS);
        else
            ladder_set(l, LADDER_GRACE, LADDER_AGAIN_MS);
        break;
    case LADDER_INTERRUPT:
        if (ladder_any_stuck(l, c))
            ladder_look_or_abort(l, c);
        else
            ladder_set(l, LADDER_INTERRUPT, LADDER_AGAIN_MS);
        break;
    case LADDER_ABORT:
    case LADDER_KILL:
        if (util_monotonic_ns() > l->abort_until_ns && ladder_any_stuck(l, c)) {
            ladder_step_kill(l, c);
        } else {
            ladder_look_in_time(l, c);
            ladder_send_abort(l);
            ladder_set(l, l->rung, LADDER_AGAIN_MS);
        }
        break;
    case LADDER_NONE:
        break;
    }
}

/* --- what sets it off --- */

static bool ladder_begin(struct ladder *l, const struct cell *c, const char *why)
{
    if (l->rung != LADDER_NONE)
        return false;
    l->cell = c->number;
    l->asked = false;
    snprintf(l->why, sizeof(l->why), "%s", why);
    return true;
}

void ladder_rank_failed(struct ladder *l, struct cell *c, const struct rank *r)
{
    char why[128];
    snprintf(why, sizeof(why),
             "rank %d raised an exception and others are still running %g s later", r->index,
             l->group->spec.grace_s);
    if (!ladder_begin(l, c, why))
        return;
    l->abort_until_ns = util_monotonic_ns() + ladder_grace_ms(l) * 1000000;
    ladder_set(l, LADDER_GRACE, ladder_grace_ms(l));
}

void ladder_rank_lost(struct ladder *l, struct cell *c, const struct rank *r)
{
    char why[64];
    snprintf(why, sizeof(why), "rank %d died", r->index);
    if (l->rung == LADDER_GRACE)
        l->rung = LADDER_NONE; /* no grace for a rank that will never come */
    if (ladder_begin(l, c, why))
        ladder_step_interrupt(l, c, LADDER_SETTLE_MS);
}

void ladder_interrupt(struct ladder *l, struct cell *c, const char *who)
{
    if (l->rung == LADDER_INTERRUPT && l->asked) {
        ladder_step_abort(l, c);
        return;
    }
    if (l->rung == LADDER_GRACE)
        l->rung = LADDER_NONE;
    if (!ladder_begin(l, c, who))
        return;
    l->asked = true;
    ladder_step_interrupt(l, c, ladder_grace_ms(l));
}

void ladder_cell_ends(struct ladder *l, const struct cell *c)
{
    if (l->stacks && l->cell == c->number)
        stacks_end_now(l->stacks);
}

void ladder_cell_done(struct ladder *l, const struct cell *c)
{
    if (l->rung == LADDER_NONE || l->cell != c->number)
        return;
    uv_timer_stop(&l->timer);
    l->rung = LADDER_NONE;
    group_cell_stopped(l->group);
}
