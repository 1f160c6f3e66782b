/* SPDX-License-Identifier: Apache-2.0 */
/*
 * api_cell.c - executing cells, their records, and their events.
 *
 * Whoever executes a cell is, from then on, just another reader of its events: going away changes
 * nothing for the cell.
 */
#include "api_cell.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "api.h"
#include "record.h"

/* The members after "events" of a waiting answer: the cell's record, if it is still kept. */
static void api_cell_tail(void *ctx, struct buf *out)
{
    struct api_call *call = ctx;
    struct group *g = pool_find(call->api->pool, call->segments[0]);
    struct cell *c = g && g == call->group ? cell_find(g, call->cell) : NULL;
    struct jw w = JW_INIT(out);
    buf_adds(out, "\"cell\":");
    if (c)
        record_cell(&w, c);
    else
        buf_adds(out, "null");
}

static void api_cell_wake(void *ctx)
{
    struct api_call *call = ctx;
    if (call->wake)
        call->wake(call->ctx);
}

/* What cannot be had is answered in the default form rather than refused: the cell has run either
 * way. */
static enum stream_format api_cell_format(const struct api_call *call)
{
    static const enum stream_format formats[] = {STREAM_NDJSON, STREAM_RECORD, STREAM_SSE,
                                                 STREAM_PLAIN};
    static const char *const types[] = {"application/x-ndjson", "application/json",
                                        "text/event-stream", "text/plain"};
    bool wild;
    int best = api_choose(call->headers.accept, types, UTIL_COUNT(types), &wild);
    return best < 0 ? STREAM_NDJSON : formats[best];
}

static void api_cell_follow(struct api_call *call, struct group *g, uint32_t cell, uint64_t after,
                            enum stream_format format)
{
    call->group = g;
    call->cell = cell;
    call->stream = stream_new(g->output, cell, after, format, api_cell_tail, api_cell_wake, call);
    api_answer(call, 200, stream_media_type(format));
}

/* --- executing --- */

static int api_cell_read_json(struct api_call *call, struct cell_spec *spec, struct err *err)
{
    const json *body = api_object(call, err);
    bool store = false;
    if (!body)
        return -1;
    int found = json_get_string(body, "code", &spec->code, err);
    if (found <= 0)
        return found < 0 ? -1 : err_set(err, ERR_INVALID, "\"code\" is missing");
    spec->code_len = strlen(spec->code);
    if (json_get_string(body, "app_command", &spec->app_command, err) < 0 ||
        json_get_bool(body, "silent", &spec->silent, err) < 0 ||
        json_get_int(body, "execution_count", 1, INT32_MAX, &spec->execution_count, err) < 0 ||
        json_get_double(body, "timeout_s", 0.001, 1e7, &spec->timeout_s, err) < 0)
        return -1;
    found = json_get_bool(body, "store_history", &store, err);
    spec->store_history = found == 1 ? store : -1;
    return found < 0 ? -1 : 0;
}

static int api_cell_read_text(struct api_call *call, struct cell_spec *spec, struct err *err)
{
    spec->code = (const char *)call->body.data;
    spec->code_len = call->body.len;
    size_t valid = util_utf8_valid(spec->code, spec->code_len);
    if (valid < spec->code_len)
        return err_set(err, ERR_SYNTAX, "the code is not UTF-8 at byte %zu", valid);
    if (!spec->code_len)
        return err_set(err, ERR_INVALID, "the body, which is the code, is empty");
    if (memchr(spec->code, '\0', spec->code_len))
        return err_set(err, ERR_SYNTAX, "the code has a NUL byte");
    return 0;
}

static bool api_cell_type_is(const struct api_call *call, const char *type)
{
    const char *have = call->headers.content_type;
    size_t n = strlen(type);
    return have && strncasecmp(have, type, n) == 0 && (!have[n] || strchr("; ", have[n]));
}

