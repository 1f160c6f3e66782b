/* SPDX-License-Identifier: Apache-2.0 */
/*
 * http.c - HTTP on the loop: libmicrohttpd is a guest here, it neither listens nor threads.
 *
 * libmicrohttpd has an epoll descriptor of its own, which the loop watches; http_turn runs it and
 * re-arms a timer from MHD_get_timeout, without which pipelined requests and idle timeouts stall. A
 * request that waits is suspended, and resuming alone does nothing: the timer must be armed as
 * well. A suspended connection is invisible to libmicrohttpd, so http_watch looks for the client
 * leaving.
 */
#include "http.h"

#include <microhttpd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <unistd.h>

#include "log.h"

#define HTTP_BLOCK (32 * 1024)
#define HTTP_TURNS 8
/* The body of a refused request is read and dropped this far: a client that is still sending when
 * the connection closes may never see the answer. */
#define HTTP_EXCESS (8ull * 1024 * 1024)

#if MHD_VERSION >= 0x00097002
typedef enum MHD_Result http_result;
#else
typedef int http_result;
#endif

/* Tells that the client has gone; on a descriptor of its own, since libmicrohttpd closes its. */
struct http_watch {
    uv_poll_t poll;
    int fd;
    struct http_request *request; /* NULL: nobody wants to know any more */
};

struct http_request {
    TAILQ_ENTRY(http_request) link;
    struct http *http;
    struct MHD_Connection *conn;
    struct api_call call;
    bool handled, suspended, gone;
    uint64_t excess;
    struct http_watch *watch;
};

struct http {
    uv_loop_t *loop;
    struct api *api;
    struct MHD_Daemon *mhd;
    uv_poll_t poll;
    uv_timer_t timer;
    int handles;
    TAILQ_HEAD(, http_request) requests;
};

/* --- running libmicrohttpd --- */

static void http_on_timer(uv_timer_t *timer);

static void http_turn(struct http *h)
{
    MHD_UNSIGNED_LONG_LONG timeout = 0;
    int more = MHD_YES;
    for (int i = 0; i < HTTP_TURNS && more == MHD_YES && timeout == 0; i++) {
        MHD_run(h->mhd);
        more = MHD_get_timeout(h->mhd, &timeout);
    }
    if (more == MHD_YES)
        uv_timer_start(&h->timer, http_on_timer, timeout, 0);
    else
        uv_timer_stop(&h->timer);
}

static void http_on_timer(uv_timer_t *timer)
{
    http_turn(timer->data);
}

static void http_on_poll(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    http_turn(poll->data);
}

static void http_suspend(struct http_request *r)
{
    r->suspended = true;
    MHD_suspend_connection(r->conn);
}

static void http_resume(struct http_request *r)
{
    if (!r->suspended)
        return;
    r->suspended = false;
    MHD_resume_connection(r->conn);
    uv_timer_start(&r->http->timer, http_on_timer, 0, 0);
}

static void http_wake(void *ctx)
{
    http_resume(ctx);
}

/* --- a client that leaves while it is suspended --- */

static void http_watch_closed(uv_handle_t *handle)
{
    struct http_watch *w = handle->data;
    close(w->fd);
    free(w);
}

static void http_watch_stop(struct http_request *r)
{
    if (!r->watch)
        return;
    r->watch->request = NULL;
    uv_close((uv_handle_t *)&r->watch->poll, http_watch_closed);
    r->watch = NULL;
}

static void http_on_gone(uv_poll_t *poll, int status, int events)
{
    struct http_watch *w = poll->data;
    struct http_request *r = w->request;
    (void)status;
    (void)events;
    if (!r)
        return;
    r->gone = true;
    http_watch_stop(r);
    http_resume(r);
}

static void http_watch_start(struct http_request *r)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(r->conn, MHD_CONNECTION_INFO_CONNECTION_FD);
    int fd = info && !r->watch ? dup(info->connect_fd) : -1;
    if (fd < 0)
        return;
    struct http_watch *w = util_calloc(1, sizeof(*w));
    w->fd = fd;
    w->request = r;
    w->poll.data = w;
    uv_poll_init(r->http->loop, &w->poll, fd);
    uv_poll_start(&w->poll, UV_DISCONNECT, http_on_gone);
    r->watch = w;
}

/* --- answering --- */

static ssize_t http_read_stream(void *cls, uint64_t pos, char *buf, size_t max)
{
    struct http_request *r = cls;
    (void)pos;
    if (r->gone)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    ssize_t n = stream_read(r->call.stream, buf, max);
    if (n < 0)
        return MHD_CONTENT_READER_END_OF_STREAM;
    if (n == 0) {
        http_watch_start(r);
        http_suspend(r);
    }
    return n;
}

