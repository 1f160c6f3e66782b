/* SPDX-License-Identifier: Apache-2.0 */
/*
 * api_namespace.c - variables of ranks: put, get, delete, list, many at once; completion,
 * inspection.
 *
 * The daemon never looks into a value: it moves a memory file from the body to the ranks and back.
 */
#include "api_namespace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "api.h"
#include "request.h"

#define API_NAMESPACE_CODE_MAX (1 << 20) /* bytes to complete or inspect in */

static const char *const api_namespace_types[] = {"application/json", "text/plain",
                                                  "application/x-npy", "application/x-pickle"};

/* --- asking ranks --- */

static void api_namespace_cancel(struct api_call *call)
{
    request_abandon(call->request);
}

/* body: JSON for the ranks, taken. mask: taken. */
static void api_namespace_ask(struct api_call *call, struct group *g, bool *mask,
                              enum request_turn turn, struct buf *body, int fd,
                              void (*done)(void *ctx, struct request *r))
{
    call->group = g;
    call->request = request_new(g, mask, turn, buf_take(body), fd, done, call, &call->err);
    free(mask);
    if (call->request)
        api_pending(call, api_namespace_cancel);
    else
        api_problem(call, &call->err, NULL);
}

/* True: some rank failed, and the caller has been told. */
static bool api_namespace_failed(struct api_call *call, struct request *r)
{
    if (!r->err.code)
        return false;
    api_problem(call, &r->err, r->failure ? json_get(r->failure, "error") : NULL);
    return true;
}

/* The rank's own answer, as it is. */
static void api_namespace_relay(void *ctx, struct request *r)
{
    struct api_call *call = ctx;
    if (api_namespace_failed(call, r))
        return;
    struct jw w = api_json(call);
    jw_json(&w, NULL, r->reply);
    api_answer_json(call, 200);
}

static void api_namespace_value(void *ctx, struct request *r)
{
    struct api_call *call = ctx;
    struct stat st;
    if (api_namespace_failed(call, r))
        return;
    const char *type = json_string(json_get(r->reply, "content_type"));
    const char *known = NULL;
    for (size_t i = 0; type && i < UTIL_COUNT(api_namespace_types); i++) {
        if (strcmp(type, api_namespace_types[i]) == 0)
            known = api_namespace_types[i];
    }
    if (!known || r->reply_fd < 0 || fstat(r->reply_fd, &st) < 0) {
        err_set(&call->err, ERR_IO, "the rank's answer has no value");
        api_problem(call, &call->err, NULL);
        return;
    }
    call->out_fd = r->reply_fd;
    call->out_size = (uint64_t)st.st_size;
    r->reply_fd = -1;
    api_answer(call, 200, known);
}

static void api_namespace_stored(void *ctx, struct request *r)
{
    struct api_call *call = ctx;
    if (api_namespace_failed(call, r))
        return;
    struct jw w = api_json(call);
    jw_object(&w, NULL);
    if (json_get(r->reply, "names"))
        jw_json(&w, "names", json_get(r->reply, "names"));
    else
        jw_string(&w, "name", call->segments[2]);
    jw_int(&w, "bytes", (int64_t)call->blob.size);
    jw_array(&w, "ranks");
    for (int i = 0; i < r->group->spec.ranks; i++) {
        if (r->asked[i])
            jw_int(&w, NULL, i);
    }
    jw_end_array(&w);
    jw_end_object(&w);
    api_answer_json(call, 200);
}

/* --- reading requests --- */

static struct jw api_namespace_body(struct buf *body, const char *op)
{
    struct jw w = JW_INIT(body);
    jw_object(&w, NULL);
    jw_string(&w, "op", op);
    return w;
}

/* A Python identifier; letters beyond ASCII are left to the rank. */
static bool api_namespace_identifier(const char *s)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_";
    if (!*s || strlen(s) > 256)
        return false;
    for (size_t i = 0; s[i]; i++) {
        bool digit = s[i] >= '0' && s[i] <= '9';
        if ((unsigned char)s[i] < 0x80 && !strchr(letters, s[i]) && (!digit || i == 0))
            return false;
    }
    return util_utf8_valid(s, strlen(s)) == strlen(s);
}

/* The group and a valid variable name, or NULL with the problem answered. */
static struct group *api_namespace_named(struct api_call *call)
{
    struct err *err = &call->err;
    struct group *g = api_group(call, err);
    if (g && !api_namespace_identifier(call->segments[2])) {
        err_set(err, ERR_INVALID, "\"%.80s\" is no Python identifier", call->segments[2]);
        g = NULL;
    }
    if (!g)
        api_problem(call, err, NULL);
    return g;
}

