/* SPDX-License-Identifier: Apache-2.0 */
/*
 * listener.c - one TCP port and one Unix socket, each for HTTP and WebSocket.
 *
 * The bytes that decide stay in the socket (MSG_PEEK), because neither library takes bytes that
 * were read already. They also keep the descriptor readable, so a connection that has sent only the
 * start of the deciding bytes is looked at by a timer instead of the loop.
 */
#include "listener.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "log.h"
#include "systemd.h"

#define LISTENER_SOCKETS 8
#define LISTENER_FIRST_MS 5000 /* a connection must have said what it is by then */
#define LISTENER_LOOK_MS 25
static const char listener_ws_start[] = "GET /v1/ws";

struct listener_socket {
    struct listener *l;
    uv_poll_t poll;
    int fd;
    char *path; /* a Unix socket we made ourselves, to be removed */
};

/* A connection that has not said what it is. */
struct listener_conn {
    TAILQ_ENTRY(listener_conn) link;
    struct listener *l;
    int fd;
    uv_poll_t poll;
    uv_timer_t timer;
    uint64_t since_ms;
    int handles;
    enum { LISTENER_UNDECIDED, LISTENER_HTTP, LISTENER_WS, LISTENER_DROP } kind;
};

struct listener {
    uv_loop_t *loop;
    const struct config *config;
    struct http *http;
    struct ws *ws;
    struct listener_socket sockets[LISTENER_SOCKETS];
    size_t sockets_len;
    char *url;
    TAILQ_HEAD(, listener_conn) conns;
    size_t conns_len;
    int handles;
    bool closing;
};

/* --- connections --- */

static void listener_hand_over(struct listener_conn *c)
{
    struct sockaddr_storage addr;
    socklen_t len = sizeof(addr);
    if (c->l->closing || c->kind == LISTENER_DROP) {
        close(c->fd);
    } else if (c->kind == LISTENER_WS) {
        ws_take(c->l->ws, c->fd);
    } else {
        memset(&addr, 0, sizeof(addr));
        if (getpeername(c->fd, (struct sockaddr *)&addr, &len) < 0)
            close(c->fd);
        else
            http_take(c->l->http, c->fd, (struct sockaddr *)&addr, len);
    }
}

static void listener_free_if_done(struct listener *l)
{
    if (!l->closing || l->handles || l->conns_len)
        return;
    free(l->url);
    free(l);
}

static void listener_conn_closed(uv_handle_t *handle)
{
    struct listener_conn *c = handle->data;
    if (--c->handles)
        return;
    struct listener *l = c->l;
    TAILQ_REMOVE(&l->conns, c, link);
    l->conns_len--;
    listener_hand_over(c);
    free(c);
    listener_free_if_done(l);
}

static void listener_decide(struct listener_conn *c, int kind)
{
    if (c->kind != LISTENER_UNDECIDED)
        return;
    c->kind = kind;
    uv_close((uv_handle_t *)&c->poll, listener_conn_closed);
    uv_close((uv_handle_t *)&c->timer, listener_conn_closed);
}

/* The byte after the path tells "/v1/ws" from "/v1/wsomething". */
static int listener_kind(const char *text, size_t len)
{
    const size_t want = sizeof(listener_ws_start) - 1;
    size_t n = len < want ? len : want;
    if (memcmp(text, listener_ws_start, n) != 0)
        return LISTENER_HTTP;
    if (len <= want)
        return LISTENER_UNDECIDED;
    return strchr(" ?/", text[want]) ? LISTENER_WS : LISTENER_HTTP;
}

static void listener_on_readable(uv_poll_t *poll, int status, int events);

static void listener_look(struct listener_conn *c)
{
    char text[sizeof(listener_ws_start)];
    ssize_t n = recv(c->fd, text, sizeof(text), MSG_PEEK | MSG_DONTWAIT);
    bool late = uv_now(c->l->loop) - c->since_ms > LISTENER_FIRST_MS;
    int kind = n > 0 ? listener_kind(text, (size_t)n) : LISTENER_UNDECIDED;
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
        kind = LISTENER_DROP;
    if (kind == LISTENER_UNDECIDED && late)
        kind = LISTENER_DROP;
    if (kind != LISTENER_UNDECIDED)
        listener_decide(c, kind);
}

static void listener_on_look(uv_timer_t *timer)
{
    listener_look(timer->data);
}

static void listener_on_readable(uv_poll_t *poll, int status, int events)
{
    struct listener_conn *c = poll->data;
    (void)status;
    (void)events;
    listener_look(c);
    if (c->kind == LISTENER_UNDECIDED) {
        uv_poll_stop(&c->poll);
        uv_timer_start(&c->timer, listener_on_look, LISTENER_LOOK_MS, LISTENER_LOOK_MS);
    }
}

static void listener_accept(struct listener *l, int fd)
{
    struct listener_conn *c = util_calloc(1, sizeof(*c));
    int one = 1;
    c->l = l;
    c->fd = fd;
    c->since_ms = uv_now(l->loop);
    c->handles = 2;
    c->poll.data = c->timer.data = c;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)); /* no TCP: no harm */
    uv_poll_init(l->loop, &c->poll, fd);
    uv_poll_start(&c->poll, UV_READABLE, listener_on_readable);
    uv_timer_init(l->loop, &c->timer);
    uv_timer_start(&c->timer, listener_on_look, LISTENER_FIRST_MS + 1, 0);
    TAILQ_INSERT_TAIL(&l->conns, c, link);
    l->conns_len++;
}

