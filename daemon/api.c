/* SPDX-License-Identifier: Apache-2.0 */
/*
 * api.c - what clients can ask, whatever transport brings it: routes, permission, problems.
 *
 * The one table of routes serves both transports: HTTP finds a row by method and path, the
 * WebSocket by its op. proto/openapi.yaml is tested against it.
 */
#include "api.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "api_cell.h"
#include "api_daemon.h"
#include "api_group.h"
#include "api_namespace.h"
#include "api_stacks.h"
#include "log.h"

struct api_route {
    const char *method, *path; /* {g}, {c} and {n} match one segment */
    const char *op;            /* NULL: HTTP only */
    void (*handle)(struct api_call *call);
    enum api_body body;
    bool open; /* no token needed */
};

static const struct api_route api_routes[] = {
    {"GET", "/healthz", NULL, api_daemon_health, API_BODY_NONE, true},
    {"GET", "/readyz", NULL, api_daemon_ready, API_BODY_NONE, true},
    {"GET", "/v1/info", "info", api_daemon_info, API_BODY_NONE, false},
    {"GET", "/v1/gpus", "gpus", api_daemon_gpus, API_BODY_NONE, false},
    {"POST", "/v1/shutdown", "shutdown", api_daemon_shutdown, API_BODY_MEMORY, false},
    {"GET", "/v1/ws", NULL, api_daemon_upgrade, API_BODY_NONE, false},
    {"GET", "/v1/groups", "groups_list", api_group_list, API_BODY_NONE, false},
    {"POST", "/v1/groups", "group_create", api_group_create, API_BODY_MEMORY, false},
    {"GET", "/v1/groups/{g}", "group_get", api_group_get, API_BODY_NONE, false},
    {"DELETE", "/v1/groups/{g}", "group_delete", api_group_delete, API_BODY_MEMORY, false},
    {"POST", "/v1/groups/{g}/restart", "group_restart", api_group_restart, API_BODY_MEMORY, false},
    {"POST", "/v1/groups/{g}/interrupt", "group_interrupt", api_group_interrupt, API_BODY_MEMORY,
     false},
    {"GET", "/v1/groups/{g}/stacks", "stacks", api_stacks_get, API_BODY_NONE, false},
    {"GET", "/v1/groups/{g}/events", "group_events", api_cell_events, API_BODY_NONE, false},
    {"GET", "/v1/groups/{g}/cells", "cells_list", api_cell_list, API_BODY_NONE, false},
    {"POST", "/v1/groups/{g}/cells", "execute", api_cell_execute, API_BODY_MEMORY, false},
    {"GET", "/v1/groups/{g}/cells/{c}", "cell_get", api_cell_get, API_BODY_NONE, false},
    {"GET", "/v1/groups/{g}/cells/{c}/events", "cell_events", api_cell_events, API_BODY_NONE,
     false},
    {"GET", "/v1/groups/{g}/namespace", "namespace_list", api_namespace_list, API_BODY_NONE, false},
    {"POST", "/v1/groups/{g}/namespace", NULL, api_namespace_bulk, API_BODY_BLOB, false},
    {"PUT", "/v1/groups/{g}/namespace/{n}", NULL, api_namespace_put, API_BODY_BLOB, false},
    {"GET", "/v1/groups/{g}/namespace/{n}", NULL, api_namespace_get, API_BODY_NONE, false},
    {"DELETE", "/v1/groups/{g}/namespace/{n}", "namespace_delete", api_namespace_delete,
     API_BODY_MEMORY, false},
    {"POST", "/v1/groups/{g}/complete", "complete", api_namespace_complete, API_BODY_MEMORY, false},
    {"POST", "/v1/groups/{g}/inspect", "inspect", api_namespace_inspect, API_BODY_MEMORY, false},
};

static const char api_segment_keys[] = "gcn";
static const char *const api_segment_names[] = {"group", "cell", "name"};

/* --- life --- */

