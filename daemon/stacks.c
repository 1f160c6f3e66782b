/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stacks.c - asks ranks where their threads are, and reads the answers.
 *
 * A question's id grows, and a rank answers with that of the newest question it had when it looked:
 * one answer serves every question that is not newer. A stopped process answers when it goes on,
 * long after its asker has gone.
 */
#include "stacks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cell.h"
#include "pool.h"
#include "rank.h"

#define STACKS_STATUS_MAX 8192
#define STACKS_SOURCE_MAX 200

/* --- asking --- */

static void stacks_closed(uv_handle_t *handle)
{
    struct stacks *s = handle->data;
    free(s);
}

/* "stopped (state T)" of /proc/PID/status, for who wonders why a process says nothing. */
static void stacks_process_state(pid_t pid, char *out, size_t cap)
{
    char path[64], letter = '?', word[32] = "in an unknown state";
    struct buf b = BUF_INIT;
    struct err err = ERR_INIT;
    snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    if (util_read_file(path, STACKS_STATUS_MAX, &b, &err) == 0) {
        const char *line = strstr(buf_cstr(&b), "State:");
        if (line)
            sscanf(line, "State: %c (%31[^)])", &letter, word);
    }
    buf_deinit(&b);
    snprintf(out, cap, "%s (state %c)", word, letter);
}

static void stacks_no_answer(const struct stacks *s, int rank, char *out, size_t cap)
{
    const struct worker *w = s->group->ranks[rank].worker;
    uint64_t tenths = (util_monotonic_ns() - s->asked_ns + 50000000) / 100000000;
    char state[64] = "gone";
    if (w && worker_pid(w))
        stacks_process_state(worker_pid(w), state, sizeof(state));
    snprintf(out, cap, "no answer within %g s: the process is %s", (double)tenths / 10, state);
}

/* No more waiting. */
static void stacks_finish(struct stacks *s)
{
    for (int i = 0; i < s->group->spec.ranks; i++) {
        struct stacks_rank *r = &s->ranks[i];
        if (r->pending)
            stacks_no_answer(s, i, r->problem, sizeof(r->problem));
    }
    TAILQ_REMOVE(&s->group->stacks, s, link);
    if (s->done)
        s->done(s->ctx, s);
    for (int i = 0; i < s->group->spec.ranks; i++)
        free(s->ranks[i].text);
    free(s->ranks);
    uv_close((uv_handle_t *)&s->timer, stacks_closed);
}

static void stacks_on_deadline(uv_timer_t *timer)
{
    stacks_finish(timer->data);
}

static void stacks_end(struct stacks *s)
{
    uv_timer_start(&s->timer, stacks_on_deadline, 0, 0);
}

static void stacks_end_if_answered(struct stacks *s)
{
    for (int i = 0; i < s->group->spec.ranks; i++) {
        if (s->ranks[i].pending)
            return;
    }
    stacks_end(s);
}

static void stacks_ask(struct stacks *s, int rank)
{
    struct rank *r = &s->group->ranks[rank];
    struct stacks_rank *mine = &s->ranks[rank];
    mine->asked = true;
    mine->was = r->state;
    if (!r->worker)
        snprintf(mine->problem, sizeof(mine->problem), "the rank is dead");
    else if (!worker_connected(r->worker))
        snprintf(mine->problem, sizeof(mine->problem),
                 "the process is starting and has not reported yet");
    mine->pending = !mine->problem[0];
    if (mine->pending)
        worker_send(r->worker, FRAME_STACKS, 0, s->id, "all", s->all ? 3 : 0, -1);
}

struct stacks *stacks_new(struct group *g, const bool *ranks, bool all,
                          void (*done)(void *ctx, struct stacks *s), void *ctx)
{
    struct stacks *s = util_calloc(1, sizeof(*s));
    s->group = g;
    s->all = all;
    s->id = ++g->last_stacks;
    s->asked_ns = util_monotonic_ns();
    s->ranks = util_calloc((size_t)g->spec.ranks, sizeof(*s->ranks));
    s->done = done;
    s->ctx = ctx;
    s->timer.data = s;
    uv_timer_init(g->pool->loop, &s->timer);
    uv_timer_start(&s->timer, stacks_on_deadline, STACKS_DEADLINE_MS, 0);
    TAILQ_INSERT_TAIL(&g->stacks, s, link);
    for (int i = 0; i < g->spec.ranks; i++) {
        if (!ranks || ranks[i])
            stacks_ask(s, i);
    }
    stacks_end_if_answered(s);
    return s;
}

