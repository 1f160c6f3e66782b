/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ws.c - the WebSocket endpoint on the loop: libwebsockets is a guest here, it does not listen.
 * On a foreign loop its context is destroyed in two calls, with turns of the loop between them.
 *
 * A text message is a call of the API; its answer repeats the message's id, and the events of cells
 * follow as they are in the journal. libwebsockets may write only when it says so: answers queue,
 * event streams are read no faster than the client takes them. permessage-deflate stays off, it
 * crashes on large messages in 4.1.6.
 */
#include "ws.h"

#include <errno.h>
#include <libwebsockets.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/socket.h>

#include "log.h"

#define WS_CALLS 256      /* open calls of one session, event streams included */
#define WS_BURST 32       /* messages written before the others of the loop get their turn */
#define WS_RX (16 * 1024) /* bytes libwebsockets reads at a time */
#define WS_HANDSHAKE_S 10

struct ws_session;

/* One message of a client, until its answer is sent and its events, if any, are over. */
struct ws_call {
    TAILQ_ENTRY(ws_call) link;
    struct ws_session *session;
    struct api_call call;
    char *id;      /* JSON text */
    bool answered; /* the answer has been sent */
};

struct ws_session {
    TAILQ_ENTRY(ws_session) link;
    struct ws *ws;
    struct lws *wsi;
    struct auth_peer peer;
    struct buf rx; /* a message that is not complete yet */
    TAILQ_HEAD(, ws_call) calls;
    size_t calls_len;
};

struct ws {
    struct api *api;
    struct lws_context *context;
    struct lws_vhost *vhost;
    TAILQ_HEAD(, ws_session) sessions;
    size_t sessions_len;
};

/* --- calls --- */

static void ws_call_free(struct ws_call *c)
{
    TAILQ_REMOVE(&c->session->calls, c, link);
    c->session->calls_len--;
    api_close(&c->call);
    free(c->id);
    free(c);
}

static void ws_wake(void *ctx)
{
    struct ws_call *c = ctx;
    lws_callback_on_writable(c->session->wsi);
}

static struct ws_call *ws_call_new(struct ws_session *s)
{
    struct ws_call *c = util_calloc(1, sizeof(*c));
    c->session = s;
    api_call_init(&c->call, s->ws->api, s->peer);
    c->call.wake = c->call.ready = ws_wake;
    c->call.ctx = c;
    TAILQ_INSERT_TAIL(&s->calls, c, link);
    s->calls_len++;
    return c;
}

static int ws_read_message(struct ws_call *c, json *message, struct err *err)
{
    struct buf id = BUF_INIT;
    struct jw w = JW_INIT(&id);
    jw_json(&w, NULL, json_get(message, "id"));
    c->id = buf_take(&id);
    if (!message)
        return -1;
    if (!json_is_object(message))
        return err_set(err, ERR_INVALID, "a message must be a JSON object");
    c->call.op = json_string(json_get(message, "op"));
    if (!c->call.op)
        return err_set(err, ERR_INVALID, "\"op\" is missing or no string");
    if (c->session->calls_len > WS_CALLS)
        return err_set(err, ERR_UNAVAILABLE, "more than %d calls are open on this connection",
                       WS_CALLS);
    return 0;
}

static void ws_message(struct ws_session *s, const char *text, size_t len)
{
    struct err err = ERR_INIT;
    struct ws_call *c = ws_call_new(s);
    c->call.message = json_parse(text, len, &err);
    if (ws_read_message(c, c->call.message, &err) < 0)
        api_problem(&c->call, &err, NULL);
    else if (api_open(&c->call, NULL) == 0)
        api_handle(&c->call);
    if (c->call.state == API_ANSWERED)
        lws_callback_on_writable(s->wsi);
}

/* --- writing --- */

static int ws_send(struct ws_session *s, const char *text, size_t len)
{
    struct buf frame = BUF_INIT;
    buf_room(&frame, LWS_PRE + len);
    frame.len = LWS_PRE;
    buf_add(&frame, text, len);
    int n = lws_write(s->wsi, frame.data + LWS_PRE, len, LWS_WRITE_TEXT);
    buf_deinit(&frame);
    return n < (int)len ? -1 : 0;
}

static int ws_send_answer(struct ws_call *c)
{
    struct buf *out = &c->call.out, text = BUF_INIT;
    while (out->len && out->data[out->len - 1] == '\n')
        out->len--;
    buf_addf(&text, "{\"id\":%s,\"status\":%d,\"body\":", c->id, c->call.status);
    bool is_json = strstr(c->call.content_type, "json") != NULL;
    if (is_json && out->len)
        buf_add(&text, out->data, out->len);
    else
        json_quote(&text, (const char *)out->data, out->len);
    buf_addc(&text, '}');
    int rc = ws_send(c->session, (const char *)text.data, text.len);
    buf_deinit(&text);
    c->answered = true;
    return rc;
}