void api_call_init(struct api_call *call, struct api *api, struct auth_peer peer)
{
    *call = (struct api_call){
        .api = api, .peer = peer, .blob = BLOB_INIT, .err = ERR_INIT, .out_fd = -1};
}

void api_close(struct api_call *call)
{
    if (call->cancel)
        call->cancel(call);
    call->cancel = NULL;
    call->ready = NULL;
    stream_free(call->stream);
    call->stream = NULL;
    free(call->path);
    for (size_t i = 0; i < call->query_len; i++)
        free(call->query[i]);
    for (size_t i = 0; i < UTIL_COUNT(call->segments); i++)
        free(call->segments[i]);
    struct api_headers *h = &call->headers;
    free(h->accept);
    free(h->content_type);
    free(h->prefer);
    free(h->idempotency_key);
    free(h->last_event_id);
    json_free(call->message);
    buf_deinit(&call->body);
    blob_deinit(&call->blob);
    buf_deinit(&call->out);
    free(call->location);
    free(call->allow);
    if (call->out_fd >= 0)
        blob_deinit(&(struct blob){.fd = call->out_fd});
    call->out_fd = -1;
}

/* --- answers --- */

static const struct {
    enum err_code code;
    int status;
    const char *title;
} api_statuses[] = {
    {ERR_SYNTAX, 400, "Bad Request"},
    {ERR_INVALID, 422, "Unprocessable Content"},
    {ERR_UNAUTHORIZED, 401, "Unauthorized"},
    {ERR_FORBIDDEN, 403, "Forbidden"},
    {ERR_NOT_FOUND, 404, "Not Found"},
    {ERR_METHOD, 405, "Method Not Allowed"},
    {ERR_NOT_ACCEPTABLE, 406, "Not Acceptable"},
    {ERR_CONFLICT, 409, "Conflict"},
    {ERR_GONE, 410, "Gone"},
    {ERR_TOO_LARGE, 413, "Content Too Large"},
    {ERR_MEDIA_TYPE, 415, "Unsupported Media Type"},
    {ERR_UPGRADE, 426, "Upgrade Required"},
    {ERR_RANK, 422, "A rank raised an exception"},
    {ERR_UNAVAILABLE, 503, "Service Unavailable"},
    {ERR_TIMEOUT, 504, "Gateway Timeout"},
    {ERR_IO, 500, "Internal Server Error"},
};

void api_answer(struct api_call *call, int status, const char *content_type)
{
    bool late = call->state == API_PENDING;
    call->state = API_ANSWERED;
    call->cancel = NULL;
    call->status = status;
    call->content_type = content_type;
    if (late && call->ready)
        call->ready(call->ctx);
}

struct jw api_json(struct api_call *call)
{
    buf_reset(&call->out);
    return (struct jw)JW_INIT(&call->out);
}

void api_answer_json(struct api_call *call, int status)
{
    buf_addc(&call->out, '\n');
    api_answer(call, status, "application/json");
}

const char *api_reason(int status)
{
    for (size_t i = 0; i < UTIL_COUNT(api_statuses); i++) {
        if (api_statuses[i].status == status)
            return api_statuses[i].title;
    }
    return "Internal Server Error";
}

static void api_rank_error(struct jw *w, const json *error)
{
    jw_object(w, "error");
    jw_json(w, "ename", json_get(error, "ename"));
    jw_json(w, "evalue", json_get(error, "evalue"));
    jw_json(w, "traceback", json_get(error, "traceback"));
    jw_end_object(w);
}

void api_problem(struct api_call *call, const struct err *err, const json *rank_error)
{
    int status = 500;
    const char *title = "Internal Server Error";
    for (size_t i = 0; i < UTIL_COUNT(api_statuses); i++) {
        if (api_statuses[i].code == err->code) {
            status = api_statuses[i].status;
            title = api_statuses[i].title;
        }
    }
    struct jw w = api_json(call);
    jw_object(&w, NULL);
    jw_string(&w, "type", "about:blank");
    jw_string(&w, "title", title);
    jw_int(&w, "status", status);
    jw_string(&w, "detail", err->msg);
    if (err->hint[0])
        jw_string(&w, "hint", err->hint);
    if (err->rank >= 0)
        jw_int(&w, "rank", err->rank);
    if (rank_error && json_get(rank_error, "ename"))
        api_rank_error(&w, rank_error);
    jw_end_object(&w);
    buf_addc(&call->out, '\n');
    api_answer(call, status, "application/problem+json");
}

