/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cell.c - one execution: a piece of code on some ranks of a group.
 *
 * The code itself is the cell's first event (execute_input), so a replay shows what ran, and the
 * cell is in the journal before any rank hears of it. Records of finished cells are kept up to a
 * bound; their events stay in the journal.
 */
#include "cell.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "log.h"
#include "pool.h"

#define CELL_RECORDS 1000

static const struct job_kind cell_job;

static const char *const cell_status_names[] = {[CELL_NONE] = NULL,
                                                [CELL_OK] = "ok",
                                                [CELL_ERROR] = "error",
                                                [CELL_INTERRUPTED] = "interrupted",
                                                [CELL_LOST] = "lost"};

const char *cell_status_name(enum cell_status s)
{
    return cell_status_names[s];
}

const char *cell_state_name(const struct cell *c)
{
    return c->finished > 0 ? "done" : c->started > 0 ? "running" : "queued";
}

static enum cell_status cell_status_parse(const char *name)
{
    for (int s = CELL_OK; s <= CELL_LOST; s++) {
        if (name && strcmp(name, cell_status_names[s]) == 0)
            return (enum cell_status)s;
    }
    return CELL_ERROR;
}

static struct cell *cell_of(struct job *job)
{
    return (struct cell *)((char *)job - offsetof(struct cell, job));
}

/* --- events --- */

static void cell_event(struct cell *c, int rank, struct buf *members)
{
    group_event(c->group, c->number, rank, members);
    buf_deinit(members);
}

static void cell_status_event(struct cell *c, const char *state, size_t ahead)
{
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    jw_string(&w, "type", "status");
    jw_string(&w, "execution_state", state);
    if (ahead)
        jw_int(&w, "position", (int64_t)ahead);
    cell_event(c, OUTPUT_NO_RANK, &members);
}

static void cell_ranks_json(const struct cell *c, struct jw *w)
{
    jw_array(w, "ranks");
    for (int i = 0; i < c->group->spec.ranks; i++) {
        if (c->ranks[i].takes_part)
            jw_int(w, NULL, i);
    }
    jw_end_array(w);
}

static void cell_input_event(struct cell *c)
{
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    jw_string(&w, "type", "execute_input");
    jw_string(&w, "code", c->code);
    cell_ranks_json(c, &w);
    jw_int(&w, "uid", c->uid);
    c->first_seq = output_last_seq(c->group->output) + 1;
    cell_event(c, OUTPUT_NO_RANK, &members);
    c->first_seq = output_last_seq(c->group->output);
}

static void cell_error_event(struct cell *c, int rank, const char *ename, const char *evalue)
{
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    jw_string(&w, "type", "error");
    jw_string(&w, "ename", ename);
    jw_string(&w, "evalue", evalue);
    jw_array(&w, "traceback");
    char *line = util_printf("%s: %s", ename, evalue);
    jw_string(&w, NULL, line);
    free(line);
    jw_end_array(&w);
    cell_event(c, rank, &members);
}

static void cell_rank_done_event(struct cell *c, int rank, const json *memory)
{
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    jw_string(&w, "type", "rank_done");
    jw_string(&w, "status", cell_status_name(c->ranks[rank].status));
    jw_double(&w, "duration_s", c->ranks[rank].duration_s);
    jw_json(&w, "memory", memory);
    cell_event(c, rank, &members);
}

static void cell_done_event(struct cell *c)
{
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    char key[16];
    jw_string(&w, "type", "done");
    jw_string(&w, "status", cell_status_name(c->status));
    jw_object(&w, "ranks");
    for (int i = 0; i < c->group->spec.ranks; i++) {
        snprintf(key, sizeof(key), "%d", i);
        if (c->ranks[i].takes_part)
            jw_string(&w, key, cell_status_name(c->ranks[i].status));
    }
    jw_end_object(&w);
    cell_event(c, OUTPUT_NO_RANK, &members);
}

/* --- life --- */

static void cell_timer_closed(uv_handle_t *handle)
{
    struct cell *c = handle->data;
    free(c->code);
    free(c->ranks);
    free(c);
}

void cell_close(struct cell *c)
{
    TAILQ_REMOVE(&c->group->cells, c, link);
    c->group->cells_len--;
    uv_close((uv_handle_t *)&c->timer, cell_timer_closed);
}

