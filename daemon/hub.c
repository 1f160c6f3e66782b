/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hub.c - where worker processes report: their Unix socket, and SIGCHLD.
 *
 * A connection says HELLO with the secret it was given at its start, within a deadline and within a
 * small bound; only then does it become some worker's. Ranks forked by a template are nobody's
 * children here until their middle parent exits: PR_SET_CHILD_SUBREAPER makes them ours, and also
 * lets us collect what a dead rank leaves behind.
 */
#include "hub.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "json.h"
#include "log.h"
#include "pipe.h"
#include "sweep.h"
#include "wire.h"
#include "worker.h"

#define HUB_HELLO_MAX (64 * 1024)
#define HUB_HELLO_MS 10000
#define HUB_GUESTS 64  /* connections that have not said HELLO yet */
#define HUB_STRAYS 256 /* ended processes whose pid nobody has claimed yet */

/* A connection before HELLO. */
struct hub_guest {
    TAILQ_ENTRY(hub_guest) link;
    struct hub *hub;
    struct wire wire;
    uv_poll_t poll;
    uv_timer_t deadline;
    int handles;
};

struct hub_member {
    TAILQ_ENTRY(hub_member) link;
    struct worker *worker;
};

struct hub {
    uv_loop_t *loop;
    char *path;
    int fd;
    uv_poll_t listener;
    uv_signal_t child;
    struct sweep *sweep;
    TAILQ_HEAD(, hub_guest) guests;
    size_t guests_len;
    TAILQ_HEAD(, hub_member) members;
    struct {
        pid_t pid;
        int status;
    } strays[HUB_STRAYS];
    size_t strays_next;
    int handles;
    struct pipe_tools tools;
};

static int hub_listen(const char *path, struct err *err)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof(addr.sun_path))
        return err_set(err, ERR_INVALID, "the path %s is too long for a Unix socket", path);
    strcpy(addr.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    unlink(path);
    mode_t old = umask(0177);
    int rc = fd < 0 ? -1 : bind(fd, (struct sockaddr *)&addr, sizeof(addr));
    umask(old);
    if (rc < 0 || listen(fd, 128) < 0) {
        err_errno(err, ERR_IO, errno, "cannot listen on %s", path);
        if (fd >= 0)
            close(fd);
        return -1;
    }
    return fd;
}

/* --- guests --- */

static void hub_guest_closed(uv_handle_t *handle)
{
    struct hub_guest *g = handle->data;
    if (--g->handles)
        return;
    wire_deinit(&g->wire);
    free(g);
}

static void hub_guest_drop(struct hub_guest *g, const char *why)
{
    if (why)
        log_warn("worker connection refused: %s", why);
    TAILQ_REMOVE(&g->hub->guests, g, link);
    g->hub->guests_len--;
    uv_close((uv_handle_t *)&g->poll, hub_guest_closed);
    uv_close((uv_handle_t *)&g->deadline, hub_guest_closed);
}

static struct worker *hub_find(struct hub *hub, const struct frame *hello)
{
    struct err err = ERR_INIT;
    json *j = json_parse((const char *)hello->payload, hello->length, &err);
    const char *secret = json_string(j ? json_get(j, "secret") : NULL);
    struct worker *found = NULL;
    struct hub_member *m;
    TAILQ_FOREACH(m, &hub->members, link)
    {
        if (secret && util_equal_secret(secret, worker_secret(m->worker)))
            found = m->worker;
    }
    json_free(j);
    return found;
}

/* A process of a group that is no more: its daemon died before it could tell. */
static void hub_send_away(struct hub_guest *g)
{
    struct frame f = {.type = FRAME_EXIT};
    (void)wire_send(&g->wire, &f, NULL);
}

/*
 * Two handles of the loop must not watch one descriptor, and the guest's is closed only in a later
 * loop turn: the worker gets a copy.
 */
static void hub_guest_join(struct hub_guest *g, const struct frame *hello, int fds[FRAME_MAX_FDS])
{
    struct worker *w = hub_find(g->hub, hello);
    if (!w)
        hub_send_away(g);
    if (!w || worker_connected(w) || hello->nfds != 3) {
        for (size_t i = 0; i < hello->nfds; i++)
            close(fds[i]);
        hub_guest_drop(g,
                       !w ? "unknown secret" : "a second connection, or not its three descriptors");
        return;
    }
    struct wire wire = g->wire;
    wire.fd = dup(g->wire.fd);
    g->wire.in = (struct buf)BUF_INIT;
    g->wire.fds_len = 0;
    struct buf frame = BUF_INIT;
    buf_add(&frame, hello->payload, hello->length);
    struct frame copy = *hello;
    copy.payload = frame.data;
    hub_guest_drop(g, NULL);
    worker_attach(w, &wire, &copy, fds);
    buf_deinit(&frame);
}

static void hub_on_guest(uv_poll_t *poll, int status, int events)
{
    struct hub_guest *g = poll->data;
    (void)events;
    enum wire_status st = status < 0 ? WIRE_CLOSED : wire_fill(&g->wire, 4096);
    struct frame f;
    int fds[FRAME_MAX_FDS] = {-1, -1, -1};
    const char *why = NULL;
    if (st == WIRE_FRAME)
        st = wire_next(&g->wire, HUB_HELLO_MAX, &f, fds, &why);
    if (st == WIRE_FRAME && f.type == FRAME_HELLO) {
        hub_guest_join(g, &f, fds);
    } else if (st != WIRE_EMPTY) {
        for (size_t i = 0; st == WIRE_FRAME && i < f.nfds; i++)
            close(fds[i]);
        hub_guest_drop(g, why ? why : st == WIRE_CLOSED ? "closed" : "the first frame is no HELLO");
    }
}