void api_pending(struct api_call *call, void (*cancel)(struct api_call *call))
{
    call->state = API_PENDING;
    call->cancel = cancel;
}

/* --- routes --- */

/* Matches path against a pattern; parts[i]/lens[i] get what {g}, {c} and {n} stand for. */
static bool api_match(const char *pattern, const char *path, const char *parts[3], size_t lens[3])
{
    while (*pattern) {
        if (*pattern == '{') {
            size_t which = (size_t)(strchr(api_segment_keys, pattern[1]) - api_segment_keys);
            parts[which] = path;
            lens[which] = strcspn(path, "/");
            if (!lens[which])
                return false;
            path += lens[which];
            pattern += 3;
        } else if (*pattern++ != *path++) {
            return false;
        }
    }
    return !*path || strcmp(path, "/") == 0; /* a trailing slash is tolerated */
}

static void api_allow(struct api_call *call, const char *method)
{
    char *longer = call->allow ? util_printf("%s, %s", call->allow, method) : util_strdup(method);
    free(call->allow);
    call->allow = longer;
}

static int api_find_path(struct api_call *call, struct err *err)
{
    for (size_t i = 0; i < UTIL_COUNT(api_routes); i++) {
        const char *parts[3] = {NULL};
        size_t lens[3];
        if (!api_match(api_routes[i].path, call->path, parts, lens))
            continue;
        if (strcmp(api_routes[i].method, call->method) != 0) {
            api_allow(call, api_routes[i].method);
            continue;
        }
        call->route = &api_routes[i];
        for (size_t k = 0; k < 3; k++)
            call->segments[k] = parts[k] ? util_strndup(parts[k], lens[k]) : NULL;
        free(call->allow);
        call->allow = NULL;
        return 0;
    }
    if (!call->allow) {
        err_set(err, ERR_NOT_FOUND, "there is nothing at %.200s", call->path);
        return err_hint(err, "GET /v1/info, /v1/groups; docs/api.md has the list");
    }
    return err_set(err, ERR_METHOD, "%.16s is not possible at %.200s, only %s", call->method,
                   call->path, call->allow);
}

/* A path segment of a WebSocket message: "group" defaults to "default" as everywhere in the client.
 */
static int api_message_segment(struct api_call *call, size_t which, struct err *err)
{
    const json *j = json_get(call->message, api_segment_names[which]);
    int64_t number;
    if (json_string(j))
        call->segments[which] = util_strdup(json_string(j));
    else if (json_integer(j, &number))
        call->segments[which] = util_printf("%lld", (long long)number);
    else if (which == 0)
        call->segments[which] = util_strdup("default");
    else
        return err_set(err, ERR_INVALID, "\"%s\" is missing or no string",
                       api_segment_names[which]);
    return 0;
}

static int api_find_op(struct api_call *call, struct err *err)
{
    for (size_t i = 0; i < UTIL_COUNT(api_routes); i++) {
        const char *pattern = api_routes[i].path;
        if (!api_routes[i].op || strcmp(api_routes[i].op, call->op) != 0)
            continue;
        call->route = &api_routes[i];
        for (size_t k = 0; k < 3; k++) {
            char key[4] = {'{', api_segment_keys[k], '}', '\0'};
            if (strstr(pattern, key) && api_message_segment(call, k, err) < 0)
                return -1;
        }
        return 0;
    }
    err_set(err, ERR_NOT_FOUND, "there is no op \"%.80s\"", call->op);
    return err_hint(err, "proto/protocol.md lists them; namespace values travel over HTTP");
}

