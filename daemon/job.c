/* SPDX-License-Identifier: Apache-2.0 */
/*
 * job.c - what a group does for somebody, one after another, in order of arrival.
 *
 * The next job starts from a timer of 0 ms, never from inside the call that ended the one before or
 * that brought a new one: whoever calls is not to be surprised by its own job.
 */
#include "job.h"

#include "group.h"
#include "pool.h"
#include "request.h"

int job_check_room(const struct group *g, struct err *err)
{
    if (group_check_ready(g, err) < 0)
        return -1;
    if (g->queue_len < g->pool->config->queue_limit)
        return 0;
    err_set(err, ERR_UNAVAILABLE, "the group %s already has %zu cells and requests waiting",
            g->spec.name, g->queue_len);
    return err_hint(err, "wait for some to finish, or interrupt");
}

void job_enqueue(struct group *g, struct job *job)
{
    TAILQ_INSERT_TAIL(&g->queue, job, link);
    job->queued = true;
    g->queue_len++;
}

static void job_on_next(uv_timer_t *timer)
{
    struct group *g = timer->data;
    struct job *job = TAILQ_FIRST(&g->queue);
    if (g->state != GROUP_READY || g->running || !job || output_failing(g->output))
        return; /* nothing runs that is not in the journal; group_commit's retry wakes us */
    TAILQ_REMOVE(&g->queue, job, link);
    job->queued = false;
    g->queue_len--;
    g->running = job;
    job->kind->start(job);
}

void job_wake(struct group *g)
{
    uv_timer_start(&g->next_timer, job_on_next, 0, 0);
}

void job_done(struct group *g, struct job *job)
{
    if (job->queued) {
        TAILQ_REMOVE(&g->queue, job, link);
        job->queued = false;
        g->queue_len--;
    }
    if (g->running == job)
        g->running = NULL;
    job_wake(g);
}

struct job *job_first_cell(const struct group *g)
{
    struct job *job;
    TAILQ_FOREACH(job, &g->queue, link)
    {
        if (job->kind->interrupt)
            break;
    }
    return job;
}

size_t job_ahead(const struct group *g, const struct job *job)
{
    const struct job *j;
    size_t ahead = g->running != NULL;
    if (!job->queued)
        return 0;
    TAILQ_FOREACH(j, &g->queue, link)
    {
        if (j == job)
            break;
        ahead++;
    }
    return ahead;
}

void job_abandon_waiting(struct group *g, const char *why)
{
    struct job *job;
    while ((job = TAILQ_FIRST(&g->queue)) != NULL)
        job->kind->abandon(job, why);
}

void job_abandon_all(struct group *g, const char *why)
{
    if (g->running)
        g->running->kind->abandon(g->running, why);
    job_abandon_waiting(g, why);
    struct request *r;
    while ((r = TAILQ_FIRST(&g->requests)) != NULL)
        r->job.kind->abandon(&r->job, why);
}