void stacks_abandon(struct stacks *s)
{
    s->done = NULL;
}

void stacks_end_now(struct stacks *s)
{
    stacks_finish(s);
}

void stacks_end_all(struct group *g)
{
    struct stacks *s;
    while ((s = TAILQ_FIRST(&g->stacks)) != NULL)
        stacks_end_now(s);
}

/* --- answers --- */

static void stacks_printable(char *text)
{
    for (; *text; text++) {
        if (*text != '\n' && (*text < ' ' || *text > '~'))
            *text = '?';
    }
}

/* Threads, the main one first; or "none REASON". What a rank sends is cut and made printable. */
static void stacks_take(struct stacks_rank *r, const char *text, size_t len)
{
    struct trace_text rest = {text, len < STACKS_TEXT_MAX ? len : STACKS_TEXT_MAX};
    struct trace_line first;
    r->pending = false;
    if (trace_next(&rest, &first) == TRACE_THREAD) {
        r->main = first.thread;
        r->text = util_strndup(text, len < STACKS_TEXT_MAX ? len : STACKS_TEXT_MAX);
        r->len = strlen(r->text); /* up to a NUL, if there is one */
        stacks_printable(r->text);
    } else if (len > 5 && memcmp(text, "none ", 5) == 0) {
        snprintf(r->problem, sizeof(r->problem), "%.*s", (int)first.text.len - 5, text + 5);
        stacks_printable(r->problem);
    } else {
        snprintf(r->problem, sizeof(r->problem), "its answer was malformed");
    }
}

void stacks_on_trace(struct group *g, struct rank *r, uint32_t id, const char *text, size_t len)
{
    struct stacks *s;
    TAILQ_FOREACH(s, &g->stacks, link)
    {
        if (s->id > id || !s->ranks[r->index].pending)
            continue;
        stacks_take(&s->ranks[r->index], text, len);
        stacks_end_if_answered(s);
    }
}

void stacks_rank_lost(struct group *g, struct rank *r)
{
    struct stacks *s;
    TAILQ_FOREACH(s, &g->stacks, link)
    {
        struct stacks_rank *mine = &s->ranks[r->index];
        if (!mine->pending)
            continue;
        snprintf(mine->problem, sizeof(mine->problem), "the process ended before it answered");
        mine->pending = false;
        stacks_end_if_answered(s);
    }
}

/* --- places --- */

/* Line `number` of a cell's code as IPython counts: from the first that is not blank. */
static struct trace_text stacks_source_line(const char *code, int64_t number)
{
    static const char blanks[] = " \t\r\f\v";
    struct trace_text t = {code, 0};
    bool begun = false;
    while (*t.at) {
        size_t len = strcspn(t.at, "\n"), indent = strspn(t.at, blanks);
        begun |= indent < len;
        if (begun && --number == 0) {
            t.at += indent < len ? indent : len;
            t.len = strcspn(t.at, "\r\n");
            break;
        }
        t.at += len + (t.at[len] == '\n');
    }
    if (t.len > STACKS_SOURCE_MAX)
        t.len = STACKS_SOURCE_MAX - util_utf8_partial(t.at, STACKS_SOURCE_MAX);
    return t;
}

/* The innermost line of a cell in the main thread. */
static bool stacks_find_line(const struct stacks_rank *r, struct trace_line *l)
{
    struct trace_text rest = {r->text, r->len};
    enum trace_kind kind;
    bool in_main = false;
    while ((kind = trace_next(&rest, l)) != TRACE_END) {
        if (kind == TRACE_THREAD)
            in_main = l->thread == r->main;
        else if (kind == TRACE_FRAME && in_main && l->execution)
            return true;
    }
    return false;
}

