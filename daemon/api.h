/* SPDX-License-Identifier: Apache-2.0 */
/*
 * api.h - what clients can ask, whatever transport brings it.
 *
 * A transport makes an api_call, fills in what is asked, and goes: api_open (route, permission) ->
 * the body, if api_open allowed one -> api_handle. The answer is there when api_handle returns, or
 * later: then `ready` is called, once, from the loop. An answer is a status and bytes, a
 * descriptor, or a stream of events. api_close at any time ends it, whatever is under way.
 */
#ifndef DDIPD_API_H
#define DDIPD_API_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "auth.h"
#include "blob.h"
#include "group.h"
#include "json.h"
#include "pool.h"
#include "stream.h"

struct api_route;
struct api_call;
struct stacks;

struct api {
    struct pool *pool;
    struct auth *auth;
    const struct config *config;
    double started;
    const char *url;             /* what TCP is bound to, or NULL */
    void (*shutdown)(void *ctx); /* stop everything; must only schedule */
    void *shutdown_ctx;
};

enum api_body { API_BODY_NONE, API_BODY_MEMORY, API_BODY_BLOB };
enum api_state { API_OPEN, API_PENDING, API_ANSWERED };

/* Copies of the request headers that matter; NULL: absent. */
struct api_headers {
    char *accept, *content_type, *prefer, *idempotency_key, *last_event_id;
};

struct api_call {
    struct api *api;
    struct auth_peer peer;

    /* What is asked. HTTP: method and path, and query as "key=value" pairs; WebSocket: op and
     * message. */
    const char *method;
    char *path;
    char *query[16]; /* decoded key, value, key, value, ... */
    size_t query_len;
    const char *op;
    json *message;
    struct api_headers headers;
    struct buf body;
    struct blob blob;

    /* Set by api_open. */
    const struct api_route *route;
    enum api_body takes;
    char *segments[3]; /* group, cell, name: parts of the path, decoded */
    struct err err;

    /* The answer. */
    enum api_state state;
    int status;
    const char *content_type;
    char *location, *allow;
    bool close; /* end the connection after it */
    struct buf out;
    int out_fd; /* or -1; its first out_size bytes are the body, after `out` */
    uint64_t out_size;
    struct stream *stream;   /* after `out` */
    void (*wake)(void *ctx); /* the stream has something; must only schedule */
    void (*ready)(void *ctx);
    void *ctx;

    /* What is under way. */
    void (*cancel)(struct api_call *call); /* NULL: nothing */
    struct group *group;
    struct group_wait wait;
    struct request *request;
    struct stacks *stacks;
    uint32_t cell;
    bool created;
};

void api_call_init(struct api_call *call, struct api *api, struct auth_peer peer);
/* Cancels and frees what is inside, not the struct. */
void api_close(struct api_call *call);

/* -1: refused, the answer is there (call->state is API_ANSWERED). */
int api_open(struct api_call *call, const struct auth_claims *claims) ERR_MUST_CHECK;
/* Bytes of the body. -1: refused, the answer is there. */
int api_body_add(struct api_call *call, const void *data, size_t len) ERR_MUST_CHECK;
void api_handle(struct api_call *call);

/* For the api_*.c files. */

/* A query parameter, a member of the WebSocket message, or of the JSON body. NULL: not given. */
const char *api_param(const struct api_call *call, const char *name);
int api_param_bool(const struct api_call *call, const char *name, bool *out,
                   struct err *err) ERR_MUST_CHECK;
int api_param_u64(const struct api_call *call, const char *name, uint64_t max, uint64_t *out,
                  struct err *err) ERR_MUST_CHECK;
/* The JSON object of the request: the WebSocket message, or the parsed body (an empty one is {}).
 * NULL: *err. It lives as long as the call. */
const json *api_object(struct api_call *call, struct err *err) ERR_MUST_CHECK;
/* The group of the path, if the caller may touch it. NULL: *err. */
struct group *api_group(struct api_call *call, struct err *err) ERR_MUST_CHECK;
/* "ranks" (array, or "0,2" in a query): a mask of the group's ranks, to be freed; NULL in *mask:
 * not given. */
int api_ranks(struct api_call *call, const struct group *g, const char *name, bool **mask,
              struct err *err) ERR_MUST_CHECK;
/* Which of the media types the Accept header likes best (RFC 9110: q, then how exactly it is named,
 * then the order in types); no header: the first. -1: none of them. *wild: only a wildcard named
 * it. */
int api_choose(const char *accept, const char *const *types, size_t count, bool *wild);
bool api_prefers_async(const struct api_call *call);

/* Answers; each makes the state API_ANSWERED and calls ready when api_handle has already returned.
 */
void api_answer(struct api_call *call, int status, const char *content_type);
void api_problem(struct api_call *call, const struct err *err, const json *rank_error);

/* Starts an answer whose body is JSON: write into the returned writer, then api_answer_json. */
struct jw api_json(struct api_call *call);
void api_answer_json(struct api_call *call, int status);

/* The title of a status that a problem can have. */
const char *api_reason(int status);

/* The call is under way; cancel undoes it when the asker goes first. */
void api_pending(struct api_call *call, void (*cancel)(struct api_call *call));

#endif
