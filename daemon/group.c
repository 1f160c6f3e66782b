/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.c - one group: its ranks, its state, and the queue of what they are to do.
 *
 * Every change of state goes through group_set_state, which knows the legal ones. Callbacks of
 * workers arrive here and are passed on; what follows from them (a job ends, the next starts, a
 * waiter is answered) happens within the same call, so a group's struct must not be freed there:
 * group_free_if_done runs only from the closing of its timers.
 */
#include "group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "adopt.h"
#include "cell.h"
#include "config.h"
#include "hub.h"
#include "log.h"
#include "pool.h"
#include "rank.h"
#include "release.h"
#include "request.h"
#include "roster.h"
#include "stacks.h"
#include "start.h"
#include "store.h"
#include "template.h"

#define GROUP_EXIT_MS 3000  /* from "leave now" to SIGKILL */
#define GROUP_COMMIT_MS 100 /* until a journal that took nothing is tried again */

static void group_on_late(uv_timer_t *timer);
static void group_on_commit(uv_timer_t *timer);

static const char *const group_state_names[] = {
    [GROUP_STARTING] = "starting", [GROUP_READY] = "ready",       [GROUP_DEGRADED] = "degraded",
    [GROUP_FAILED] = "failed",     [GROUP_STOPPING] = "stopping",
};

static const bool group_transitions[][5] = {
    [GROUP_STARTING] = {[GROUP_READY] = true,
                        [GROUP_DEGRADED] = true,
                        [GROUP_FAILED] = true,
                        [GROUP_STOPPING] = true},
    [GROUP_READY] = {[GROUP_STARTING] = true, [GROUP_DEGRADED] = true, [GROUP_STOPPING] = true},
    [GROUP_DEGRADED] = {[GROUP_STARTING] = true, [GROUP_STOPPING] = true},
    [GROUP_FAILED] = {[GROUP_STOPPING] = true},
    [GROUP_STOPPING] = {false},
};

const char *group_state_name(const struct group *g)
{
    return g->state == GROUP_READY && g->running ? "busy" : group_state_names[g->state];
}

const char *group_state_text(const struct group *g)
{
    return group_state_names[g->state];
}

bool group_state_parse(const char *text, enum group_state *state)
{
    for (size_t i = 0; text && i < UTIL_COUNT(group_state_names); i++) {
        if (strcmp(text, group_state_names[i]) == 0) {
            *state = (enum group_state)i;
            return true;
        }
    }
    return false;
}

/* --- events and state --- */

void group_event(struct group *g, uint32_t cell, int rank, const struct buf *members)
{
    output_add(g->output, (struct output_origin){.cell = cell, .rank = rank},
               (const char *)members->data, members->len);
}

int group_commit(struct group *g)
{
    struct err err = ERR_INIT;
    bool failing = output_failing(g->output);
    int rc = output_commit(g->output, &err);
    if (rc < 0 && !failing)
        log_error("group=%s: %s; its ranks wait until that works", g->spec.name, err.msg);
    if (rc < 0)
        group_write_later(g);
    return rc;
}

void group_write_later(struct group *g)
{
    uv_timer_start(&g->commit_timer, group_on_commit, GROUP_COMMIT_MS, 0);
}

static void group_on_commit(uv_timer_t *timer)
{
    struct group *g = timer->data;
    if (g->roster_failing)
        roster_save(g);
    if (group_commit(g) < 0)
        return;
    for (int i = 0; i < g->spec.ranks; i++) {
        if (g->ranks[i].worker)
            worker_resume(g->ranks[i].worker);
    }
    job_wake(g);
}