/* The one rank of ?rank= (default 0), as a mask; NULL: the problem is in *err. */
static bool *api_namespace_one_rank(struct api_call *call, const struct group *g, struct err *err)
{
    uint64_t rank = 0;
    if (api_param_u64(call, "rank", UINT32_MAX, &rank, err) < 0)
        return NULL;
    if (rank >= (uint64_t)g->spec.ranks) {
        err_set(err, ERR_INVALID, "rank %llu: the group %s has the ranks 0 to %d",
                (unsigned long long)rank, g->spec.name, g->spec.ranks - 1);
        return NULL;
    }
    bool *mask = util_calloc((size_t)g->spec.ranks, sizeof(*mask));
    mask[rank] = true;
    return mask;
}

static const char *api_namespace_type(const struct api_call *call)
{
    const char *have = call->headers.content_type;
    for (size_t i = 0; have && i < UTIL_COUNT(api_namespace_types); i++) {
        size_t n = strlen(api_namespace_types[i]);
        if (strncasecmp(have, api_namespace_types[i], n) == 0 &&
            (!have[n] || strchr("; ", have[n])))
            return api_namespace_types[i];
    }
    return NULL;
}

static void api_namespace_bad_type(struct api_call *call)
{
    err_set(&call->err, ERR_MEDIA_TYPE, "the Content-Type \"%.80s\" is no known form of a value",
            call->headers.content_type ? call->headers.content_type : "");
    err_hint(&call->err, "application/json, text/plain, application/x-npy or application/x-pickle");
    api_problem(call, &call->err, NULL);
}

/* --- handlers --- */

void api_namespace_list(struct api_call *call)
{
    struct group *g = api_group(call, &call->err);
    bool wait = true, *mask = NULL;
    if (g && api_param_bool(call, "wait", &wait, &call->err) >= 0)
        mask = api_namespace_one_rank(call, g, &call->err);
    if (!mask) {
        api_problem(call, &call->err, NULL);
        return;
    }
    struct buf body = BUF_INIT;
    struct jw w = api_namespace_body(&body, "list");
    jw_end_object(&w);
    api_namespace_ask(call, g, mask, wait ? REQUEST_READS : REQUEST_ASIDE, &body, -1,
                      api_namespace_relay);
}

void api_namespace_put(struct api_call *call)
{
    struct group *g = api_namespace_named(call);
    const char *type = api_namespace_type(call);
    bool *mask;
    if (!g)
        return;
    if (!type) {
        api_namespace_bad_type(call);
        return;
    }
    int fd = api_ranks(call, g, "ranks", &mask, &call->err) < 0
                 ? -1
                 : blob_seal(&call->blob, &call->err);
    if (fd < 0) {
        api_problem(call, &call->err, NULL);
        return;
    }
    struct buf body = BUF_INIT;
    struct jw w = api_namespace_body(&body, "put");
    jw_string(&w, "name", call->segments[2]);
    jw_string(&w, "content_type", type);
    jw_end_object(&w);
    api_namespace_ask(call, g, mask, REQUEST_WRITES, &body, fd, api_namespace_stored);
}

void api_namespace_get(struct api_call *call)
{
    struct group *g = api_namespace_named(call);
    bool wild;
    int best = api_choose(call->headers.accept, api_namespace_types,
                          UTIL_COUNT(api_namespace_types), &wild);
    if (!g)
        return;
    if (best < 0) {
        err_set(&call->err, ERR_NOT_ACCEPTABLE, "a value cannot be given as \"%.80s\"",
                call->headers.accept);
        err_hint(&call->err,
                 "application/json, text/plain, application/x-npy or application/x-pickle");
        api_problem(call, &call->err, NULL);
        return;
    }
    const char *type = wild ? NULL : api_namespace_types[best]; /* NULL: the rank chooses */
    bool *mask = api_namespace_one_rank(call, g, &call->err);
    if (!mask) {
        api_problem(call, &call->err, NULL);
        return;
    }
    struct buf body = BUF_INIT;
    struct jw w = api_namespace_body(&body, "get");
    jw_string(&w, "name", call->segments[2]);
    jw_string(&w, "content_type", type);
    jw_end_object(&w);
    api_namespace_ask(call, g, mask, REQUEST_READS, &body, -1, api_namespace_value);
}

