/* SPDX-License-Identifier: Apache-2.0 */
/*
 * api_group.c - making, showing, restarting, interrupting and deleting groups.
 *
 * Creation, restart and deletion are answered when they are over. A caller that goes away meanwhile
 * does not undo them: what it asked for was a group, not an answer.
 */
#include "api_group.h"

#include <stdlib.h>

#include "api.h"
#include "record.h"

static void api_group_unwait(struct api_call *call)
{
    group_unwait(call->group, &call->wait);
}

static void api_group_answer(struct api_call *call, const struct group *g, int status)
{
    struct jw w = api_json(call);
    record_group(&w, g);
    call->location = util_printf("/v1/groups/%s", g->spec.name);
    api_answer_json(call, status);
}

static void api_group_wait(struct api_call *call, struct group *g, bool for_gone,
                           void (*done)(void *ctx, struct group *g, const struct err *err))
{
    call->group = g;
    call->wait = (struct group_wait){.for_gone = for_gone, .done = done, .ctx = call};
    group_wait(g, &call->wait);
    api_pending(call, api_group_unwait);
}

static void api_group_cleared(void *ctx, struct group *g, const struct err *err)
{
    struct api_call *call = ctx;
    (void)g;
    (void)err;
    api_problem(call, &call->err, NULL);
}

/* A group that did not start is gone when its creator hears of it: the name is free again. */
static void api_group_started(void *ctx, struct group *g, const struct err *err)
{
    struct api_call *call = ctx;
    if (!err) {
        api_group_answer(call, g, call->created ? 201 : 200);
    } else if (call->created && !g->was_ready) {
        call->err = *err;
        api_group_wait(call, g, true, api_group_cleared);
        group_stop(g, "it did not start");
    } else {
        api_problem(call, err, NULL);
    }
}

void api_group_list(struct api_call *call)
{
    struct jw w = api_json(call);
    const struct group *g;
    jw_object(&w, NULL);
    jw_array(&w, "groups");
    TAILQ_FOREACH(g, &call->api->pool->groups, link)
    {
        if (auth_may_touch(&call->peer, g->spec.uid))
            record_group(&w, g);
    }
    jw_end_array(&w);
    jw_end_object(&w);
    api_answer_json(call, 200);
}

void api_group_create(struct api_call *call)
{
    struct err *err = &call->err;
    const json *body = api_object(call, err);
    bool wait = !api_prefers_async(call);
    struct group *g = NULL;
    struct once_key key = {.uid = call->peer.uid,
                           .key = call->headers.idempotency_key,
                           .hash = once_hash(ONCE_HASH_INIT, call->body.data, call->body.len)};
    int seen = once_key_check(&key, err);
    if (seen == 0)
        seen = pool_find_once(call->api->pool, &key, &g, err);
    if (seen == 0 && body && json_get_bool(body, "wait", &wait, err) >= 0)
        g = pool_create(call->api->pool, body, &key, err);
    if (seen == 1 && g->state == GROUP_FAILED) {
        call->created = true;
        api_group_started(call, g, &g->reason);
    } else if (seen == 1 && g->state != GROUP_STARTING) {
        api_group_answer(call, g, 201);
    } else if (!g) {
        api_problem(call, err, NULL);
    } else if (wait) {
        call->created = true;
        api_group_wait(call, g, false, api_group_started);
    } else {
        api_group_answer(call, g, 202);
    }
}

void api_group_get(struct api_call *call)
{
    struct group *g = api_group(call, &call->err);
    if (!g) {
        api_problem(call, &call->err, NULL);
        return;
    }
    struct jw w = api_json(call);
    record_group(&w, g);
    api_answer_json(call, 200);
}

static void api_group_gone(void *ctx, struct group *g, const struct err *err)
{
    struct api_call *call = ctx;
    (void)err;
    struct jw w = api_json(call);
    jw_object(&w, NULL);
    jw_string(&w, "name", g->spec.name);
    jw_string(&w, "state", "gone");
    jw_end_object(&w);
    api_answer_json(call, 200);
}

void api_group_delete(struct api_call *call)
{
    struct group *g = api_group(call, &call->err);
    if (!g) {
        api_problem(call, &call->err, NULL);
        return;
    }
    api_group_wait(call, g, true, api_group_gone);
    group_stop(g, "deleted by a client");
}

void api_group_restart(struct api_call *call)
{
    struct err *err = &call->err;
    bool *mask = NULL;
    struct group *g = api_object(call, err) ? api_group(call, err) : NULL;
    if (!g || api_ranks(call, g, "ranks", &mask, err) < 0 || group_restart(g, mask, err) < 0)
        api_problem(call, err, NULL);
    else if (api_prefers_async(call))
        api_group_answer(call, g, 202);
    else
        api_group_wait(call, g, false, api_group_started);
    free(mask);
}

void api_group_interrupt(struct api_call *call)
{
    struct err *err = &call->err;
    struct group *g = api_group(call, err);
    const json *body = g ? api_object(call, err) : NULL;
    int64_t cell = 0;
    if (!body || json_get_int(body, "cell", 1, UINT32_MAX, &cell, err) < 0) {
        api_problem(call, err, NULL);
        return;
    }
    cell = group_interrupt(g, (uint32_t)cell);
    struct jw w = api_json(call);
    jw_object(&w, NULL);
    if (cell)
        jw_int(&w, "cell", cell);
    else
        jw_null(&w, "cell");
    jw_array(&w, "ranks");
    for (int i = 0; cell && i < g->spec.ranks; i++) {
        if (g->ranks[i].state == RANK_BUSY && g->ranks[i].cell == (uint32_t)cell)
            jw_int(&w, NULL, i);
    }
    jw_end_array(&w);
    jw_end_object(&w);
    api_answer_json(call, 200);
}