/* Writes one message of c. 1: written; 0: it has nothing; -1: the connection is broken. */
static int ws_write_call(struct ws_call *c)
{
    const char *line;
    size_t len;
    if (c->call.state != API_ANSWERED)
        return 0;
    if (!c->answered) {
        if (ws_send_answer(c) < 0)
            return -1;
        if (!c->call.stream)
            ws_call_free(c);
        return 1;
    }
    enum stream_status st = stream_next(c->call.stream, &line, &len);
    if (st == STREAM_DATA)
        return ws_send(c->session, line, len - 1) < 0 ? -1 : 1;
    if (st == STREAM_END)
        ws_call_free(c);
    return 0;
}

/* Every call gets its turn, one message at a time, while the client takes them. */
static int ws_writable(struct ws_session *s)
{
    int written = 0, round;
    do {
        struct ws_call *c, *next;
        round = 0;
        for (c = TAILQ_FIRST(&s->calls); c; c = next) {
            next = TAILQ_NEXT(c, link);
            if (lws_send_pipe_choked(s->wsi) || written >= WS_BURST) {
                lws_callback_on_writable(s->wsi);
                return 0;
            }
            int rc = ws_write_call(c);
            if (rc < 0)
                return -1;
            round += rc;
            written += rc;
        }
    } while (round);
    return 0;
}

/* --- sessions --- */

static void ws_session_init(struct ws_session *s, struct ws *w, struct lws *wsi)
{
    *s = (struct ws_session){.ws = w, .wsi = wsi, .peer = auth_peer_of(lws_get_socket_fd(wsi))};
    TAILQ_INIT(&s->calls);
    TAILQ_INSERT_TAIL(&w->sessions, s, link);
    w->sessions_len++;
}

static void ws_session_deinit(struct ws_session *s)
{
    if (!s->ws)
        return;
    struct ws_call *c;
    while ((c = TAILQ_FIRST(&s->calls)) != NULL)
        ws_call_free(c);
    buf_deinit(&s->rx);
    TAILQ_REMOVE(&s->ws->sessions, s, link);
    s->ws->sessions_len--;
    s->ws = NULL;
}

/* A part of a message. -1: close. */
static int ws_receive(struct ws_session *s, const char *data, size_t len)
{
    uint64_t limit = s->ws->api->config->body_limit;
    static const char big[] = "message longer than body_limit", binary[] = "text messages only";
    if (lws_frame_is_binary(s->wsi)) {
        lws_close_reason(s->wsi, LWS_CLOSE_STATUS_UNACCEPTABLE_OPCODE, (unsigned char *)binary,
                         sizeof(binary) - 1);
        return -1;
    }
    if (s->rx.len + len + lws_remaining_packet_payload(s->wsi) > limit) {
        lws_close_reason(s->wsi, LWS_CLOSE_STATUS_MESSAGE_TOO_LARGE, (unsigned char *)big,
                         sizeof(big) - 1);
        return -1;
    }
    buf_add(&s->rx, data, len);
    if (lws_remaining_packet_payload(s->wsi) || !lws_is_final_fragment(s->wsi))
        return 0;
    ws_message(s, (const char *)s->rx.data, s->rx.len);
    buf_reset(&s->rx);
    return 0;
}

/* --- refusing in plain HTTP --- */

