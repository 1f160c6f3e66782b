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

enum cell_status cell_status_parse(const char *name)
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

/* What ranks are told, and so what a later daemon needs to tell them again. */
static void cell_request_members(const struct cell *c, struct jw *w)
{
    jw_string(w, "code", c->code);
    cell_ranks_json(c, w);
    if (c->app_command)
        jw_string(w, "app_command", c->app_command);
    if (c->silent)
        jw_bool(w, "silent", true);
    if (c->store_history >= 0)
        jw_bool(w, "store_history", c->store_history);
    if (c->execution_count)
        jw_int(w, "execution_count", c->execution_count);
}

void cell_input_members(const struct cell *c, struct jw *w)
{
    cell_request_members(c, w);
    jw_int(w, "uid", c->uid);
    if (c->timeout_s > 0)
        jw_double(w, "timeout_s", c->timeout_s);
}

static void cell_input_event(struct cell *c, const struct once_key *once)
{
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    jw_string(&w, "type", "execute_input");
    cell_input_members(c, &w);
    once_key_write(once, &w);
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

static void cell_rank_done_event(struct cell *c, int rank, uint64_t rank_seq, const json *memory)
{
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    jw_string(&w, "type", "rank_done");
    jw_string(&w, "status", cell_status_name(c->ranks[rank].status));
    jw_double(&w, "duration_s", c->ranks[rank].duration_s);
    jw_json(&w, "memory", memory);
    struct output_origin from = {.cell = c->number, .rank = rank, .rank_seq = rank_seq};
    output_add(c->group->output, from, (const char *)members.data, members.len);
    buf_deinit(&members);
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
    c->last_seq = output_last_seq(c->group->output);
}

/* --- life --- */

static void cell_timer_closed(uv_handle_t *handle)
{
    struct cell *c = handle->data;
    free(c->code);
    free(c->app_command);
    free(c->ranks);
    free(c);
}

void cell_close(struct cell *c)
{
    TAILQ_REMOVE(&c->group->cells, c, link);
    c->group->cells_len--;
    uv_close((uv_handle_t *)&c->timer, cell_timer_closed);
}

void cell_drop_old(struct group *g)
{
    struct cell *c, *next;
    for (c = TAILQ_FIRST(&g->cells); c && g->cells_len > CELL_RECORDS; c = next) {
        next = TAILQ_NEXT(c, link);
        if (c->finished > 0)
            cell_close(c);
    }
}

struct cell *cell_make(struct group *g, uint32_t number)
{
    struct cell *c = util_calloc(1, sizeof(*c));
    c->job.kind = &cell_job;
    c->group = g;
    c->number = number;
    c->store_history = -1;
    c->ranks = util_calloc((size_t)g->spec.ranks, sizeof(*c->ranks));
    c->timer.data = c;
    uv_timer_init(g->pool->loop, &c->timer);
    TAILQ_INSERT_TAIL(&g->cells, c, link);
    g->cells_len++;
    if (number > g->last_cell)
        g->last_cell = number;
    return c;
}

static int cell_commit(struct group *g, struct err *err)
{
    if (group_commit(g) == 0)
        return 0;
    err_set(err, ERR_UNAVAILABLE, "the journal of the group %s cannot be written", g->spec.name);
    return err_hint(err, "make room on the disk of the state folder; the daemon's log says more");
}

/* Accepted is what a later daemon would find: else the cell has never been. */
static int cell_accept(struct cell *c, const struct once_key *once, struct err *err)
{
    struct group *g = c->group;
    uint64_t last_seq = output_last_seq(g->output);
    cell_input_event(c, once);
    size_t ahead = job_ahead(g, &c->job);
    if (ahead || g->state != GROUP_READY)
        cell_status_event(c, "queued", ahead);
    if (cell_commit(g, err) == 0)
        return 0;
    output_retract(g->output, last_seq);
    g->last_cell--;
    job_done(g, &c->job);
    cell_close(c);
    return -1;
}

struct cell *cell_new(struct group *g, const struct cell_spec *spec, struct err *err)
{
    if (job_check_room(g, err) < 0 || cell_commit(g, err) < 0)
        return NULL;
    struct cell *c = cell_make(g, g->last_cell + 1);
    job_enqueue(g, &c->job);
    c->uid = spec->once.uid;
    c->code = util_strndup(spec->code, spec->code_len);
    c->app_command = spec->app_command ? util_strdup(spec->app_command) : NULL;
    c->silent = spec->silent;
    c->store_history = spec->store_history;
    c->execution_count = spec->execution_count;
    c->timeout_s = spec->timeout_s;
    c->created = util_now();
    for (int i = 0; i < g->spec.ranks; i++)
        c->ranks[i].takes_part = !spec->ranks || spec->ranks[i];
    cell_drop_old(g);
    if (cell_accept(c, &spec->once, err) < 0)
        return NULL;
    once_add(g->once, &spec->once, c->number);
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

struct cell *cell_running(const struct group *g)
{
    return g->running && g->running->kind == &cell_job ? cell_of(g->running) : NULL;
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
    cell_request_members(c, &w);
    jw_end_object(&w);
}

/* To the ranks that are not done with it. */
static void cell_send(struct cell *c)
{
    struct group *g = c->group;
    struct buf body = BUF_INIT;
    cell_body(c, &body);
    for (int i = 0; i < g->spec.ranks; i++) {
        struct rank *r = &g->ranks[i];
        if (!cell_rank_runs(c, i) || !r->worker)
            continue;
        r->state = RANK_BUSY;
        r->raising = r->lost_peers = r->untold = false;
        r->cell = c->number;
        worker_send(r->worker, FRAME_EXECUTE, c->number, 0, body.data, body.len, -1);
    }
    buf_deinit(&body);
    if (c->timeout_s > 0) {
        double left = c->started + c->timeout_s - util_now();
        uv_timer_start(&c->timer, cell_on_timeout, left > 0 ? (uint64_t)(left * 1000) : 0, 0);
    }
}

static void cell_start(struct job *job)
{
    struct cell *c = cell_of(job);
    c->started = util_now();
    cell_status_event(c, "busy", 0);
    group_commit(c->group);
    cell_send(c);
}

/* A rank may leave a collective that it has begun, by an exception between that and the waiting.
 * The next ones of the others would be matched with it, and all would wait for good. */
static bool cell_parted(const struct cell *c)
{
    for (int i = 0; i < c->group->spec.ranks; i++) {
        const struct cell_rank *r = &c->ranks[i];
        if (!r->takes_part || r->status == CELL_LOST || r->collectives < 0)
            return false;
        if (r->collectives != c->ranks[0].collectives)
            return true;
    }
    return false;
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
    ladder_cell_ends(&c->group->ladder, c);
    c->status = worst;
    c->finished = util_now();
    uv_timer_stop(&c->timer);
    cell_done_event(c);
    log_debug("group=%s cell=%u: %s after %.3f s", c->group->spec.name, c->number,
              cell_status_name(worst), c->started > 0 ? c->finished - c->started : 0.0);
    if (worst != CELL_OK && !c->group->aborted && cell_parted(c)) {
        log_info("group=%s cell=%u: its ranks stopped at different collectives",
                 c->group->spec.name, c->number);
        c->group->aborted = true;
    }
    ladder_cell_done(&c->group->ladder, c);
    job_done(c->group, &c->job);
}

static void cell_rank_ends(struct cell *c, int rank, enum cell_status status, double duration_s,
                           uint64_t rank_seq, const json *memory)
{
    struct cell_rank *r = &c->ranks[rank];
    if (!r->takes_part || r->status != CELL_NONE)
        return;
    r->status = status;
    r->duration_s = duration_s;
    cell_rank_done_event(c, rank, rank_seq, memory);
    cell_finish_if_done(c);
    if (status == CELL_ERROR && c->finished <= 0)
        ladder_rank_failed(&c->group->ladder, c, &c->group->ranks[rank]);
}

void cell_rank_done(struct group *g, struct rank *r, uint32_t number, uint64_t rank_seq,
                    const json *report)
{
    struct cell *c = cell_find(g, number);
    if (!c || c->finished > 0)
        return; /* abandoned meanwhile */
    struct err err = ERR_INIT;
    double duration_s = 0;
    if (json_get_double(report, "duration_s", 0, 1e9, &duration_s, &err) < 0)
        log_warn("group=%s rank=%d: %s", g->spec.name, r->index, err.msg);
    enum cell_status status = cell_status_parse(json_string(json_get(report, "status")));
    if (!json_integer(json_get(report, "collectives"), &c->ranks[r->index].collectives))
        c->ranks[r->index].collectives = -1;
    cell_rank_ends(c, r->index, status, duration_s, rank_seq, json_get(report, "memory"));
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
    cell_rank_ends(c, rank->index, CELL_LOST, cell_age(c), 0, NULL);
    if (c->finished <= 0)
        ladder_rank_lost(&c->group->ladder, c, rank);
}

static void cell_abandon(struct job *job, const char *why)
{
    struct cell *c = cell_of(job);
    cell_error_event(c, OUTPUT_NO_RANK, "CellLost", why);
    double age = cell_age(c);
    for (int i = 0; i < c->group->spec.ranks && c->finished <= 0; i++)
        cell_rank_ends(c, i, CELL_LOST, age, 0, NULL);
    group_commit(c->group);
}

/* A rank's code has raised; it says what when it has formatted that. */
void cell_rank_raising(struct group *g, struct rank *r, uint32_t number, bool lost_peers)
{
    struct cell *c = cell_find(g, number);
    if (!c || !cell_rank_runs(c, r->index))
        return;
    r->raising = true;
    r->lost_peers = lost_peers;
    r->untold = !lost_peers && g->ladder.rung < LADDER_INTERRUPT;
    ladder_rank_failed(&g->ladder, c, r);
}

bool cell_cause_known(struct group *g, uint32_t number)
{
    const struct cell *c = cell_find(g, number);
    if (!c || c->finished > 0 || g->aborted || g->state != GROUP_READY ||
        g->ladder.rung >= LADDER_INTERRUPT)
        return true;
    for (int i = 0; i < g->spec.ranks; i++) {
        const struct rank *r = &g->ranks[i];
        if (!r->worker || (r->raising && !r->lost_peers) || c->ranks[i].status == CELL_ERROR ||
            c->ranks[i].status == CELL_LOST)
            return true;
    }
    return false;
}

bool cell_rank_runs(const struct cell *c, int rank)
{
    return c->ranks[rank].takes_part && c->ranks[rank].status == CELL_NONE;
}

/* A rung that was begun under an earlier daemon is begun again. */
static void cell_resume_ladder(struct cell *c)
{
    struct group *g = c->group;
    for (int i = 0; i < g->spec.ranks && c->finished <= 0; i++) {
        if (c->ranks[i].status == CELL_LOST)
            ladder_rank_lost(&g->ladder, c, &g->ranks[i]);
        else if (c->ranks[i].status == CELL_ERROR)
            ladder_rank_failed(&g->ladder, c, &g->ranks[i]);
    }
    if (g->aborted && c->finished <= 0)
        ladder_interrupt(&g->ladder, c, "the process group was aborted before a daemon's restart");
}

void cell_resume(struct cell *c)
{
    cell_send(c);
    cell_finish_if_done(c);
    cell_resume_ladder(c);
    if (c->interrupt_asked && c->finished <= 0)
        ladder_interrupt(&c->group->ladder, c, "interrupted by a client");
    group_commit(c->group);
}

static void cell_cancel(struct cell *c)
{
    cell_error_event(c, OUTPUT_NO_RANK, "KeyboardInterrupt", "interrupted before it started");
    for (int i = 0; i < c->group->spec.ranks && c->finished <= 0; i++)
        cell_rank_ends(c, i, CELL_INTERRUPTED, 0, 0, NULL);
    group_commit(c->group);
}

static uint32_t cell_job_interrupt(struct job *job)
{
    struct cell *c = cell_of(job);
    if (c->group->adopting && c->started > 0)
        c->interrupt_asked = true;
    else if (c->started > 0)
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