void api_namespace_delete(struct api_call *call)
{
    struct group *g = api_namespace_named(call);
    bool *mask;
    if (!g)
        return;
    if (api_ranks(call, g, "ranks", &mask, &call->err) < 0) {
        api_problem(call, &call->err, NULL);
        return;
    }
    struct buf body = BUF_INIT;
    struct jw w = api_namespace_body(&body, "delete");
    jw_string(&w, "name", call->segments[2]);
    jw_end_object(&w);
    api_namespace_ask(call, g, mask, REQUEST_WRITES, &body, -1, api_namespace_stored);
}

/* {"pull": [...], "rank": 0}: the blob is small JSON here, read back into memory. */
static void api_namespace_pull(struct api_call *call, struct group *g)
{
    struct err *err = &call->err;
    if (blob_read(&call->blob, call->api->config->body_limit, &call->body, err) < 0 ||
        !api_object(call, err)) {
        api_problem(call, err, NULL);
        return;
    }
    const json *names = json_get(call->message, "pull");
    bool good = json_is_array(names) && json_first(names);
    for (const json *j = json_first(names); j; j = json_next(j))
        good = good && json_string(j) && api_namespace_identifier(json_string(j));
    bool *mask = NULL;
    if (!good)
        err_set(err, ERR_INVALID, "\"pull\" must be a non-empty array of Python identifiers");
    else
        mask = api_namespace_one_rank(call, g, err);
    if (!mask) {
        api_problem(call, err, NULL);
        return;
    }
    struct buf body = BUF_INIT;
    struct jw w = api_namespace_body(&body, "get_many");
    jw_json(&w, "names", names);
    jw_end_object(&w);
    api_namespace_ask(call, g, mask, REQUEST_READS, &body, -1, api_namespace_value);
}

void api_namespace_bulk(struct api_call *call)
{
    struct group *g = api_group(call, &call->err);
    const char *type = api_namespace_type(call);
    bool *mask = NULL;
    int fd = -1;
    if (!g) {
        api_problem(call, &call->err, NULL);
    } else if (type && strcmp(type, "application/json") == 0) {
        api_namespace_pull(call, g);
    } else if (!type || strcmp(type, "application/x-pickle") != 0) {
        api_namespace_bad_type(call);
    } else if (api_ranks(call, g, "ranks", &mask, &call->err) < 0 ||
               (fd = blob_seal(&call->blob, &call->err)) < 0) {
        api_problem(call, &call->err, NULL);
    } else {
        struct buf body = BUF_INIT;
        struct jw w = api_namespace_body(&body, "put_many");
        jw_end_object(&w);
        api_namespace_ask(call, g, mask, REQUEST_WRITES, &body, fd, api_namespace_stored);
    }
}

static int api_namespace_code(const json *question, const char **code, struct err *err)
{
    if (json_get_string(question, "code", code, err) < 0)
        return -1;
    if (strlen(*code) <= API_NAMESPACE_CODE_MAX)
        return 0;
    err_set(err, ERR_TOO_LARGE, "\"code\" has %zu bytes, more than %d", strlen(*code),
            API_NAMESPACE_CODE_MAX);
    return err_hint(err, "send the lines around the cursor");
}

/* Completion and inspection: the front end's question goes to the rank as it is. They do not queue:
 * a thread beside the one that runs cells answers. */
static void api_namespace_question(struct api_call *call, const char *op)
{
    struct err *err = &call->err;
    struct group *g = api_group(call, err);
    const json *question = g ? api_object(call, err) : NULL;
    const char *code = "";
    int64_t cursor = 0, detail = 0;
    bool *mask = NULL;
    if (question && api_namespace_code(question, &code, err) >= 0 &&
        json_get_int(question, "cursor_pos", 0, INT32_MAX, &cursor, err) >= 0 &&
        json_get_int(question, "detail_level", 0, 1, &detail, err) >= 0)
        mask = api_namespace_one_rank(call, g, err);
    if (!mask) {
        api_problem(call, err, NULL);
        return;
    }
    struct buf body = BUF_INIT;
    struct jw w = api_namespace_body(&body, op);
    jw_string(&w, "code", code);
    if (json_get(question, "cursor_pos"))
        jw_int(&w, "cursor_pos", cursor);
    jw_int(&w, "detail_level", detail);
    jw_end_object(&w);
    api_namespace_ask(call, g, mask, REQUEST_ASIDE, &body, -1, api_namespace_relay);
}

void api_namespace_complete(struct api_call *call)
{
    api_namespace_question(call, "complete");
}

void api_namespace_inspect(struct api_call *call)
{
    api_namespace_question(call, "inspect");
}