/* curl -d says x-www-form-urlencoded of whatever it sends; the first byte tells what it is. */
static int api_cell_read(struct api_call *call, struct cell_spec *spec, struct err *err)
{
    bool unsaid =
        !call->headers.content_type || api_cell_type_is(call, "application/x-www-form-urlencoded");
    bool brace = call->body.len && call->body.data[0] == '{';
    if (call->op || api_cell_type_is(call, "application/json") || (unsaid && brace))
        return api_cell_read_json(call, spec, err);
    if (unsaid || api_cell_type_is(call, "text/x-python") || api_cell_type_is(call, "text/plain"))
        return api_cell_read_text(call, spec, err);
    err_set(err, ERR_MEDIA_TYPE, "the Content-Type \"%.80s\" is neither code nor JSON",
            call->headers.content_type);
    return err_hint(err, "send text/x-python (the body is the code), or application/json with "
                         "{\"code\": ...}");
}

static void api_cell_accepted(struct api_call *call, const struct cell *c)
{
    struct jw w = api_json(call);
    record_accepted(&w, c);
    call->location = util_printf("/v1/groups/%s/cells/%u", c->group->spec.name, c->number);
    api_answer_json(call, 202);
}

static uint64_t api_cell_hash(const struct group *g, const struct cell_spec *spec)
{
    uint64_t hash = once_hash(ONCE_HASH_INIT, spec->code, spec->code_len);
    if (spec->app_command)
        hash = once_hash(hash, spec->app_command, strlen(spec->app_command));
    for (int i = 0; i < g->spec.ranks; i++)
        hash = once_hash(hash, spec->ranks && !spec->ranks[i] ? "0" : "1", 1);
    hash = once_hash(hash, &spec->timeout_s, sizeof(spec->timeout_s));
    hash = once_hash(hash, &spec->silent, sizeof(spec->silent));
    return once_hash(hash, &spec->store_history, sizeof(spec->store_history));
}

/* A new cell, or the one that the same request has made before (Idempotency-Key). NULL: *err. */
static struct cell *api_cell_make(struct api_call *call, struct group *g, struct cell_spec *spec,
                                  struct err *err)
{
    spec->once.key = call->headers.idempotency_key;
    if (call->op && json_get_string(call->message, "idempotency_key", &spec->once.key, err) < 0)
        return NULL;
    spec->once.hash = api_cell_hash(g, spec);
    uint32_t number = 0;
    if (once_key_check(&spec->once, err) < 0)
        return NULL;
    int seen = once_find(g->once, &spec->once, &number, err);
    if (seen <= 0)
        return seen < 0 ? NULL : cell_new(g, spec, err);
    struct cell *c = cell_find(g, number);
    if (!c)
        err_set(err, ERR_GONE, "the request was done as cell %u, whose record is not kept any more",
                number);
    return c;
}

void api_cell_execute(struct api_call *call)
{
    struct err *err = &call->err;
    struct group *g = api_group(call, err);
    struct cell_spec spec = {.once.uid = call->peer.uid, .store_history = -1};
    bool *mask = NULL;
    struct cell *c = NULL;
    if (g && api_cell_read(call, &spec, err) == 0 && api_ranks(call, g, "ranks", &mask, err) == 0) {
        spec.ranks = mask;
        c = api_cell_make(call, g, &spec, err);
    }
    free(mask);
    if (!c) {
        api_problem(call, err, NULL);
        return;
    }
    if (call->op) { /* the WebSocket gets the acceptance, then the events */
        call->stream = stream_new(g->output, c->number, c->first_seq - 1, STREAM_NDJSON, NULL,
                                  api_cell_wake, call);
        api_cell_accepted(call, c);
    } else if (api_prefers_async(call)) {
        api_cell_accepted(call, c);
    } else {
        call->location = util_printf("/v1/groups/%s/cells/%u", g->spec.name, c->number);
        api_cell_follow(call, g, c->number, c->first_seq - 1, api_cell_format(call));
    }
}

/* --- records and events --- */

void api_cell_list(struct api_call *call)
{
    struct group *g = api_group(call, &call->err);
    if (!g) {
        api_problem(call, &call->err, NULL);
        return;
    }
    struct jw w = api_json(call);
    const struct cell *c;
    jw_object(&w, NULL);
    jw_array(&w, "cells");
    TAILQ_FOREACH(c, &g->cells, link)
    {
        record_cell(&w, c);
    }
    jw_end_array(&w);
    jw_end_object(&w);
    api_answer_json(call, 200);
}

