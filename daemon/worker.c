/* SPDX-License-Identifier: Apache-2.0 */
/*
 * worker.c - one process of a group (a rank, or its store): its start, its end, and who it is.
 *
 * A process of our own is a child (or becomes one when its middle parent exits) and waitpid tells
 * of its end. One that an earlier daemon started is not: a pidfd tells that it has ended, nobody
 * how.
 */
#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hub.h"
#include "kin.h"
#include "log.h"
#include "sweep.h"

#define WORKER_LAST_WORDS (8 * 1024) /* early output that is kept */

struct worker {
    struct channel channel; /* first: its callback gets back to us */
    struct hub *hub;
    char *label;
    char secret[33];
    pid_t pid;
    uint64_t started; /* with the pid: this process and no other; 0: it had ended */
    bool doom;        /* to be killed as soon as there is a process */
    bool reaped, exited, closing;
    int status;
    uv_poll_t early, exit; /* what it prints before HELLO; the process's end, if it is no child */
    int early_fd, exit_fd; /* -1: none */
    struct buf last_words;
    int handles; /* of these two, not closed yet */
};

static struct worker *worker_make(struct hub *hub, const char *label, const char *secret,
                                  const struct worker_events *events, void *ctx)
{
    struct worker *w = util_calloc(1, sizeof(*w));
    snprintf(w->secret, sizeof(w->secret), "%s", secret);
    w->hub = hub;
    w->label = util_strdup(label);
    w->early_fd = w->exit_fd = -1;
    channel_init(&w->channel, hub, w->label, events, ctx);
    hub_add(hub, w);
    return w;
}

struct worker *worker_new(struct hub *hub, const char *label, const struct worker_events *events,
                          void *ctx, struct err *err)
{
    char secret[33];
    if (util_random_hex(secret, 16, err) < 0)
        return NULL;
    return worker_make(hub, label, secret, events, ctx);
}

const char *worker_secret(const struct worker *w)
{
    return w->secret;
}

pid_t worker_pid(const struct worker *w)
{
    return w->pid;
}

uint64_t worker_started(const struct worker *w)
{
    return w->started;
}

bool worker_connected(const struct worker *w)
{
    return w->channel.connected;
}

/* --- handles --- */

static void worker_free_if_done(struct worker *w)
{
    if (!w->closing || w->handles || !channel_idle(&w->channel))
        return;
    buf_deinit(&w->last_words);
    free(w->label);
    free(w);
}

static void worker_channel_idle(struct channel *c)
{
    worker_free_if_done((struct worker *)c);
}

static void worker_fd_closed(uv_handle_t *handle)
{
    struct worker *w = handle->data;
    int *fd = handle == (uv_handle_t *)&w->early ? &w->early_fd : &w->exit_fd;
    close(*fd);
    *fd = -1;
    w->handles--;
    worker_free_if_done(w);
}

static void worker_stop_fd(uv_poll_t *poll, int fd)
{
    if (fd >= 0 && !uv_is_closing((uv_handle_t *)poll))
        uv_close((uv_handle_t *)poll, worker_fd_closed);
}

static void worker_stop_fds(struct worker *w)
{
    worker_stop_fd(&w->early, w->early_fd);
    worker_stop_fd(&w->exit, w->exit_fd);
}

static void worker_watch_fd(struct worker *w, uv_poll_t *poll, int fd, uv_poll_cb on_readable)
{
    poll->data = w;
    w->handles++;
    uv_poll_init(hub_loop(w->hub), poll, fd);
    uv_poll_start(poll, UV_READABLE, on_readable);
}

/* --- start --- */

static void worker_on_early(uv_poll_t *poll, int status, int events)
{
    struct worker *w = poll->data;
    (void)status;
    (void)events;
    ssize_t n = read(w->early_fd, buf_room(&w->last_words, WORKER_LAST_WORDS), WORKER_LAST_WORDS);
    if (n > 0)
        w->last_words.len += (size_t)n;
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        worker_stop_fd(&w->early, w->early_fd);
    if (w->last_words.len > WORKER_LAST_WORDS)
        buf_consume(&w->last_words, w->last_words.len - WORKER_LAST_WORDS);
}

int worker_early_output(struct worker *w, struct err *err)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) < 0)
        return err_errno(err, ERR_IO, errno, "pipe");
    fcntl(fds[0], F_SETFL, O_NONBLOCK);
    w->early_fd = fds[0];
    worker_watch_fd(w, &w->early, fds[0], worker_on_early);
    return fds[1];
}