void group_set_state(struct group *g, enum group_state state, const char *why)
{
    if (!group_transitions[g->state][state]) {
        log_error("group=%s: illegal step from %s to %s", g->spec.name, group_state_names[g->state],
                  group_state_names[state]);
        return;
    }
    log_info("group=%s: %s -> %s%s%s", g->spec.name, group_state_names[g->state],
             group_state_names[state], why ? ": " : "", why ? why : "");
    g->state = state;
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    jw_string(&w, "type", "status");
    jw_string(&w, "execution_state", group_state_names[state]);
    jw_int(&w, "generation", g->generation);
    if (why)
        jw_string(&w, "reason", why);
    group_event(g, OUTPUT_NO_CELL, OUTPUT_NO_RANK, &members);
    buf_deinit(&members);
    group_commit(g);
}

void group_wait(struct group *g, struct group_wait *w)
{
    TAILQ_INSERT_TAIL(&g->waits, w, link);
}

void group_unwait(struct group *g, struct group_wait *w)
{
    TAILQ_REMOVE(&g->waits, w, link);
}

void group_tell(struct group *g, bool gone, const struct err *err)
{
    struct group_wait *w, *next;
    for (w = TAILQ_FIRST(&g->waits); w; w = next) {
        next = TAILQ_NEXT(w, link);
        if (w->for_gone == gone) {
            TAILQ_REMOVE(&g->waits, w, link);
            w->done(w->ctx, g, err);
        }
    }
}

/* --- jobs --- */

/* "0,2", as ?ranks= takes it. */
static const char *group_dead_ranks(const struct group *g, char *out, size_t cap)
{
    size_t n = 0;
    out[0] = '\0';
    for (int i = 0; i < g->spec.ranks && n + 12 < cap; i++) {
        if (!g->ranks[i].worker)
            n += (size_t)snprintf(out + n, cap - n, "%s%d", n ? "," : "", i);
    }
    return out;
}

int group_check_ready(const struct group *g, struct err *err)
{
    char dead[256];
    if (g->state == GROUP_READY || g->state == GROUP_STARTING)
        return 0;
    err_set(err, ERR_CONFLICT, "the group %s is %s%s%s", g->spec.name, group_state_names[g->state],
            g->reason.msg[0] ? ": " : "", g->reason.msg);
    if (g->state == GROUP_DEGRADED)
        err_hint(err,
                 "POST /v1/groups/%s/restart?ranks=%s starts what is dead again, the others keep "
                 "their namespaces",
                 g->spec.name, group_dead_ranks(g, dead, sizeof(dead)));
    else if (g->state == GROUP_FAILED)
        err_hint(err, "DELETE /v1/groups/%s and create it again", g->spec.name);
    return -1;
}

/* --- leaving --- */

/* What was told to leave and has not left gets no second asking. */
static void group_end_worker(struct group *g, struct worker *w)
{
    if (templates_forget(g->pool->templates, w))
        worker_never(w, 0, "given up before it had started");
    else
        worker_kill(w, "did not leave when told to");
}

static void group_on_stop_late(uv_timer_t *timer)
{
    struct group *g = timer->data;
    for (int i = 0; i < g->spec.ranks; i++) {
        if (g->ranks[i].worker && g->ranks[i].leaving)
            group_end_worker(g, g->ranks[i].worker);
    }
    if (g->store && (g->state == GROUP_STOPPING || g->state == GROUP_FAILED))
        group_end_worker(g, g->store);
}

static void group_leave_all(struct group *g)
{
    for (int i = 0; i < g->spec.ranks; i++)
        rank_leave(&g->ranks[i], false);
    if (g->store && worker_connected(g->store))
        worker_send(g->store, FRAME_EXIT, 0, 0, NULL, 0, -1);
    else if (g->store)
        worker_kill(g->store, "told to leave before it had reported");
    uv_timer_start(&g->stop_timer, group_on_stop_late, GROUP_EXIT_MS, 0);
}

void group_stop(struct group *g, const char *why)
{
    if (g->state == GROUP_STOPPING)
        return;
    struct err err = ERR_INIT;
    err_set(&err, ERR_CONFLICT, "the group %s was stopped: %s", g->spec.name, why);
    uv_timer_stop(&g->start_timer);
    group_set_state(g, GROUP_STOPPING, why); /* first: the end of a cell starts nothing any more */
    job_abandon_all(g, why);
    group_tell(g, false, &err);
    group_leave_all(g);
    group_finish_stop(g);
}

