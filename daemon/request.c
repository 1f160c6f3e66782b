/* SPDX-License-Identifier: Apache-2.0 */
/*
 * request.c - a question to some ranks of a group, and their answers: namespace, completion.
 *
 * done is called from the request's own timer, never from inside whatever ended it, so that an
 * asker can free what it holds without looking who is calling.
 */
#include "request.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pool.h"

static const struct job_kind request_job;

static struct request *request_of(struct job *job)
{
    return (struct request *)((char *)job - offsetof(struct request, job));
}

static void request_closed(uv_handle_t *handle)
{
    struct request *r = handle->data;
    json_free(r->reply);
    json_free(r->failure);
    if (r->fd >= 0)
        close(r->fd);
    if (r->reply_fd >= 0)
        close(r->reply_fd);
    free(r->body);
    free(r->asked);
    free(r->pending);
    free(r);
}

static void request_on_end(uv_timer_t *timer)
{
    struct request *r = timer->data;
    if (r->done)
        r->done(r->ctx, r);
    uv_close((uv_handle_t *)timer, request_closed);
}

static void request_end(struct request *r)
{
    if (r->sent)
        TAILQ_REMOVE(&r->group->requests, r, link);
    r->sent = false;
    job_done(r->group, &r->job);
    uv_timer_start(&r->timer, request_on_end, 0, 0);
}

static void request_end_if_answered(struct request *r)
{
    for (int i = 0; i < r->group->spec.ranks; i++) {
        if (r->pending[i])
            return;
    }
    request_end(r);
}

static void request_start(struct job *job)
{
    struct request *r = request_of(job);
    struct group *g = r->group;
    TAILQ_INSERT_TAIL(&g->requests, r, link);
    r->sent = true;
    for (int i = 0; i < g->spec.ranks; i++) {
        if (r->pending[i])
            worker_send(g->ranks[i].worker, r->aside ? FRAME_QUESTION : FRAME_REQUEST, 0, r->id,
                        r->body, strlen(r->body), r->fd);
    }
    if (r->fd >= 0)
        close(r->fd); /* the ranks have their own copies now */
    r->fd = -1;
}

static void request_rank_lost(struct job *job, struct rank *rank, const char *why)
{
    struct request *r = request_of(job);
    if (!r->pending[rank->index])
        return;
    if (!r->err.code) {
        err_set(&r->err, ERR_UNAVAILABLE, "%s", why);
        r->err.rank = rank->index;
    }
    r->pending[rank->index] = false;
    request_end_if_answered(r);
}

static void request_abandon_job(struct job *job, const char *why)
{
    struct request *r = request_of(job);
    if (!r->err.code)
        err_set(&r->err, ERR_UNAVAILABLE, "%s", why);
    request_end(r);
}

static const struct job_kind request_job = {
    .start = request_start,
    .rank_lost = request_rank_lost,
    .abandon = request_abandon_job,
};

static void request_on_deadline(uv_timer_t *timer)
{
    struct request *r = timer->data;
    for (int i = 0; i < r->group->spec.ranks && !r->err.code; i++) {
        if (!r->pending[i])
            continue;
        err_set(&r->err, ERR_TIMEOUT, "rank %d has not answered within %g s", i,
                REQUEST_ASIDE_MS / 1000.0);
        r->err.rank = i;
        err_hint(&r->err,
                 "its process is stopped, or what it runs lets no other thread run; GET "
                 "/v1/groups/%s/stacks tells",
                 r->group->spec.name);
    }
    request_end(r);
}

/* What cannot be asked now: a rank that is dead, or whose process has not reported yet. */
static int request_check_living(const struct group *g, const bool *ranks, struct err *err)
{
    for (int i = 0; i < g->spec.ranks; i++) {
        const struct rank *r = &g->ranks[i];
        if ((ranks && !ranks[i]) || (r->worker && worker_connected(r->worker)))
            continue;
        if (g->state != GROUP_DEGRADED) {
            err_set(err, ERR_CONFLICT, "rank %d of the group %s is not there: the group is %s", i,
                    g->spec.name, group_state_name(g));
            err->rank = i;
            return err_hint(err, "GET /v1/groups/%s says its state", g->spec.name);
        }
        err_set(err, ERR_CONFLICT, "rank %d of the group %s is dead: %s", i, g->spec.name,
                g->reason.msg);
        err->rank = i;
        return err_hint(err,
                        "living ranks answer (?rank=N); POST /v1/groups/%s/restart?ranks=%d starts "
                        "it again, without its variables",
                        g->spec.name, i);
    }
    return 0;
}

