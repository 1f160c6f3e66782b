/* SPDX-License-Identifier: Apache-2.0 */
/*
 * api_stacks.c - where the ranks of a group are, as JSON or as text to read.
 *
 * The thread that runs cells comes first. In the text its frames end where the cell begins; what
 * runs the cell is the same everywhere.
 */
#include "api_stacks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api.h"
#include "rank.h"
#include "stacks.h"

static const char *const api_stacks_types[] = {"application/json", "text/plain"};

/* --- text --- */

static void api_stacks_frame_text(struct buf *out, const struct trace_line *l)
{
    if (l->execution)
        buf_addf(out, "    Cell In[%u]", l->execution);
    else
        buf_addf(out, "    File \"%.*s\"", (int)l->file.len, l->file.at);
    buf_addf(out, ", line %lld, in %.*s\n", (long long)l->line, (int)l->function.len,
             l->function.at);
}

/* How many frames of the main thread there are down to the start of its cell; all if in none. */
static size_t api_stacks_depth(const struct stacks_rank *r)
{
    struct trace_text rest = {r->text, r->len};
    struct trace_line l;
    enum trace_kind kind;
    size_t frames = 0, depth = 0;
    bool in_main = false;
    while ((kind = trace_next(&rest, &l)) != TRACE_END) {
        if (kind == TRACE_THREAD)
            in_main = l.thread == r->main;
        frames += in_main && kind == TRACE_FRAME;
        if (in_main && l.execution)
            depth = frames;
    }
    return depth ? depth : SIZE_MAX;
}

static void api_stacks_threads_text(struct buf *out, const struct stacks_rank *r, bool main)
{
    struct trace_text rest = {r->text, r->len};
    struct trace_line l;
    enum trace_kind kind;
    size_t frames = 0, depth = api_stacks_depth(r);
    bool wanted = false;
    while ((kind = trace_next(&rest, &l)) != TRACE_END) {
        if (kind == TRACE_THREAD) {
            wanted = (l.thread == r->main) == main;
            if (wanted)
                buf_addf(out, "  thread %.*s (0x%llx)\n", (int)l.name.len, l.name.at,
                         (unsigned long long)l.thread);
        } else if (wanted && kind == TRACE_FRAME) {
            if (!main || ++frames <= depth)
                api_stacks_frame_text(out, &l);
        } else if (wanted && l.text.len) {
            buf_addf(out, "  %.*s\n", (int)l.text.len, l.text.at);
        }
    }
}

static void api_stacks_rank_text(struct buf *out, const struct stacks *s, int rank)
{
    const struct stacks_rank *r = &s->ranks[rank];
    struct stacks_place place;
    stacks_find(s, rank, &place);
    const char *state = rank_state_name(r->was);
    buf_addf(out, "[%d] %s", rank, state);
    if (strcmp(state, place.where) != 0)
        buf_addf(out, ", %s", place.where);
    if (place.source.len)
        buf_addf(out, ": %.*s", (int)place.source.len, place.source.at);
    buf_addc(out, '\n');
    if (r->text) {
        api_stacks_threads_text(out, r, true);
        api_stacks_threads_text(out, r, false);
    }
}

/* --- JSON --- */

static void api_stacks_frame(struct jw *w, const struct trace_line *l)
{
    char file[32];
    jw_object(w, NULL);
    snprintf(file, sizeof(file), "Cell In[%u]", l->execution);
    if (l->execution)
        jw_string(w, "file", file);
    else
        jw_text(w, "file", l->file.at, l->file.len);
    if (l->line)
        jw_int(w, "line", l->line);
    else
        jw_null(w, "line");
    jw_text(w, "function", l->function.at, l->function.len);
    if (l->cell)
        jw_int(w, "cell", l->cell);
    else
        jw_null(w, "cell");
    jw_end_object(w);
}