/* The connection has not been upgraded, nothing was written yet, and it is closed after this. */
static void ws_refuse(struct ws *w, struct lws *wsi, const struct err *err)
{
    struct api_call call;
    struct buf text = BUF_INIT;
    api_call_init(&call, w->api, auth_peer_of(lws_get_socket_fd(wsi)));
    api_problem(&call, err, NULL);
    buf_addf(&text, "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n", call.status,
             api_reason(call.status), call.content_type, call.out.len);
    if (call.status == 426)
        buf_adds(&text, "Upgrade: websocket\r\n");
    if (call.status == 401)
        buf_adds(&text, "WWW-Authenticate: Bearer\r\n");
    buf_adds(&text, "Cache-Control: no-store\r\nConnection: close\r\n\r\n");
    buf_add(&text, call.out.data, call.out.len);
    if (send(lws_get_socket_fd(wsi), text.data, text.len, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
        log_debug("ws: cannot refuse: %s", strerror(errno));
    buf_deinit(&text);
    api_close(&call);
}

static char *ws_header(struct lws *wsi, enum lws_token_indexes token)
{
    int len = lws_hdr_total_length(wsi, token);
    if (len <= 0)
        return NULL;
    char *value = util_malloc((size_t)len + 1);
    if (lws_hdr_copy(wsi, value, len + 1, token) < 0)
        *value = '\0';
    return value;
}

/* May this upgrade request have its session? -1: refused. */
static int ws_admit(struct ws *w, struct lws *wsi)
{
    struct err err = ERR_INIT;
    struct auth_peer peer = auth_peer_of(lws_get_socket_fd(wsi));
    char *authorization = ws_header(wsi, WSI_TOKEN_HTTP_AUTHORIZATION);
    char *host = ws_header(wsi, WSI_TOKEN_HOST), *origin = ws_header(wsi, WSI_TOKEN_ORIGIN);
    struct auth_claims claims = {authorization, host, origin};
    int rc = auth_check(w->api->auth, &peer, &claims, false, &err);
    if (rc == 0 && w->sessions_len >= w->api->config->connection_limit)
        rc = err_set(&err, ERR_UNAVAILABLE, "%zu WebSocket connections are open already",
                     w->sessions_len);
    if (rc < 0)
        ws_refuse(w, wsi, &err);
    free(authorization);
    free(host);
    free(origin);
    return rc;
}

static int ws_plain_get(struct ws *w, struct lws *wsi)
{
    struct err err = ERR_INIT;
    err_set(&err, ERR_UPGRADE, "/v1/ws speaks WebSocket; this request does not ask for it");
    err_hint(&err, "send an upgrade request, as every WebSocket client does");
    ws_refuse(w, wsi, &err);
    return -1;
}

/* --- libwebsockets --- */

static int ws_callback(struct lws *wsi, enum lws_callback_reasons reason, void *user, void *in,
                       size_t len)
{
    struct ws_session *s = user;
    struct ws *w = wsi && lws_get_vhost(wsi) ? lws_vhost_user(lws_get_vhost(wsi)) : NULL;
    switch (reason) {
    case LWS_CALLBACK_HTTP:
        return ws_plain_get(w, wsi);
    case LWS_CALLBACK_FILTER_PROTOCOL_CONNECTION:
        return ws_admit(w, wsi);
    case LWS_CALLBACK_ESTABLISHED:
        ws_session_init(s, w, wsi);
        return 0;
    case LWS_CALLBACK_RECEIVE:
        return ws_receive(s, in, len);
    case LWS_CALLBACK_SERVER_WRITEABLE:
        return ws_writable(s);
    case LWS_CALLBACK_CLOSED:
        ws_session_deinit(s);
        return 0;
    default:
        return 0;
    }
}

static void ws_log(int level, const char *line)
{
    log_debug("ws: %s%.*s", level & LLL_ERR ? "error: " : "", (int)strcspn(line, "\n"), line);
}

struct ws *ws_new(uv_loop_t *loop, struct api *api, struct err *err)
{
    static const struct lws_protocols protocols[] = {
        {"ddip", ws_callback, sizeof(struct ws_session), WS_RX, 0, NULL, 0},
        {NULL, NULL, 0, 0, 0, NULL, 0},
    };
    struct ws *w = util_calloc(1, sizeof(*w));
    void *loops[1] = {loop};
    w->api = api;
    TAILQ_INIT(&w->sessions);
    lws_set_log_level(LLL_ERR | LLL_WARN, ws_log);
    struct lws_context_creation_info context = {
        .port = CONTEXT_PORT_NO_LISTEN_SERVER,
        .options = LWS_SERVER_OPTION_LIBUV | LWS_SERVER_OPTION_EXPLICIT_VHOSTS,
        .foreign_loops = loops,
        .timeout_secs = WS_HANDSHAKE_S,
        .ka_time = 60, /* TCP keep-alive finds dead peers; pings would cut clients that only send */
        .ka_probes = 5,
        .ka_interval = 10,
    };
    struct lws_context_creation_info vhost = context;
    vhost.protocols = protocols;
    vhost.vhost_name = "ddipd";
    vhost.user = w;
    w->context = lws_create_context(&context);
    w->vhost = w->context ? lws_create_vhost(w->context, &vhost) : NULL;
    if (w->vhost)
        return w;
    err_set(err, ERR_IO, "libwebsockets does not start on libuv");
    err_hint(err, "it needs its libuv plug-in, Debian's package libwebsockets-evlib-uv");
    if (w->context)
        lws_context_destroy(w->context);
    free(w);
    return NULL;
}

void ws_take(struct ws *w, int fd)
{
    lws_adopt_socket_vhost(w->vhost, fd); /* closes fd itself when it fails */
}

void ws_close(struct ws *w)
{
    if (w)
        lws_context_destroy(w->context);
}

void ws_free(struct ws *w)
{
    if (w)
        lws_context_destroy(w->context); /* the second call frees what the loop's turns let go */
    free(w);
}