static struct cell *api_cell(struct api_call *call, struct group *g, struct err *err)
{
    uint64_t number;
    if (util_parse_u64(call->segments[1], 1, UINT32_MAX, &number) < 0) {
        err_set(err, ERR_NOT_FOUND, "\"%.40s\" is no cell number", call->segments[1]);
        return NULL;
    }
    struct cell *c = cell_find(g, (uint32_t)number);
    if (c)
        return c;
    const struct cell *oldest = TAILQ_FIRST(&g->cells);
    if (number <= g->last_cell && oldest)
        err_set(err, ERR_GONE, "the record of cell %llu is no longer kept; the oldest is %u",
                (unsigned long long)number, oldest->number);
    else if (number <= g->last_cell)
        err_set(err, ERR_GONE, "the record of cell %llu is no longer kept",
                (unsigned long long)number);
    else
        err_set(err, ERR_NOT_FOUND, "the group %s has no cell %llu", g->spec.name,
                (unsigned long long)number);
    return NULL;
}

void api_cell_get(struct api_call *call)
{
    struct group *g = api_group(call, &call->err);
    struct cell *c = g ? api_cell(call, g, &call->err) : NULL;
    if (!c) {
        api_problem(call, &call->err, NULL);
        return;
    }
    struct jw w = api_json(call);
    record_cell(&w, c);
    api_answer_json(call, 200);
}

/* Where to start: ?after=, or what an EventSource says when it comes back. */
static int api_cell_after(struct api_call *call, const struct group *g, uint64_t *after,
                          struct err *err)
{
    const char *id = call->headers.last_event_id;
    int found = api_param_u64(call, "after", INT64_MAX, after, err);
    if (found == 0 && id && util_parse_u64(id, 0, INT64_MAX, after) < 0)
        return err_set(err, ERR_INVALID, "Last-Event-ID must be a sequence number, not \"%.40s\"",
                       id);
    if (found < 0)
        return -1;
    if (*after > output_last_seq(g->output))
        return err_set(err, ERR_INVALID,
                       "\"after\" is %llu, but the last event of the group is %llu",
                       (unsigned long long)*after, (unsigned long long)output_last_seq(g->output));
    return 0;
}

/* Is any of the cell's events still there? */
static int api_cell_kept(const struct group *g, const struct cell *c, struct err *err)
{
    uint64_t first = output_first_seq(g->output);
    if (!c || c->finished <= 0 || c->last_seq >= first)
        return 0;
    err_set(err, ERR_GONE,
            "the events of cell %u are no longer kept; the journal has those from event %llu on",
            c->number, (unsigned long long)first);
    return err_hint(err, "journal_limit says how much is kept");
}

void api_cell_events(struct api_call *call)
{
    struct err *err = &call->err;
    struct group *g = api_group(call, err);
    struct cell *c = NULL;
    uint64_t after = 0;
    bool one_cell = call->segments[1] != NULL, follow = true;
    if (!g || (one_cell && (!(c = api_cell(call, g, err)) || api_cell_kept(g, c, err) < 0)) ||
        api_cell_after(call, g, &after, err) < 0 ||
        api_param_bool(call, "follow", &follow, err) < 0) {
        api_problem(call, err, NULL);
        return;
    }
    if (c && after < c->first_seq)
        after = c->first_seq - 1;
    enum stream_format format = api_cell_format(call);
    if (!one_cell && format == STREAM_RECORD)
        format = STREAM_NDJSON; /* it would never end */
    if (call->op) {
        buf_adds(&call->out, "{}");
        api_cell_follow(call, g, c ? c->number : OUTPUT_NO_CELL, after, STREAM_NDJSON);
        call->content_type = "application/json";
    } else {
        api_cell_follow(call, g, c ? c->number : OUTPUT_NO_CELL, after, format);
    }
    if (!follow)
        stream_no_wait(call->stream);
}