static void cell_drop_old(struct group *g)
{
    struct cell *c, *next;
    for (c = TAILQ_FIRST(&g->cells); c && g->cells_len > CELL_RECORDS; c = next) {
        next = TAILQ_NEXT(c, link);
        if (c->finished > 0)
            cell_close(c);
    }
}

struct cell *cell_new(struct group *g, const struct cell_spec *spec, struct err *err)
{
    if (group_check_ready(g, err) < 0)
        return NULL;
    struct cell *c = util_calloc(1, sizeof(*c));
    c->job.kind = &cell_job;
    c->group = g;
    if (job_enqueue(g, &c->job, err) < 0) {
        free(c);
        return NULL;
    }
    c->number = ++g->last_cell;
    c->uid = spec->uid;
    c->code = util_strndup(spec->code, spec->code_len);
    c->silent = spec->silent;
    c->store_history = spec->store_history;
    c->execution_count = spec->execution_count;
    c->timeout_s = spec->timeout_s;
    c->created = util_now();
    c->ranks = util_calloc((size_t)g->spec.ranks, sizeof(*c->ranks));
    for (int i = 0; i < g->spec.ranks; i++)
        c->ranks[i].takes_part = !spec->ranks || spec->ranks[i];
    c->timer.data = c;
    uv_timer_init(g->pool->loop, &c->timer);
    TAILQ_INSERT_TAIL(&g->cells, c, link);
    g->cells_len++;
    cell_drop_old(g);
    cell_input_event(c);
    size_t ahead = job_ahead(g, &c->job);
    if (ahead || g->state != GROUP_READY)
        cell_status_event(c, "queued", ahead);
    group_commit(g);
    job_wake(g);
    return c;
}

struct cell *cell_find(struct group *g, uint32_t number)
{
    struct cell *c;
    TAILQ_FOREACH_REVERSE(c, &g->cells, cell_list, link)
    {
        if (c->number == number)
            return c;
    }
    return NULL;
}

uint32_t cell_for_output(struct group *g, uint32_t number)
{
    struct cell *c = number ? cell_find(g, number) : NULL;
    return c && c->finished <= 0 ? number : OUTPUT_NO_CELL;
}

static void cell_on_timeout(uv_timer_t *timer)
{
    struct cell *c = timer->data;
    char text[128];
    snprintf(text, sizeof(text), "the cell ran longer than its %g s", c->timeout_s);
    ladder_interrupt(&c->group->ladder, c, text);
}

static void cell_body(const struct cell *c, struct buf *out)
{
    struct jw w = JW_INIT(out);
    jw_object(&w, NULL);
    jw_string(&w, "code", c->code);
    cell_ranks_json(c, &w);
    if (c->silent)
        jw_bool(&w, "silent", true);
    if (c->store_history >= 0)
        jw_bool(&w, "store_history", c->store_history);
    if (c->execution_count)
        jw_int(&w, "execution_count", c->execution_count);
    jw_end_object(&w);
}

static void cell_start(struct job *job)
{
    struct cell *c = cell_of(job);
    struct group *g = c->group;
    struct buf body = BUF_INIT;
    c->started = util_now();
    cell_status_event(c, "busy", 0);
    group_commit(g);
    cell_body(c, &body);
    for (int i = 0; i < g->spec.ranks; i++) {
        struct rank *r = &g->ranks[i];
        if (!c->ranks[i].takes_part)
            continue;
        r->state = RANK_BUSY;
        r->raising = false;
        r->cell = c->number;
        worker_send(r->worker, FRAME_EXECUTE, c->number, 0, body.data, body.len, -1);
    }
    buf_deinit(&body);
    if (c->timeout_s > 0)
        uv_timer_start(&c->timer, cell_on_timeout, (uint64_t)(c->timeout_s * 1000), 0);
}

static void cell_finish_if_done(struct cell *c)
{
    enum cell_status worst = CELL_OK;
    static const int gravity[] = {
        [CELL_NONE] = 0, [CELL_OK] = 0, [CELL_INTERRUPTED] = 1, [CELL_ERROR] = 2, [CELL_LOST] = 3};
    for (int i = 0; i < c->group->spec.ranks; i++) {
        if (!c->ranks[i].takes_part)
            continue;
        if (c->ranks[i].status == CELL_NONE)
            return;
        if (gravity[c->ranks[i].status] > gravity[worst])
            worst = c->ranks[i].status;
    }
    c->status = worst;
    c->finished = util_now();
    uv_timer_stop(&c->timer);
    cell_done_event(c);
    log_debug("group=%s cell=%u: %s after %.3f s", c->group->spec.name, c->number,
              cell_status_name(worst), c->started > 0 ? c->finished - c->started : 0.0);
    ladder_cell_done(&c->group->ladder, c);
    job_done(c->group, &c->job);
}