void worker_set_pid(struct worker *w, pid_t pid)
{
    int status;
    w->pid = pid;
    log_info("%s: pid %d started", w->label, (int)pid);
    if (hub_was_reaped(w->hub, pid, &status)) {
        worker_reaped(w, status);
        return;
    }
    w->started = kin_start_time(pid);
    if (w->doom)
        worker_kill(w, "was to end before it had started");
    else if (w->channel.events && w->channel.events->on_pid)
        w->channel.events->on_pid(w->channel.ctx);
}

static void worker_on_exit(uv_poll_t *poll, int status, int events)
{
    struct worker *w = poll->data;
    (void)status;
    (void)events;
    uv_poll_stop(poll);
    worker_reaped(w, WORKER_STATUS_UNKNOWN);
}

struct worker *worker_adopt(struct hub *hub, const char *label, const struct worker_events *events,
                            void *ctx, const struct worker_past *past, struct err *err)
{
    struct kin_root root = {past->pid, past->started};
    int fd = past->pid > 1 ? kin_open(root) : -1;
    if (fd < 0) {
        sweep_add(hub_sweep(hub), root); /* what it left */
        err_set(err, ERR_GONE, "ended while no daemon was there");
        return NULL;
    }
    struct worker *w = worker_make(hub, label, past->secret, events, ctx);
    w->pid = past->pid;
    w->started = past->started;
    w->exit_fd = fd;
    channel_start_from(&w->channel, past->seen, past->pipe_end);
    worker_watch_fd(w, &w->exit, fd, worker_on_exit);
    return w;
}

void worker_attach(struct worker *w, struct wire *wire, const struct frame *hello,
                   int fds[FRAME_MAX_FDS])
{
    channel_attach(&w->channel, wire, hello, fds);
}

/* --- end --- */

/* The process is gone; once the journal has all it said, so are we. */
static void worker_end(struct worker *w)
{
    struct channel *c = &w->channel;
    int status = w->status;
    if (w->exited || !channel_enter(c))
        return;
    if (channel_finish(c)) {
        w->exited = true;
        worker_stop_fds(w);
        if (status == WORKER_STATUS_UNKNOWN)
            log_info("%s: pid %d ended", w->label, (int)w->pid);
        else
            log_info("%s: pid %d ended (%s %d)", w->label, (int)w->pid,
                     WIFSIGNALED(status) ? "signal" : "exit code",
                     WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        if (c->events)
            c->events->on_exit(c->ctx, status, buf_cstr(&w->last_words));
    }
    channel_leave(c);
}

void worker_reaped(struct worker *w, int status)
{
    if (w->reaped)
        return;
    w->reaped = true;
    w->status = status;
    if (w->started) /* what it started: DataLoader workers, subprocesses */
        sweep_add(hub_sweep(w->hub), (struct kin_root){w->pid, w->started});
    if (w->early_fd >= 0)
        worker_on_early(&w->early, 0, 0);
    worker_end(w);
}

void worker_never(struct worker *w, int code, const char *why)
{
    struct channel *c = &w->channel;
    if (w->exited || !channel_enter(c))
        return;
    w->exited = w->reaped = true;
    worker_stop_fds(w);
    log_info("%s: not started: %s", w->label, why);
    if (c->events)
        c->events->on_exit(c->ctx, code << 8, why);
    channel_leave(c);
}

void worker_resume(struct worker *w)
{
    if (!channel_enter(&w->channel))
        return;
    if (channel_resume(&w->channel) && w->reaped)
        worker_end(w);
    channel_leave(&w->channel);
}

void worker_skip(struct worker *w, const uint64_t until[2])
{
    channel_skip(&w->channel, until);
}

void worker_send(struct worker *w, enum frame_type type, uint32_t cell, uint32_t arg,
                 const void *payload, size_t len, int fd)
{
    channel_send(&w->channel, type, cell, arg, payload, len, fd);
}

void worker_kill(struct worker *w, const char *reason)
{
    if (!w->pid)
        w->doom = true;
    if (!w->started || w->reaped)
        return;
    log_info("%s: pid %d is killed: %s", w->label, (int)w->pid, reason);
    sweep_add(hub_sweep(w->hub), (struct kin_root){w->pid, w->started});
}

void worker_close(struct worker *w)
{
    if (!w || w->closing)
        return;
    worker_kill(w, "closed");
    hub_remove(w->hub, w);
    w->closing = true;
    worker_stop_fds(w);
    channel_close(&w->channel, worker_channel_idle);
    worker_free_if_done(w);
}