static struct MHD_Response *http_response(struct http_request *r)
{
    struct api_call *call = &r->call;
    if (call->stream)
        return MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, HTTP_BLOCK, http_read_stream, r,
                                                 NULL);
    if (call->out_fd >= 0) {
        int fd = call->out_fd;
        call->out_fd = -1; /* the response closes it */
        return MHD_create_response_from_fd64(call->out_size, fd);
    }
    return MHD_create_response_from_buffer(
        call->out.len, call->out.data ? (void *)call->out.data : "", MHD_RESPMEM_MUST_COPY);
}

static void http_headers(struct http_request *r, struct MHD_Response *response)
{
    const struct api_call *call = &r->call;
    MHD_add_response_header(response, "Content-Type", call->content_type);
    MHD_add_response_header(response, "Cache-Control", "no-store");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    if (call->location)
        MHD_add_response_header(response, "Location", call->location);
    if (call->allow)
        MHD_add_response_header(response, "Allow", call->allow);
    if (call->status == 401)
        MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    if (call->status == 426)
        MHD_add_response_header(response, "Upgrade", "websocket");
    if (call->close || call->status == 401 || call->status == 413)
        MHD_add_response_header(response, "Connection", "close");
}

static http_result http_answer(struct http_request *r)
{
    struct MHD_Response *response = http_response(r);
    if (!response)
        return MHD_NO;
    http_headers(r, response);
    http_result rc = MHD_queue_response(r->conn, (unsigned)r->call.status, response);
    MHD_destroy_response(response);
    return rc;
}

/* --- reading requests --- */

static http_result http_add_query(void *cls, enum MHD_ValueKind kind, const char *key,
                                  const char *value)
{
    struct api_call *call = cls;
    (void)kind;
    if (call->query_len + 2 > UTIL_COUNT(call->query))
        return MHD_NO;
    call->query[call->query_len++] = util_strdup(key);
    call->query[call->query_len++] = util_strdup(value ? value : "");
    return MHD_YES;
}

static const char *http_header(struct MHD_Connection *conn, const char *name)
{
    return MHD_lookup_connection_value(conn, MHD_HEADER_KIND, name);
}

static char *http_header_copy(struct MHD_Connection *conn, const char *name)
{
    const char *value = http_header(conn, name);
    return value ? util_strdup(value) : NULL;
}

static struct http_request *http_begin(struct http *h, struct MHD_Connection *conn,
                                       const char *method, const char *path)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CONNECTION_FD);
    struct http_request *r = util_calloc(1, sizeof(*r));
    struct api_call *call = &r->call;
    r->http = h;
    r->conn = conn;
    api_call_init(call, h->api, auth_peer_of(info ? info->connect_fd : -1));
    /* of HEAD libmicrohttpd leaves the body out itself; the text is its own, as long as the request
     */
    call->method = strcmp(method, "HEAD") == 0 ? "GET" : method;
    call->path = util_strdup(path);
    call->wake = call->ready = http_wake;
    call->ctx = r;
    call->headers = (struct api_headers){
        .accept = http_header_copy(conn, "Accept"),
        .content_type = http_header_copy(conn, "Content-Type"),
        .prefer = http_header_copy(conn, "Prefer"),
        .idempotency_key = http_header_copy(conn, "Idempotency-Key"),
        .last_event_id = http_header_copy(conn, "Last-Event-ID"),
    };
    MHD_get_connection_values(conn, MHD_GET_ARGUMENT_KIND, http_add_query, call);
    TAILQ_INSERT_TAIL(&h->requests, r, link);
    return r;
}

static uint64_t http_length(const struct http_request *r)
{
    const char *text = http_header(r->conn, "Content-Length");
    uint64_t length = 0;
    return text && util_parse_u64(text, 0, UINT64_MAX, &length) == 0 ? length : 0;
}

static void http_check_length(struct http_request *r)
{
    const struct config *c = r->http->api->config;
    uint64_t limit = r->call.takes == API_BODY_BLOB ? c->payload_limit : c->body_limit;
    uint64_t length = http_length(r);
    struct err err = ERR_INIT;
    if (length <= limit)
        return;
    err_set(&err, ERR_TOO_LARGE, "the body is %llu bytes; at most %llu are taken",
            (unsigned long long)length, (unsigned long long)limit);
    err_hint(&err, "the setting %s says how large one may be",
             r->call.takes == API_BODY_BLOB ? "payload_limit" : "body_limit");
    api_problem(&r->call, &err, NULL);
}

/* The headers are there. A refusal is answered before the body where the client waits for leave to
 * send it (Expect), or where the body is too long to be dropped. */