static const char *stacks_elsewhere(const struct stacks_rank *r)
{
    if (r->problem[0])
        return r->problem;
    if (r->was == RANK_IDLE)
        return "idle";
    return r->was == RANK_BUSY ? "in no line of a cell" : rank_state_name(r->was);
}

void stacks_place_line(struct group *g, const struct trace_line *l, struct stacks_place *place)
{
    *place = (struct stacks_place){
        .execution = l->execution, .cell = l->cell, .line = l->line, .function = l->function};
    snprintf(place->where, sizeof(place->where), "Cell In[%u], line %lld", l->execution,
             (long long)l->line);
    const struct cell *c = l->cell ? cell_find(g, l->cell) : NULL;
    if (c)
        place->source = stacks_source_line(c->code, l->line);
}

void stacks_find(const struct stacks *s, int rank, struct stacks_place *place)
{
    const struct stacks_rank *r = &s->ranks[rank];
    struct trace_line l;
    if (r->text && stacks_find_line(r, &l)) {
        stacks_place_line(s->group, &l, place);
        return;
    }
    *place = (struct stacks_place){0};
    snprintf(place->where, sizeof(place->where), "%s", stacks_elsewhere(r));
}

static void stacks_text(struct jw *w, const char *key, struct trace_text t)
{
    if (t.len)
        jw_text(w, key, t.at, t.len);
    else
        jw_null(w, key);
}

void stacks_place_json(const struct stacks_place *place, struct jw *w)
{
    jw_string(w, "where", place->where);
    if (!place->execution) {
        jw_null(w, "user");
        return;
    }
    jw_object(w, "user");
    if (place->cell)
        jw_int(w, "cell", place->cell);
    else
        jw_null(w, "cell");
    jw_int(w, "execution_count", place->execution);
    jw_int(w, "line", place->line);
    stacks_text(w, "function", place->function);
    stacks_text(w, "source", place->source);
    jw_end_object(w);
}

static bool stacks_same(const struct stacks_place *a, const struct stacks_place *b)
{
    return a->cell == b->cell && strcmp(a->where, b->where) == 0;
}

/* Ranks at the same place: how many, for each of them; 0 for those that were not asked. */
static int *stacks_count_same(const struct stacks *s, const struct stacks_place *places)
{
    int n = s->group->spec.ranks, *same = util_calloc((size_t)n, sizeof(*same));
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < n && s->ranks[i].asked; k++)
            same[i] += s->ranks[k].asked && stacks_same(&places[i], &places[k]);
    }
    return same;
}

/* The first rank of the largest group of ranks not shown yet, or -1. */
static int stacks_largest(const int *same, const bool *shown, int n)
{
    int best = -1;
    for (int i = 0; i < n; i++) {
        if (same[i] && !shown[i] && (best < 0 || same[i] > same[best]))
            best = i;
    }
    return best;
}

void stacks_summary(const struct stacks *s, const char *key, struct jw *w)
{
    int n = s->group->spec.ranks, first, most = -1;
    struct stacks_place *places = util_calloc((size_t)n, sizeof(*places));
    bool *shown = util_calloc((size_t)n, sizeof(*shown)), tie = false;
    for (int i = 0; i < n; i++)
        stacks_find(s, i, &places[i]);
    int *same = stacks_count_same(s, places);
    jw_array(w, key);
    while ((first = stacks_largest(same, shown, n)) >= 0) {
        tie |= most >= 0 && same[first] == same[most];
        most = most < 0 ? first : most;
        jw_object(w, NULL);
        stacks_place_json(&places[first], w);
        jw_array(w, "ranks");
        for (int i = first; i < n; i++) {
            if (same[i] && stacks_same(&places[i], &places[first])) {
                shown[i] = true;
                jw_int(w, NULL, i);
            }
        }
        jw_end_array(w);
        jw_end_object(w);
    }
    jw_end_array(w);
    jw_array(w, "differ");
    for (int i = 0; i < n; i++) {
        if (same[i] && (tie || !stacks_same(&places[i], &places[most])))
            jw_int(w, NULL, i);
    }
    jw_end_array(w);
    free(same);
    free(shown);
    free(places);
}