static void cell_rank_ends(struct cell *c, int rank, enum cell_status status, double duration_s,
                           const json *memory)
{
    struct cell_rank *r = &c->ranks[rank];
    if (!r->takes_part || r->status != CELL_NONE)
        return;
    r->status = status;
    r->duration_s = duration_s;
    cell_rank_done_event(c, rank, memory);
    cell_finish_if_done(c);
    if (status == CELL_ERROR && c->finished <= 0)
        ladder_rank_failed(&c->group->ladder, c, &c->group->ranks[rank]);
}

void cell_rank_done(struct group *g, struct rank *r, uint32_t number, const json *report)
{
    struct cell *c = cell_find(g, number);
    if (!c || c->finished > 0)
        return; /* abandoned meanwhile */
    struct err err = ERR_INIT;
    double duration_s = 0;
    if (json_get_double(report, "duration_s", 0, 1e9, &duration_s, &err) < 0)
        log_warn("group=%s rank=%d: %s", g->spec.name, r->index, err.msg);
    enum cell_status status = cell_status_parse(json_string(json_get(report, "status")));
    cell_rank_ends(c, r->index, status, duration_s, json_get(report, "memory"));
}

static double cell_age(const struct cell *c)
{
    return c->started > 0 ? util_now() - c->started : 0;
}

static void cell_rank_lost(struct job *job, struct rank *rank, const char *why)
{
    struct cell *c = cell_of(job);
    if (!c->ranks[rank->index].takes_part || c->ranks[rank->index].status != CELL_NONE)
        return;
    cell_error_event(c, rank->index, "RankDied", why);
    cell_rank_ends(c, rank->index, CELL_LOST, cell_age(c), NULL);
    if (c->finished <= 0)
        ladder_rank_lost(&c->group->ladder, c, rank);
}

static void cell_abandon(struct job *job, const char *why)
{
    struct cell *c = cell_of(job);
    cell_error_event(c, OUTPUT_NO_RANK, "CellLost", why);
    double age = cell_age(c);
    for (int i = 0; i < c->group->spec.ranks && c->finished <= 0; i++)
        cell_rank_ends(c, i, CELL_LOST, age, NULL);
    group_commit(c->group);
}

/* A rank's code has raised; it says what when it has formatted that. */
void cell_rank_raising(struct group *g, struct rank *r, uint32_t number)
{
    struct cell *c = cell_find(g, number);
    if (!c || !cell_rank_runs(c, r->index))
        return;
    r->raising = true;
    ladder_rank_failed(&g->ladder, c, r);
}

bool cell_rank_runs(const struct cell *c, int rank)
{
    return c->ranks[rank].takes_part && c->ranks[rank].status == CELL_NONE;
}

void cell_send_interrupt(struct cell *c)
{
    for (int i = 0; i < c->group->spec.ranks; i++) {
        if (cell_rank_runs(c, i) && c->group->ranks[i].worker)
            worker_send(c->group->ranks[i].worker, FRAME_INTERRUPT, c->number, 0, NULL, 0, -1);
    }
}

static void cell_cancel(struct cell *c)
{
    cell_error_event(c, OUTPUT_NO_RANK, "KeyboardInterrupt", "interrupted before it started");
    for (int i = 0; i < c->group->spec.ranks && c->finished <= 0; i++)
        cell_rank_ends(c, i, CELL_INTERRUPTED, 0, NULL);
    group_commit(c->group);
}

static uint32_t cell_job_interrupt(struct job *job)
{
    struct cell *c = cell_of(job);
    if (c->started > 0)
        ladder_interrupt(&c->group->ladder, c, "interrupted by a client");
    else
        cell_cancel(c);
    return c->number;
}

static const struct job_kind cell_job = {
    .start = cell_start,
    .rank_lost = cell_rank_lost,
    .abandon = cell_abandon,
    .interrupt = cell_job_interrupt,
};