static void group_closed(uv_handle_t *handle)
{
    struct group *g = handle->data;
    if (--g->handles)
        return;
    group_spec_deinit(&g->spec);
    once_free(g->once);
    free(g->dir);
    free(g->ranks);
    free(g);
}

static void group_free(struct group *g)
{
    struct cell *c;
    stacks_end_all(g);
    while ((c = TAILQ_FIRST(&g->cells)) != NULL)
        cell_close(c);
    for (int i = 0; i < g->spec.ranks; i++)
        rank_close(&g->ranks[i]);
    worker_close(g->store);
    output_close(g->output, true);
    ladder_close(&g->ladder, group_closed);
    uv_close((uv_handle_t *)&g->next_timer, group_closed);
    uv_close((uv_handle_t *)&g->start_timer, group_closed);
    uv_close((uv_handle_t *)&g->stop_timer, group_closed);
    uv_close((uv_handle_t *)&g->release_timer, group_closed);
    uv_close((uv_handle_t *)&g->commit_timer, group_closed);
}

static void group_on_swept(void *ctx)
{
    struct group *g = ctx;
    g->sweeping = false;
    group_finish_stop(g);
}

static bool group_is_swept(struct group *g)
{
    g->sweep = (struct sweep_wait){.done = group_on_swept, .ctx = g};
    g->sweeping = sweep_wait(hub_sweep(g->pool->hub), &g->sweep);
    return !g->sweeping;
}

void group_finish_stop(struct group *g)
{
    if (g->state != GROUP_STOPPING || g->store || g->gone)
        return;
    for (int i = 0; i < g->spec.ranks; i++) {
        if (g->ranks[i].worker)
            return;
    }
    if (g->sweeping || !group_is_swept(g))
        return;
    g->gone = true;
    log_info("group=%s: gone", g->spec.name);
    group_tell(g, true, NULL);
    pool_remove(g->pool, g);
    group_free(g);
}

/* --- starting --- */

/* A generation: everyone present joins it once the store is there too. */
static void group_begin(struct group *g)
{
    g->generation++;
    g->aborted = false;
    roster_save(g);
    memset(&g->reason, 0, sizeof(g->reason));
    uv_timer_start(&g->start_timer, group_on_late, g->pool->config->start_timeout_s * 1000, 0);
}

void group_start_failed(struct group *g, const struct err *err)
{
    if (g->state != GROUP_STARTING)
        return;
    g->adopting = false;
    uv_timer_stop(&g->start_timer);
    g->reason = *err;
    bool never_ready = !g->was_ready;
    group_set_state(g, never_ready ? GROUP_FAILED : GROUP_DEGRADED, err->msg);
    job_abandon_all(g, err->msg);
    if (never_ready)
        group_leave_all(g);
    else
        release_begin(g);
    group_tell(g, false, &g->reason);
}

static void group_on_late(uv_timer_t *timer)
{
    struct group *g = timer->data;
    struct err err = ERR_INIT;
    struct buf missing = BUF_INIT;
    for (int i = 0; i < g->spec.ranks; i++) {
        if (g->ranks[i].state != RANK_IDLE)
            buf_addf(&missing, " %d (%s)", i, rank_state_name(g->ranks[i].state));
    }
    err_set(&err, ERR_TIMEOUT, "not ready after %llu s; waiting for%s%s%s",
            (unsigned long long)g->pool->config->start_timeout_s,
            g->store_port ? "" : " the store,", missing.len ? " rank" : "",
            missing.len ? buf_cstr(&missing) : "");
    err_hint(&err, "a slow machine may need a larger start_timeout_s in the configuration");
    buf_deinit(&missing);
    group_start_failed(g, &err);
}