int api_open(struct api_call *call, const struct auth_claims *claims)
{
    struct err err = ERR_INIT;
    int rc = call->op ? api_find_op(call, &err) : api_find_path(call, &err);
    bool open = rc == 0 && call->route->open;
    if (!call->op) {
        struct err denied = ERR_INIT; /* strangers do not learn which paths exist */
        if (auth_check(call->api->auth, &call->peer, claims, open, &denied) < 0) {
            err = denied;
            rc = -1;
        }
    }
    if (rc < 0) {
        api_problem(call, &err, NULL);
        return -1;
    }
    call->takes = call->route->body;
    return 0;
}

int api_body_add(struct api_call *call, const void *data, size_t len)
{
    struct err err = ERR_INIT;
    const struct config *c = call->api->config;
    int rc = 0;
    if (call->takes == API_BODY_BLOB) {
        rc = blob_write(&call->blob, data, len, c->payload_limit, &err);
    } else if (call->takes == API_BODY_NONE) {
        return 0; /* a body nobody asked for is read and dropped */
    } else if (call->body.len + len > c->body_limit) {
        rc = err_set(&err, ERR_TOO_LARGE, "the body is larger than %llu bytes",
                     (unsigned long long)c->body_limit);
        err_hint(&err, "the setting body_limit says how large one may be");
    } else {
        buf_add(&call->body, data, len);
    }
    if (rc < 0)
        api_problem(call, &err, NULL);
    return rc;
}

void api_handle(struct api_call *call)
{
    call->route->handle(call);
}

/* --- what handlers ask --- */

const char *api_param(const struct api_call *call, const char *name)
{
    for (size_t i = 0; i + 1 < call->query_len; i += 2) {
        if (strcmp(call->query[i], name) == 0)
            return call->query[i + 1];
    }
    return NULL;
}

int api_param_bool(const struct api_call *call, const char *name, bool *out, struct err *err)
{
    const char *text = api_param(call, name);
    if (!text)
        return json_get_bool(call->message, name, out, err);
    if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
        return err_set(err, ERR_INVALID, "\"%s\" must be true or false, not \"%.40s\"", name, text);
    *out = *text == 't';
    return 1;
}

int api_param_u64(const struct api_call *call, const char *name, uint64_t max, uint64_t *out,
                  struct err *err)
{
    const char *text = api_param(call, name);
    int64_t number;
    int found = json_get_int(call->message, name, 0, INT64_MAX, &number, err);
    if (found < 0)
        return -1;
    if (found && (uint64_t)number <= max) {
        *out = (uint64_t)number;
        return 1;
    }
    if (!found && !text)
        return 0;
    if (text && util_parse_u64(text, 0, max, out) == 0)
        return 1;
    return err_set(err, ERR_INVALID, "\"%s\" must be a whole number from 0 to %llu", name,
                   (unsigned long long)max);
}

const json *api_object(struct api_call *call, struct err *err)
{
    if (call->message)
        return call->message;
    const char *text = call->body.len ? (const char *)call->body.data : "{}";
    call->message = json_parse(text, call->body.len ? call->body.len : 2, err);
    if (call->message && !json_is_object(call->message)) {
        json_free(call->message);
        call->message = NULL;
        err_set(err, ERR_INVALID, "the body must be a JSON object");
    }
    return call->message;
}

struct group *api_group(struct api_call *call, struct err *err)
{
    struct group *g = pool_find(call->api->pool, call->segments[0]);
    if (g && auth_may_touch(&call->peer, g->spec.uid))
        return g;
    err_set(err, ERR_NOT_FOUND, "there is no group \"%.80s\"", call->segments[0]);
    err_hint(err, "GET /v1/groups lists the groups; POST /v1/groups {\"ranks\": 2} makes one");
    return NULL;
}

static int api_rank_out_of_range(const struct group *g, const char *what, struct err *err)
{
    return err_set(err, ERR_INVALID, "rank %.40s: the group %s has the ranks 0 to %d", what,
                   g->spec.name, g->spec.ranks - 1);
}

