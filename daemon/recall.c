/* SPDX-License-Identifier: Apache-2.0 */
/*
 * recall.c - cells of an earlier daemon: from the journal's lines back to records.
 *
 * A cell is what its events say: execute_input (it was accepted), status busy (it was sent to
 * ranks, at least to some), rank_done, done. What was sent is sent again: ranks ignore a cell they
 * have had.
 */
#include "recall.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "log.h"
#include "rank.h"

static double recall_time(const json *event, const char *key)
{
    struct err err = ERR_INIT;
    double t = 0;
    (void)!json_get_double(event, key, 0, 1e12, &t, &err);
    return t;
}

static void recall_ranks(struct cell *c, const json *ranks)
{
    int64_t rank;
    for (const json *j = json_first(ranks); j; j = json_next(j)) {
        if (json_integer(j, &rank) && rank >= 0 && rank < c->group->spec.ranks)
            c->ranks[rank].takes_part = true;
    }
}

/* What execute_input says, and so does a head. */
static struct cell *recall_input(struct group *g, uint32_t number, const json *j)
{
    struct err err = ERR_INIT;
    const char *code = json_string(json_get(j, "code"));
    int64_t uid = 0, count = 0, history = -1;
    bool store_history = false;
    if (!code || cell_find(g, number))
        return NULL;
    struct cell *c = cell_make(g, number);
    c->code = util_strdup(code);
    const char *command = json_string(json_get(j, "app_command"));
    c->app_command = command ? util_strdup(command) : NULL;
    (void)json_integer(json_get(j, "uid"), &uid);
    (void)json_integer(json_get(j, "execution_count"), &count);
    (void)!json_get_bool(j, "silent", &c->silent, &err);
    if (json_get_bool(j, "store_history", &store_history, &err) == 1)
        history = store_history;
    c->uid = (uid_t)uid;
    c->execution_count = count;
    c->store_history = (int)history;
    c->timeout_s = recall_time(j, "timeout_s");
    recall_ranks(c, json_get(j, "ranks"));
    return c;
}

void recall_write(const struct cell *c, struct jw *w)
{
    jw_object(w, NULL);
    jw_int(w, "cell", c->number);
    cell_input_members(c, w);
    jw_double(w, "created", c->created);
    jw_double(w, "started", c->started);
    jw_int(w, "first_seq", (int64_t)c->first_seq);
    jw_array(w, "statuses");
    for (int i = 0; i < c->group->spec.ranks; i++)
        jw_string(w, NULL, cell_status_name(c->ranks[i].status));
    jw_end_array(w);
    jw_end_object(w);
}

void recall_read(struct group *g, const json *j)
{
    int64_t number = 0, first_seq = 0;
    struct cell *c =
        json_integer(json_get(j, "cell"), &number) ? recall_input(g, (uint32_t)number, j) : NULL;
    if (!c)
        return;
    (void)json_integer(json_get(j, "first_seq"), &first_seq);
    c->first_seq = (uint64_t)first_seq;
    c->created = recall_time(j, "created");
    c->started = recall_time(j, "started");
    int i = 0;
    for (const json *s = json_first(json_get(j, "statuses")); s && i < g->spec.ranks;
         s = json_next(s), i++) {
        if (json_string(s))
            c->ranks[i].status = cell_status_parse(json_string(s));
    }
}

static void recall_status(struct cell *c, const json *event)
{
    const char *state = json_string(json_get(event, "execution_state"));
    const char *rung = json_string(json_get(event, "rung"));
    if (state && strcmp(state, "busy") == 0)
        c->started = recall_time(event, "time");
    if (rung && strcmp(rung, "abort") == 0)
        c->group->aborted = true;
}

static void recall_done_event(struct cell *c, const struct output_mark *m, const json *event)
{
    c->status = cell_status_parse(json_string(json_get(event, "status")));
    c->finished = recall_time(event, "time");
    c->last_seq = m->seq;
}

void recall_event(struct group *g, const struct output_mark *m, const json *event)
{
    struct cell *c = cell_find(g, m->cell);
    if (strcmp(m->type, "execute_input") == 0 && (c = recall_input(g, m->cell, event)) != NULL) {
        c->created = recall_time(event, "time");
        c->first_seq = m->seq;
        once_read(g->once, event);
    } else if (c && strcmp(m->type, "status") == 0) {
        recall_status(c, event);
    } else if (c && strcmp(m->type, "rank_done") == 0 && m->rank >= 0 && m->rank < g->spec.ranks) {
        c->ranks[m->rank].status = cell_status_parse(json_string(json_get(event, "status")));
        c->ranks[m->rank].duration_s = recall_time(event, "duration_s");
    } else if (c && strcmp(m->type, "done") == 0) {
        recall_done_event(c, m, event);
    }
    cell_drop_old(g);
}

void recall_done(struct group *g)
{
    struct cell *c;
    TAILQ_FOREACH(c, &g->cells, link)
    {
        if (c->finished > 0)
            continue;
        if (c->started > 0 && !g->running)
            g->running = &c->job;
        else
            job_enqueue(g, &c->job);
    }
}

void recall_resume(struct group *g)
{
    struct cell *running = cell_running(g);
    if (running)
        cell_resume(running);
    job_wake(g);
}