static void listener_on_connection(uv_poll_t *poll, int status, int events)
{
    struct listener_socket *s = poll->data;
    struct listener *l = s->l;
    (void)events;
    if (status < 0)
        return;
    for (int i = 0; i < 64; i++) {
        int fd = accept4(s->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0)
            return;
        if (l->conns_len < l->config->connection_limit)
            listener_accept(l, fd);
        else
            close(fd);
    }
}

/* --- sockets --- */

static void listener_add(struct listener *l, int fd, char *path)
{
    struct listener_socket *s = &l->sockets[l->sockets_len++];
    *s = (struct listener_socket){.l = l, .fd = fd, .path = path};
    s->poll.data = s;
    l->handles++;
    uv_poll_init(l->loop, &s->poll, fd);
    uv_poll_start(&s->poll, UV_READABLE, listener_on_connection);
}

/* What a TCP socket is bound to, as a URL; with port 0 the kernel has chosen the port. */
static void listener_set_url(struct listener *l, int fd)
{
    struct sockaddr_storage addr;
    socklen_t len = sizeof(addr);
    char host[NI_MAXHOST], port[NI_MAXSERV];
    if (getsockname(fd, (struct sockaddr *)&addr, &len) < 0 ||
        (addr.ss_family != AF_INET && addr.ss_family != AF_INET6) ||
        getnameinfo((struct sockaddr *)&addr, len, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        return;
    free(l->url);
    bool six = strchr(host, ':') != NULL;
    l->url = util_printf("http://%s%s%s:%s", six ? "[" : "", host, six ? "]" : "", port);
}

static int listener_bind_tcp(struct listener *l, struct err *err)
{
    const char *colon = strrchr(l->config->listen, ':');
    char host[256];
    snprintf(host, sizeof(host), "%.*s", (int)(colon - l->config->listen), l->config->listen);
    size_t n = strlen(host);
    if (*host == '[' && host[n - 1] == ']') {
        host[n - 1] = '\0';
        memmove(host, host + 1, n - 1);
    }
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV},
                    *found = NULL;
    int rc = getaddrinfo(host, colon + 1, &hints, &found);
    if (rc != 0)
        return err_set(err, ERR_INVALID, "listen: %s: %s", host, gai_strerror(rc));
    int fd = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    bool bound =
        fd >= 0 && bind(fd, found->ai_addr, found->ai_addrlen) == 0 && listen(fd, 512) == 0;
    freeaddrinfo(found);
    if (!bound) {
        err_errno(err, ERR_IO, errno, "cannot listen on %s", l->config->listen);
        err_hint(err, "another daemon may have the port; --listen HOST:0 takes any free one, "
                      "--listen none does without TCP");
        if (fd >= 0)
            close(fd);
        return -1;
    }
    listener_set_url(l, fd);
    listener_add(l, fd, NULL);
    return 0;
}

static int listener_bind_unix(struct listener *l, struct err *err)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    strcpy(addr.sun_path, l->config->socket); /* config.c has checked its length */
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    unlink(addr.sun_path); /* a dead daemon's: server.c holds the lock of the runtime folder */
    mode_t old = umask(0177);
    bool bound = fd >= 0 && bind(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0;
    umask(old);
    if (!bound || listen(fd, 512) < 0) {
        err_errno(err, ERR_IO, errno, "cannot listen on %s", addr.sun_path);
        if (fd >= 0)
            close(fd);
        return -1;
    }
    listener_add(l, fd, util_strdup(addr.sun_path));
    return 0;
}

struct listener *listener_new(uv_loop_t *loop, const struct config *config, struct http *http,
                              struct ws *ws, struct err *err)
{
    struct listener *l = util_calloc(1, sizeof(*l));
    *l = (struct listener){.loop = loop, .config = config, .http = http, .ws = ws};
    TAILQ_INIT(&l->conns);
    int passed[LISTENER_SOCKETS];
    size_t n = systemd_sockets(passed, LISTENER_SOCKETS);
    for (size_t i = 0; i < n; i++) {
        listener_set_url(l, passed[i]);
        listener_add(l, passed[i], NULL);
    }
    if (n)
        return l;
    if (listener_bind_unix(l, err) == 0 &&
        (strcmp(config->listen, "none") == 0 || listener_bind_tcp(l, err) == 0))
        return l;
    listener_close(l);
    return NULL;
}

const char *listener_url(const struct listener *l)
{
    return l->url;
}

static void listener_socket_closed(uv_handle_t *handle)
{
    struct listener_socket *s = handle->data;
    close(s->fd);
    if (s->path)
        unlink(s->path);
    free(s->path);
    s->l->handles--;
    listener_free_if_done(s->l);
}

void listener_close(struct listener *l)
{
    if (!l)
        return;
    l->closing = true;
    struct listener_conn *c;
    TAILQ_FOREACH(c, &l->conns, link)
    {
        listener_decide(c, LISTENER_DROP);
    }
    for (size_t i = 0; i < l->sockets_len; i++)
        uv_close((uv_handle_t *)&l->sockets[i].poll, listener_socket_closed);
    listener_free_if_done(l);
}