static void hub_guest_late(uv_timer_t *timer)
{
    hub_guest_drop(timer->data, "no HELLO in time");
}

static void hub_accept(struct hub *hub, int fd)
{
    struct hub_guest *g = util_calloc(1, sizeof(*g));
    g->hub = hub;
    wire_init(&g->wire, fd);
    g->poll.data = g->deadline.data = g;
    g->handles = 2;
    uv_poll_init(hub->loop, &g->poll, fd);
    uv_poll_start(&g->poll, UV_READABLE, hub_on_guest);
    uv_timer_init(hub->loop, &g->deadline);
    uv_timer_start(&g->deadline, hub_guest_late, HUB_HELLO_MS, 0);
    TAILQ_INSERT_TAIL(&hub->guests, g, link);
    hub->guests_len++;
}

static void hub_on_listener(uv_poll_t *poll, int status, int events)
{
    struct hub *hub = poll->data;
    (void)events;
    if (status < 0)
        return;
    int fd;
    while ((fd = accept4(hub->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        if (hub->guests_len < HUB_GUESTS)
            hub_accept(hub, fd);
        else
            close(fd);
    }
}

/* --- children --- */

void hub_reap(struct hub *hub)
{
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        struct hub_member *m, *found = NULL;
        TAILQ_FOREACH(m, &hub->members, link)
        {
            if (worker_pid(m->worker) == pid)
                found = m;
        }
        if (found) {
            worker_reaped(found->worker, status);
        } else if (!sweep_reaped(hub->sweep, pid, status)) {
            hub->strays[hub->strays_next].pid = pid;
            hub->strays[hub->strays_next].status = status;
            hub->strays_next = (hub->strays_next + 1) % HUB_STRAYS;
        }
    }
}

static void hub_on_child(uv_signal_t *handle, int signum)
{
    (void)signum;
    hub_reap(handle->data);
}

bool hub_was_reaped(struct hub *hub, pid_t pid, int *status)
{
    for (size_t i = 0; i < HUB_STRAYS; i++) {
        if (hub->strays[i].pid == pid) {
            hub->strays[i].pid = 0;
            *status = hub->strays[i].status;
            return true;
        }
    }
    return false;
}

/* --- life --- */

struct hub *hub_new(uv_loop_t *loop, const char *runtime_dir, struct err *err)
{
    char *path = util_printf("%s/workers.sock", runtime_dir);
    int fd = hub_listen(path, err);
    if (fd < 0) {
        free(path);
        return NULL;
    }
    struct hub *hub = util_calloc(1, sizeof(*hub));
    if (pipe_tools_open(&hub->tools, err) < 0) {
        close(fd);
        free(path);
        free(hub);
        return NULL;
    }
    hub->loop = loop;
    hub->path = path;
    hub->fd = fd;
    hub->handles = 2;
    hub->listener.data = hub->child.data = hub;
    TAILQ_INIT(&hub->guests);
    TAILQ_INIT(&hub->members);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    hub->sweep = sweep_new(loop);
    uv_poll_init(loop, &hub->listener, fd);
    uv_poll_start(&hub->listener, UV_READABLE, hub_on_listener);
    uv_signal_init(loop, &hub->child);
    uv_signal_start(&hub->child, hub_on_child, SIGCHLD);
    return hub;
}

static void hub_closed(uv_handle_t *handle)
{
    struct hub *hub = handle->data;
    if (--hub->handles)
        return;
    close(hub->fd);
    pipe_tools_close(&hub->tools);
    unlink(hub->path);
    free(hub->path);
    free(hub);
}

void hub_close(struct hub *hub)
{
    if (!hub)
        return;
    struct hub_guest *g;
    while ((g = TAILQ_FIRST(&hub->guests)) != NULL)
        hub_guest_drop(g, NULL);
    sweep_close(hub->sweep);
    uv_close((uv_handle_t *)&hub->listener, hub_closed);
    uv_close((uv_handle_t *)&hub->child, hub_closed);
}

uv_loop_t *hub_loop(const struct hub *hub)
{
    return hub->loop;
}

struct sweep *hub_sweep(const struct hub *hub)
{
    return hub->sweep;
}

const struct pipe_tools *hub_pipe_tools(const struct hub *hub)
{
    return &hub->tools;
}

const char *hub_socket_path(const struct hub *hub)
{
    return hub->path;
}

void hub_add(struct hub *hub, struct worker *w)
{
    struct hub_member *m = util_calloc(1, sizeof(*m));
    m->worker = w;
    TAILQ_INSERT_TAIL(&hub->members, m, link);
}

void hub_remove(struct hub *hub, struct worker *w)
{
    struct hub_member *m;
    TAILQ_FOREACH(m, &hub->members, link)
    {
        if (m->worker == w) {
            TAILQ_REMOVE(&hub->members, m, link);
            free(m);
            return;
        }
    }
}