void group_rank_present(struct group *g)
{
    if (g->adopting)
        adopt_settle(g);
    if (g->adopting || g->state != GROUP_STARTING || !g->store_port || !worker_pid(g->store))
        return;
    for (int i = 0; i < g->spec.ranks; i++) {
        struct rank *r = &g->ranks[i];
        if (r->leaving || (r->state != RANK_PRESENT && r->state != RANK_IDLE))
            return;
        if (!worker_pid(r->worker))
            return; /* a template tells it late: without it a later daemon could not adopt the rank
                     */
    }
    struct err err = ERR_INIT;
    struct buf body = BUF_INIT;
    if (start_join_body(g, &body, &err) < 0) {
        group_start_failed(g, &err);
    } else {
        for (int i = 0; i < g->spec.ranks; i++) {
            g->ranks[i].state = RANK_JOINING;
            worker_send(g->ranks[i].worker, FRAME_JOIN, 0, 0, body.data, body.len, -1);
        }
    }
    buf_deinit(&body);
}

void group_rank_joined(struct group *g)
{
    for (int i = 0; i < g->spec.ranks; i++) {
        if (g->ranks[i].state != RANK_IDLE)
            return;
    }
    uv_timer_stop(&g->start_timer);
    g->was_ready = true;
    roster_save(g); /* with every pid */
    group_set_state(g, GROUP_READY, NULL);
    group_tell(g, false, NULL);
    job_wake(g);
}

static int group_start_all(struct group *g, struct err *err)
{
    if (store_start(g, err) < 0)
        return -1;
    for (int i = 0; i < g->spec.ranks; i++) {
        if (rank_start(&g->ranks[i], err) < 0)
            return -1;
    }
    return 0;
}

/* --- a rank dies --- */

/* What ranks are at, cell or requests, has lost this one. */
static void group_tell_jobs(struct group *g, struct rank *r, const struct err *why)
{
    if (g->running)
        g->running->kind->rank_lost(g->running, r, why->msg);
    struct request *q, *next;
    for (q = TAILQ_FIRST(&g->requests); q; q = next) {
        next = TAILQ_NEXT(q, link);
        if (&q->job != g->running)
            q->job.kind->rank_lost(&q->job, r, why->msg);
    }
    group_commit(g);
}

void group_degrade(struct group *g, struct rank *r, const struct err *why)
{
    g->reason = *why;
    group_set_state(g, GROUP_DEGRADED, why->msg);
    group_tell_jobs(g, r, why);
    job_abandon_waiting(g, why->msg);
    group_commit(g);
}

void group_rank_gone(struct group *g, struct rank *r, const struct err *why)
{
    if (g->adopting)
        adopt_settle(g);
    else if (why && g->state == GROUP_STARTING)
        group_start_failed(g, why);
    else if (why && g->state == GROUP_READY && !r->killed)
        group_degrade(g, r, why);
    else if (why)
        group_tell_jobs(g, r, why);
    group_finish_stop(g);
}

/* Everybody joins the next generation, who was killed comes back. */
void group_again(struct group *g, const char *why)
{
    struct err err = ERR_INIT;
    int rc = 0;
    group_begin(g);
    if (g->state != GROUP_STARTING)
        group_set_state(g, GROUP_STARTING, why);
    if (!g->store)
        rc = store_start(g, &err);
    for (int i = 0; i < g->spec.ranks && rc == 0; i++) {
        if (!g->ranks[i].worker)
            rc = rank_start(&g->ranks[i], &err);
    }
    if (rc < 0)
        group_start_failed(g, &err);
    else
        group_rank_present(g);
}

void group_cell_stopped(struct group *g)
{
    bool dead = false;
    for (int i = 0; i < g->spec.ranks; i++)
        dead |= !g->ranks[i].worker;
    if (g->state == GROUP_READY && (g->aborted || dead))
        group_again(g, g->ladder.why);
}

/* --- what others ask for --- */