static int api_ranks_text(const struct group *g, const char *text, bool *mask, struct err *err)
{
    if (!*text)
        return err_set(err, ERR_INVALID, "\"ranks\" names no rank");
    do {
        size_t n = strcspn(text, ",");
        char *part = util_strndup(text, n);
        uint64_t rank = 0;
        int rc = util_parse_u64(part, 0, (uint64_t)g->spec.ranks - 1, &rank);
        if (rc < 0)
            api_rank_out_of_range(g, part, err);
        free(part);
        if (rc < 0)
            return -1;
        mask[rank] = true;
        text += n;
    } while (*text++ == ',');
    return 0;
}

static int api_ranks_array(const struct group *g, const json *list, bool *mask, struct err *err)
{
    if (!json_is_array(list) || !json_first(list))
        return err_set(err, ERR_INVALID, "\"ranks\" must be a non-empty array of whole numbers");
    for (const json *j = json_first(list); j; j = json_next(j)) {
        int64_t rank;
        char text[32];
        if (!json_integer(j, &rank))
            return err_set(err, ERR_INVALID, "\"ranks\" must hold whole numbers");
        snprintf(text, sizeof(text), "%lld", (long long)rank);
        if (rank < 0 || rank >= g->spec.ranks)
            return api_rank_out_of_range(g, text, err);
        mask[rank] = true;
    }
    return 0;
}

int api_ranks(struct api_call *call, const struct group *g, const char *name, bool **mask,
              struct err *err)
{
    const char *text = api_param(call, name);
    const json *list = json_get(call->message, name);
    *mask = NULL;
    if (!text && !list)
        return 0;
    *mask = util_calloc((size_t)g->spec.ranks, sizeof(**mask));
    int rc = text ? api_ranks_text(g, text, *mask, err) : api_ranks_array(g, list, *mask, err);
    if (rc < 0) {
        free(*mask);
        *mask = NULL;
    }
    return rc;
}

/* How one element of an Accept header names a type: 3 exactly, 2 "kind/", 1 any, 0 not at all. */
static int api_accept_match(const char *element, size_t len, const char *type)
{
    size_t kind = strcspn(type, "/") + 1;
    if (len == strlen(type) && strncasecmp(element, type, len) == 0)
        return 3;
    if (len == kind + 1 && element[kind] == '*' && strncasecmp(element, type, kind) == 0)
        return 2;
    return len == 3 && strncmp(element, "*/*", 3) == 0;
}

/* The quality an Accept header gives a type: that of the element which names it most exactly. */
static double api_accept_quality(const char *accept, const char *type, int *exact)
{
    double quality = 0;
    *exact = 0;
    while (*accept) {
        accept += strspn(accept, " ,\t");
        size_t len = strcspn(accept, ",; \t"), all = strcspn(accept, ",");
        int match = api_accept_match(accept, len, type);
        if (match > *exact) {
            char *params = util_strndup(accept + len, all - len);
            const char *q = strcasestr(params, "q=");
            quality = q ? strtod(q + 2, NULL) : 1;
            *exact = match;
            free(params);
        }
        accept += all;
    }
    return quality;
}

int api_choose(const char *accept, const char *const *types, size_t count, bool *wild)
{
    int best = -1, best_exact = 0;
    double best_quality = 0;
    *wild = true;
    if (!accept)
        return 0;
    for (size_t i = 0; i < count; i++) {
        int exact;
        double quality = api_accept_quality(accept, types[i], &exact);
        if (quality > best_quality ||
            (quality > 0 && quality == best_quality && exact > best_exact)) {
            best = (int)i;
            best_exact = exact;
            best_quality = quality;
        }
    }
    *wild = best_exact < 3;
    return best;
}

bool api_prefers_async(const struct api_call *call)
{
    return call->headers.prefer && strcasestr(call->headers.prefer, "respond-async");
}
