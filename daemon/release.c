/* SPDX-License-Identifier: Apache-2.0 */
/*
 * release.c - ranks that wait for others that will not come are freed for the next generation.
 *
 * A restart ends the cell in the record at once, but not in the ranks that stay: one of them may
 * wait in a collective for another that stays too and has left the cell, and learns nothing of the
 * restart. The ladder cannot help, its cell is done. The order of the steps is the ladder's, for
 * the same reasons: interrupt, settle, abort on all ranks, kill.
 */
#include "release.h"

#include "group.h"
#include "pool.h"
#include "rank.h"

#define RELEASE_SETTLE_MS 250
#define RELEASE_AGAIN_MS 300
#define RELEASE_KILL_MS 10000 /* beyond the grace: formatting a traceback takes seconds */

static bool release_at_work(const struct rank *r)
{
    const struct group *g = r->group;
    bool over = (g->state == GROUP_STARTING || g->state == GROUP_DEGRADED) && !g->running;
    return rank_alive(r) && r->state == RANK_BUSY && over;
}

static bool release_due(const struct rank *r)
{
    bool joining = rank_alive(r) && r->state == RANK_JOINING && r->group->state == GROUP_DEGRADED;
    return joining || release_at_work(r);
}

static void release_on_timer(uv_timer_t *timer)
{
    struct group *g = timer->data;
    bool any = false, late = uv_now(g->pool->loop) > g->release_until_ms;
    for (int i = 0; i < g->spec.ranks; i++)
        any |= release_due(&g->ranks[i]);
    if (!any)
        uv_timer_stop(timer);
    for (int i = 0; any && i < g->spec.ranks; i++) {
        struct rank *r = &g->ranks[i];
        if (!late || !release_at_work(r)) {
            rank_abort(r);
        } else if (!r->leaving && !r->killed) {
            r->killed = true;
            worker_kill(r->worker, "stuck in a cell that the group has left");
        }
    }
}

void release_begin(struct group *g)
{
    bool working = false;
    for (int i = 0; i < g->spec.ranks; i++) {
        struct rank *r = &g->ranks[i];
        if (!release_at_work(r))
            continue;
        working = true;
        if (!r->leaving) /* that one has been interrupted */
            worker_send(r->worker, FRAME_INTERRUPT, r->cell, 0, NULL, 0, -1);
    }
    g->release_until_ms =
        uv_now(g->pool->loop) + (uint64_t)(g->spec.grace_s * 1000) + RELEASE_KILL_MS;
    uv_timer_start(&g->release_timer, release_on_timer, working ? RELEASE_SETTLE_MS : 0,
                   RELEASE_AGAIN_MS);
}