struct group *group_make(struct pool *pool, struct group_spec *spec, char *dir, struct err *err)
{
    struct output *output = output_open(dir, spec->name, pool->config->journal_limit, err);
    if (!output) {
        group_spec_deinit(spec);
        free(dir);
        return NULL;
    }
    struct group *g = util_calloc(1, sizeof(*g));
    g->pool = pool;
    g->spec = *spec;
    g->dir = dir;
    g->output = output;
    g->created = util_now();
    g->once = once_new();
    g->ranks = util_calloc((size_t)spec->ranks, sizeof(*g->ranks));
    for (int i = 0; i < spec->ranks; i++) {
        g->ranks[i] = (struct rank){.group = g,
                                    .index = i,
                                    .state = RANK_DEAD,
                                    .memory_bytes = -1,
                                    .gpu = spec->gpus ? spec->gpus[i] : -1};
    }
    TAILQ_INIT(&g->queue);
    TAILQ_INIT(&g->cells);
    TAILQ_INIT(&g->requests);
    TAILQ_INIT(&g->stacks);
    TAILQ_INIT(&g->waits);
    output_set_owner(output, &roster_owner, g);
    ladder_init(&g->ladder, g);
    g->handles++;
    uv_timer_t *timers[] = {&g->next_timer, &g->start_timer, &g->stop_timer, &g->release_timer,
                            &g->commit_timer};
    for (size_t i = 0; i < UTIL_COUNT(timers); i++) {
        uv_timer_init(pool->loop, timers[i]);
        timers[i]->data = g;
        g->handles++;
    }
    return g;
}

struct group *group_new(struct pool *pool, struct group_spec *spec, struct err *err)
{
    char id[9];
    if (util_random_hex(id, 4, err) < 0) {
        group_spec_deinit(spec);
        return NULL;
    }
    char *dir = util_printf("%s/groups/%s.%s", pool->config->state_dir, spec->name, id);
    struct group *g = group_make(pool, spec, dir, err);
    if (!g)
        return NULL;
    if (roster_write(g, err) < 0) { /* nothing is started that could not be recorded */
        group_free(g);
        return NULL;
    }
    group_begin(g);
    if (group_start_all(g, err) < 0) {
        group_free(g);
        return NULL;
    }
    roster_save(g);
    pool_add(pool, g);
    return g;
}

void group_spec_deinit(struct group_spec *spec)
{
    free(spec->name);
    free(spec->app);
    free(spec->python);
    free(spec->cwd);
    free(spec->backend);
    free(spec->gpus);
    json_free(spec->env);
    once_key_deinit(&spec->once);
    *spec = (struct group_spec){0};
}

int group_restart(struct group *g, const bool *mask, struct err *err)
{
    if (g->state != GROUP_READY && g->state != GROUP_DEGRADED)
        return err_set(err, ERR_CONFLICT, "the group %s is %s and cannot be restarted now",
                       g->spec.name, group_state_names[g->state]);
    group_begin(g);
    group_set_state(g, GROUP_STARTING, "restart");
    job_abandon_all(g, "the group was restarted");
    int rc = g->store ? 0 : store_start(g, err);
    for (int i = 0; i < g->spec.ranks && rc == 0; i++) {
        struct rank *r = &g->ranks[i];
        if (!rank_alive(r))
            rc = rank_start(r, err);
        else if (!mask || mask[i])
            rank_leave(r, true);
    }
    release_begin(g);
    uv_timer_start(&g->stop_timer, group_on_stop_late, GROUP_EXIT_MS, 0);
    if (rc < 0)
        group_start_failed(g, err);
    return rc;
}

uint32_t group_interrupt(struct group *g, uint32_t cell)
{
    struct cell *c = cell ? cell_find(g, cell) : NULL;
    struct job *job = c && c->finished <= 0 ? &c->job : NULL;
    if (!cell && g->running)
        job = g->running;
    else if (!cell && !g->was_ready)
        job = job_first_cell(g); /* what its sender sees as running: it waits for the start only */
    return job && job->kind->interrupt ? job->kind->interrupt(job) : 0;
}