static http_result http_open(struct http_request *r)
{
    struct auth_claims claims = {.authorization = http_header(r->conn, "Authorization"),
                                 .host = http_header(r->conn, "Host"),
                                 .origin = http_header(r->conn, "Origin")};
    if (api_open(&r->call, &claims) == 0)
        http_check_length(r);
    bool refused = r->call.state == API_ANSWERED;
    if (refused && (http_header(r->conn, "Expect") || http_length(r) > HTTP_EXCESS))
        return http_answer(r);
    return MHD_YES;
}

static http_result http_upload(struct http_request *r, const char *data, size_t *len)
{
    bool refused = r->call.state == API_ANSWERED;
    if (!refused && api_body_add(&r->call, data, *len) < 0)
        refused = true;
    if (refused && (r->excess += *len) > HTTP_EXCESS)
        return MHD_NO; /* it will not stop: cut it off */
    *len = 0;
    return MHD_YES;
}

static http_result http_on_access(void *cls, struct MHD_Connection *conn, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_len, void **con_cls)
{
    struct http_request *r = *con_cls;
    (void)version;
    if (!r) {
        *con_cls = r = http_begin(cls, conn, method, url);
        return http_open(r);
    }
    if (*upload_len)
        return http_upload(r, upload, upload_len);
    if (r->gone)
        return MHD_NO;
    if (r->call.state == API_OPEN && !r->handled) {
        r->handled = true;
        api_handle(&r->call);
    }
    if (r->call.state == API_ANSWERED)
        return http_answer(r);
    http_watch_start(r);
    http_suspend(r);
    return MHD_YES;
}

static void http_on_completed(void *cls, struct MHD_Connection *conn, void **con_cls,
                              enum MHD_RequestTerminationCode code)
{
    struct http_request *r = *con_cls;
    (void)cls;
    (void)conn;
    (void)code;
    if (!r)
        return;
    *con_cls = NULL;
    http_watch_stop(r);
    TAILQ_REMOVE(&r->http->requests, r, link);
    api_close(&r->call);
    free(r);
}

/* --- life --- */

/* Over a Unix socket, 0.9.75 complains three times per request that TCP options cannot be set. */
static void http_log(void *cls, const char *fmt, va_list ap)
{
    (void)cls;
    char line[512];
    if (strncmp(fmt, "Setting %s option", 17) == 0 || strncmp(fmt, "Failed to push", 14) == 0)
        return;
    vsnprintf(line, sizeof(line), fmt, ap);
    log_debug("http: %s", line);
}

struct http *http_new(uv_loop_t *loop, struct api *api, struct err *err)
{
    struct http *h = util_calloc(1, sizeof(*h));
    h->loop = loop;
    h->api = api;
    TAILQ_INIT(&h->requests);
    h->mhd = MHD_start_daemon(
        MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG, 0,
        NULL, NULL, http_on_access, h, MHD_OPTION_EXTERNAL_LOGGER, http_log, NULL,
        MHD_OPTION_NOTIFY_COMPLETED, http_on_completed, NULL, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)api->config->connection_limit, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)api->config->idle_timeout_s, MHD_OPTION_END);
    const union MHD_DaemonInfo *info =
        h->mhd ? MHD_get_daemon_info(h->mhd, MHD_DAEMON_INFO_EPOLL_FD) : NULL;
    if (!info) {
        err_set(err, ERR_IO, "libmicrohttpd does not start");
        free(h);
        return NULL;
    }
    h->poll.data = h->timer.data = h;
    h->handles = 2;
    uv_poll_init(loop, &h->poll, info->epoll_fd);
    uv_poll_start(&h->poll, UV_READABLE, http_on_poll);
    uv_timer_init(loop, &h->timer);
    return h;
}

void http_take(struct http *h, int fd, const struct sockaddr *addr, socklen_t len)
{
    /* closes fd itself when it cannot take it */
    MHD_add_connection(h->mhd, fd, addr, len);
    http_turn(h);
}

static void http_closed(uv_handle_t *handle)
{
    struct http *h = handle->data;
    if (--h->handles == 0)
        free(h);
}

void http_close(struct http *h)
{
    if (!h)
        return;
    /* stopping libmicrohttpd with a suspended connection aborts the process */
    struct http_request *r;
    TAILQ_FOREACH(r, &h->requests, link)
    {
        r->gone = true;
        http_resume(r);
    }
    uv_poll_stop(&h->poll);
    uv_timer_stop(&h->timer);
    MHD_run(h->mhd);
    MHD_stop_daemon(h->mhd);
    uv_close((uv_handle_t *)&h->poll, http_closed);
    uv_close((uv_handle_t *)&h->timer, http_closed);
}