struct request *request_new(struct group *g, const bool *ranks, enum request_turn turn, char *body,
                            int fd, void (*done)(void *ctx, struct request *r), void *ctx,
                            struct err *err)
{
    bool waits = turn != REQUEST_ASIDE && (g->state != GROUP_DEGRADED || turn == REQUEST_WRITES);
    int rc = waits ? job_check_room(g, err) : request_check_living(g, ranks, err);
    if (rc < 0) {
        if (fd >= 0)
            close(fd);
        free(body);
        return NULL;
    }
    struct request *r = util_calloc(1, sizeof(*r));
    r->job.kind = &request_job;
    r->group = g;
    r->aside = turn == REQUEST_ASIDE;
    if (waits)
        job_enqueue(g, &r->job);
    r->id = ++g->last_request;
    r->body = body;
    r->fd = fd;
    r->reply_fd = -1;
    r->err = (struct err)ERR_INIT;
    r->done = done;
    r->ctx = ctx;
    r->asked = util_calloc((size_t)g->spec.ranks, sizeof(*r->asked));
    r->pending = util_calloc((size_t)g->spec.ranks, sizeof(*r->pending));
    for (int i = 0; i < g->spec.ranks; i++)
        r->asked[i] = r->pending[i] = !ranks || ranks[i];
    r->timer.data = r;
    uv_timer_init(g->pool->loop, &r->timer);
    if (r->aside)
        uv_timer_start(&r->timer, request_on_deadline, REQUEST_ASIDE_MS, 0);
    if (r->job.queued)
        job_wake(g);
    else
        request_start(&r->job);
    return r;
}

void request_abandon(struct request *r)
{
    r->done = NULL;
}

/* The first failure is kept, whichever ranks answer well. */
static void request_take_failure(struct request *r, struct rank *rank, const json *error)
{
    const char *code = json_string(json_get(error, "code"));
    const char *detail = json_string(json_get(error, "detail"));
    const char *hint = json_string(json_get(error, "hint"));
    if (r->err.code)
        return;
    if (code && strcmp(code, "not_found") == 0) {
        err_set(&r->err, ERR_NOT_FOUND, "%s", detail ? detail : "not found");
    } else if (code && strcmp(code, "invalid") == 0) {
        err_set(&r->err, ERR_INVALID, "%s", detail ? detail : "invalid");
    } else {
        const char *ename = json_string(json_get(error, "ename"));
        const char *evalue = json_string(json_get(error, "evalue"));
        err_set(&r->err, ERR_RANK, "rank %d raised %s: %s", rank->index,
                ename ? ename : "an exception", evalue ? evalue : "");
    }
    if (hint)
        err_hint(&r->err, "%s", hint);
    r->err.rank = rank->index;
}

void request_on_reply(struct group *g, struct rank *rank, uint32_t id, json *content, int fd)
{
    struct request *r;
    TAILQ_FOREACH(r, &g->requests, link)
    {
        if (r->id == id)
            break;
    }
    if (!r || !r->pending[rank->index]) { /* abandoned meanwhile */
        json_free(content);
        if (fd >= 0)
            close(fd);
        return;
    }
    const json *error = json_get(content, "error");
    json **place = error ? &r->failure : &r->reply;
    if (error)
        request_take_failure(r, rank, error);
    json_free(*place);
    *place = content;
    if (fd >= 0 && r->reply_fd >= 0)
        close(r->reply_fd);
    if (fd >= 0)
        r->reply_fd = fd;
    r->pending[rank->index] = false;
    request_end_if_answered(r);
}