static void api_stacks_thread(struct jw *w, const struct trace_line *l, bool main)
{
    char id[24];
    snprintf(id, sizeof(id), "0x%llx", (unsigned long long)l->thread);
    jw_object(w, NULL);
    jw_string(w, "thread", id);
    jw_text(w, "name", l->name.at, l->name.len);
    jw_bool(w, "current", main);
    jw_array(w, "frames");
}

static void api_stacks_threads(struct jw *w, const struct stacks_rank *r, bool main)
{
    struct trace_text rest = {r->text, r->len};
    struct trace_line l;
    enum trace_kind kind;
    bool open = false;
    do {
        kind = trace_next(&rest, &l);
        if (open && (kind == TRACE_THREAD || kind == TRACE_END)) {
            jw_end_array(w);
            jw_end_object(w);
            open = false;
        }
        if (kind == TRACE_THREAD && (l.thread == r->main) == main) {
            api_stacks_thread(w, &l, main);
            open = true;
        } else if (kind == TRACE_FRAME && open) {
            api_stacks_frame(w, &l);
        }
    } while (kind != TRACE_END);
}

static void api_stacks_rank(struct jw *w, const struct stacks *s, int rank)
{
    const struct stacks_rank *r = &s->ranks[rank];
    const struct worker *worker = s->group->ranks[rank].worker;
    struct stacks_place place;
    struct buf text = BUF_INIT;
    stacks_find(s, rank, &place);
    jw_object(w, NULL);
    jw_int(w, "rank", rank);
    if (worker && worker_pid(worker))
        jw_int(w, "pid", worker_pid(worker));
    else
        jw_null(w, "pid");
    jw_string(w, "state", rank_state_name(r->was));
    stacks_place_json(&place, w);
    jw_string(w, "problem", r->problem[0] ? r->problem : NULL);
    jw_array(w, "threads");
    if (r->text) {
        api_stacks_threads(w, r, true);
        api_stacks_threads(w, r, false);
    }
    jw_end_array(w);
    api_stacks_rank_text(&text, s, rank);
    jw_text(w, "text", (const char *)text.data, text.len);
    buf_deinit(&text);
    jw_end_object(w);
}

/* --- the call --- */

static void api_stacks_cancel(struct api_call *call)
{
    stacks_abandon(call->stacks);
}

static void api_stacks_done(void *ctx, struct stacks *s)
{
    struct api_call *call = ctx;
    bool wild;
    int n = s->group->spec.ranks;
    struct jw w = api_json(call);
    if (api_choose(call->headers.accept, api_stacks_types, UTIL_COUNT(api_stacks_types), &wild)) {
        for (int i = 0; i < n; i++) {
            if (s->ranks[i].asked)
                api_stacks_rank_text(&call->out, s, i);
        }
        api_answer(call, 200, "text/plain; charset=utf-8");
        return;
    }
    jw_object(&w, NULL);
    jw_string(&w, "group", s->group->spec.name);
    stacks_summary(s, "summary", &w);
    jw_array(&w, "ranks");
    for (int i = 0; i < n; i++) {
        if (s->ranks[i].asked)
            api_stacks_rank(&w, s, i);
    }
    jw_end_array(&w);
    jw_end_object(&w);
    api_answer_json(call, 200);
}

void api_stacks_get(struct api_call *call)
{
    struct err *err = &call->err;
    struct group *g = api_group(call, err);
    bool *mask = NULL, wild;
    int form =
        api_choose(call->headers.accept, api_stacks_types, UTIL_COUNT(api_stacks_types), &wild);
    if (g && form < 0)
        err_set(err, ERR_NOT_ACCEPTABLE, "stacks are application/json or text/plain, not \"%.80s\"",
                call->headers.accept);
    if (!g || form < 0 || api_ranks(call, g, "ranks", &mask, err) < 0) {
        api_problem(call, err, NULL);
        return;
    }
    call->stacks = stacks_new(g, mask, true, api_stacks_done, call);
    free(mask);
    api_pending(call, api_stacks_cancel);
}
