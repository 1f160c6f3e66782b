/* SPDX-License-Identifier: Apache-2.0 */
/*
 * worker.c - one process of a group (a rank, or its store): frames, output pipes, exit.
 *
 * Order is the trap here. Text a rank prints from Python comes as STREAM frames; text written to
 * its fd 1 and 2 by anything else comes through the pipes. Both keep their order among each other
 * thus: before pipes are read, the socket is; and a frame that was made while the pipes held bytes
 * carries FRAME_FLAG_DRAIN, so those bytes are read first.
 */
#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hub.h"
#include "log.h"

#define WORKER_FILL (64 * 1024)      /* bytes read from the socket at a time */
#define WORKER_TURN 4                /* reads of one source per loop turn, so that all get theirs */
#define WORKER_LAST_WORDS (8 * 1024) /* early output that is kept */
#define WORKER_OUT_MAX (256u * 1024 * 1024)

struct worker_pipe {
    struct worker *w;
    uv_poll_t poll;
    int fd;      /* -1: none */
    int num;     /* 1 stdout, 2 stderr, 0 early output */
    char cut[4]; /* start of a UTF-8 character that is not complete yet */
    size_t cut_len;
};

enum { WORKER_EARLY, WORKER_STDOUT, WORKER_STDERR, WORKER_PIPES };

struct worker {
    struct hub *hub;
    char *label;
    char secret[33];
    const struct worker_events *events; /* NULL after worker_close */
    void *ctx;
    pid_t pid;
    bool reaped, exited;
    int status;
    struct wire wire;
    uv_poll_t poll;
    bool polling;
    struct worker_pipe pipes[WORKER_PIPES];
    struct buf last_words;
    uint64_t seen, acked; /* the process's own frame numbers */
    bool closing;         /* the struct is going away */
    bool batch;           /* delivered, on_batch not called yet */
    int depth;            /* callbacks under way */
    int handles;          /* uv handles not closed yet */
};

static void worker_on_wire(uv_poll_t *poll, int status, int events);
static void worker_on_pipe(uv_poll_t *poll, int status, int events);

struct worker *worker_new(struct hub *hub, const char *label, const struct worker_events *events,
                          void *ctx, struct err *err)
{
    struct worker *w = util_calloc(1, sizeof(*w));
    if (util_random_hex(w->secret, 16, err) < 0) {
        free(w);
        return NULL;
    }
    w->hub = hub;
    w->label = util_strdup(label);
    w->events = events;
    w->ctx = ctx;
    wire_init(&w->wire, -1);
    for (int i = 0; i < WORKER_PIPES; i++)
        w->pipes[i] = (struct worker_pipe){.w = w, .fd = -1, .num = i};
    hub_add(hub, w);
    return w;
}

const char *worker_secret(const struct worker *w)
{
    return w->secret;
}

pid_t worker_pid(const struct worker *w)
{
    return w->pid;
}

bool worker_connected(const struct worker *w)
{
    return w->wire.fd >= 0;
}

static void worker_free_if_done(struct worker *w)
{
    if (!w->closing || w->handles || w->depth)
        return;
    wire_deinit(&w->wire);
    buf_deinit(&w->last_words);
    free(w->label);
    free(w);
}

/* --- handles
 * -------------------------------------------------------------------------------------*/

static void worker_wire_closed(uv_handle_t *handle)
{
    struct worker *w = handle->data;
    wire_deinit(&w->wire);
    w->handles--;
    worker_free_if_done(w);
}

static void worker_stop_wire(struct worker *w)
{
    if (!w->polling)
        return;
    w->polling = false;
    uv_close((uv_handle_t *)&w->poll, worker_wire_closed);
}

static void worker_pipe_closed(uv_handle_t *handle)
{
    struct worker_pipe *p = handle->data;
    struct worker *w = p->w;
    close(p->fd);
    p->fd = -1;
    w->handles--;
    worker_free_if_done(w);
}

static void worker_stop_pipe(struct worker_pipe *p)
{
    if (p->fd >= 0 && !uv_is_closing((uv_handle_t *)&p->poll))
        uv_close((uv_handle_t *)&p->poll, worker_pipe_closed);
}

static void worker_start_pipe(struct worker *w, int which, int fd)
{
    struct worker_pipe *p = &w->pipes[which];
    if (p->fd >= 0) { /* a reconnected rank sends the pipes we have */
        close(fd);
        return;
    }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    p->fd = fd;
    p->poll.data = p;
    w->handles++;
    uv_poll_init(hub_loop(w->hub), &p->poll, fd);
    uv_poll_start(&p->poll, UV_READABLE, worker_on_pipe);
}

static void worker_watch(struct worker *w)
{
    int events = UV_READABLE | (TAILQ_EMPTY(&w->wire.out) ? 0 : UV_WRITABLE);
    uv_poll_start(&w->poll, events, worker_on_wire);
}

int worker_early_output(struct worker *w, struct err *err)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) < 0)
        return err_errno(err, ERR_IO, errno, "pipe");
    worker_start_pipe(w, WORKER_EARLY, fds[0]);
    return fds[1];
}

/* --- what comes from the process
 * -----------------------------------------------------------------*/

/* Callbacks run between these two, so that worker_close inside one does not free under our feet. */
static bool worker_enter(struct worker *w)
{
    if (w->closing)
        return false;
    w->depth++;
    return true;
}

static void worker_leave(struct worker *w)
{
    w->depth--;
    worker_free_if_done(w);
}

static void worker_end_batch(struct worker *w)
{
    if (w->batch && w->events) {
        w->batch = false;
        w->events->on_batch(w->ctx);
    }
}

static void worker_text(struct worker *w, struct worker_pipe *p, const char *text, size_t len)
{
    if (p->num == WORKER_EARLY) {
        buf_add(&w->last_words, text, len);
        if (w->last_words.len > WORKER_LAST_WORDS)
            buf_consume(&w->last_words, w->last_words.len - WORKER_LAST_WORDS);
    } else if (w->events && len) {
        w->batch = true;
        w->events->on_output(w->ctx, p->num, text, len);
    }
}

/* Reads a pipe once. False: empty, or at its end (then it is stopped). */
static bool worker_read_pipe(struct worker *w, struct worker_pipe *p)
{
    static char bytes[sizeof(p->cut) + WORKER_FILL];
    if (p->fd < 0 || uv_is_closing((uv_handle_t *)&p->poll))
        return false;
    memcpy(bytes, p->cut, p->cut_len);
    ssize_t n = read(p->fd, bytes + p->cut_len, WORKER_FILL);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    size_t len = p->cut_len + (n > 0 ? (size_t)n : 0);
    p->cut_len = n > 0 ? util_utf8_partial(bytes, len) : 0;
    len -= p->cut_len;
    memcpy(p->cut, bytes + len, p->cut_len);
    worker_text(w, p, bytes, len);
    if (n <= 0)
        worker_stop_pipe(p);
    return n > 0;
}

/* Reads what a pipe holds now, and no more than that: somebody may be writing all the time. */
static void worker_drain_pipe(struct worker *w, struct worker_pipe *p)
{
    int held = 0;
    if (p->fd < 0 || ioctl(p->fd, FIONREAD, &held) < 0)
        return;
    for (int got = 0; got < held && worker_read_pipe(w, p);)
        got += WORKER_FILL;
}

static void worker_frame(struct worker *w, const struct frame *f, int fds[FRAME_MAX_FDS])
{
    if (f->flags & FRAME_FLAG_DRAIN) {
        worker_drain_pipe(w, &w->pipes[WORKER_STDOUT]);
        worker_drain_pipe(w, &w->pipes[WORKER_STDERR]);
    }
    if (f->type != FRAME_HELLO && f->number <= w->seen)
        return; /* sent again after a reconnection, and known */
    if (f->type != FRAME_HELLO)
        w->seen = f->number;
    w->batch = true;
    if (w->events)
        w->events->on_frame(w->ctx, f, fds);
}

static void worker_lost_wire(struct worker *w, const char *why)
{
    if (why && !w->closing)
        log_warn("%s: connection dropped: %s", w->label, why);
    worker_stop_wire(w);
}

/* Handles every whole frame that has been read. False: the connection is of no use any more. */
static bool worker_parse(struct worker *w)
{
    for (;;) {
        struct frame f;
        int fds[FRAME_MAX_FDS] = {-1, -1};
        const char *why;
        enum wire_status st = wire_next(&w->wire, FRAME_MAX, &f, fds, &why);
        if (st == WIRE_BAD) {
            worker_lost_wire(w, why);
            return false;
        }
        if (st != WIRE_FRAME)
            return true;
        worker_frame(w, &f, fds);
        for (size_t i = 0; i < FRAME_MAX_FDS; i++) {
            if (fds[i] >= 0)
                close(fds[i]);
        }
    }
}

/* Reads once and handles what came. False: nothing more to read now. */
static bool worker_read_wire(struct worker *w)
{
    enum wire_status st = wire_fill(&w->wire, WORKER_FILL);
    if (st == WIRE_CLOSED)
        worker_lost_wire(w, NULL);
    return st == WIRE_FRAME && worker_parse(w);
}

static void worker_on_wire(uv_poll_t *poll, int status, int events)
{
    struct worker *w = poll->data;
    bool pending;
    if (!worker_enter(w))
        return;
    if (status < 0 || ((events & UV_WRITABLE) && wire_flush(&w->wire, &pending) < 0)) {
        worker_lost_wire(w, NULL);
    } else if (events & UV_READABLE) {
        for (int i = 0; i < WORKER_TURN && w->polling && worker_read_wire(w); i++)
            ;
        worker_end_batch(w);
    }
    if (w->polling)
        worker_watch(w);
    worker_leave(w);
}

static void worker_on_pipe(uv_poll_t *poll, int status, int events)
{
    struct worker_pipe *p = poll->data;
    struct worker *w = p->w;
    (void)status;
    (void)events;
    if (!worker_enter(w))
        return;
    for (int i = 0; i < WORKER_TURN && w->polling && worker_read_wire(w); i++)
        ; /* frames first: what they tell is older than what is in the pipe now */
    for (int i = 0; i < WORKER_TURN && worker_read_pipe(w, p); i++)
        ;
    worker_end_batch(w);
    worker_leave(w);
}

void worker_attach(struct worker *w, struct wire *wire, const struct frame *hello,
                   int fds[FRAME_MAX_FDS])
{
    w->wire = *wire;
    TAILQ_INIT(&w->wire.out);
    w->polling = true;
    w->poll.data = w;
    w->handles++;
    uv_poll_init(hub_loop(w->hub), &w->poll, w->wire.fd);
    worker_watch(w);
    for (int i = 0; i < 2; i++) {
        worker_start_pipe(w, WORKER_STDOUT + i, fds[i]);
        fds[i] = -1;
    }
    worker_send(w, FRAME_WELCOME, 0, 0, NULL, 0, -1);
    if (!worker_enter(w))
        return;
    int none[FRAME_MAX_FDS] = {-1, -1};
    worker_frame(w, hello, none);
    worker_parse(w);
    worker_end_batch(w);
    worker_leave(w);
}

/* --- exit
 * ----------------------------------------------------------------------------------------*/

/* Everything the process sent is in the socket and the pipes; other holders of them do not count.
 */
static void worker_last_reads(struct worker *w)
{
    while (w->polling && worker_read_wire(w))
        ;
    for (int i = 0; i < WORKER_PIPES; i++)
        worker_drain_pipe(w, &w->pipes[i]);
    worker_end_batch(w);
    worker_stop_wire(w);
    for (int i = 0; i < WORKER_PIPES; i++)
        worker_stop_pipe(&w->pipes[i]);
}

void worker_reaped(struct worker *w, int status)
{
    w->reaped = true;
    w->status = status;
    if (w->exited || !worker_enter(w))
        return;
    w->exited = true;
    kill(-w->pid, SIGKILL); /* its children: DataLoader workers, subprocesses */
    worker_last_reads(w);
    log_info("%s: pid %d ended (%s %d)", w->label, (int)w->pid,
             WIFSIGNALED(status) ? "signal" : "exit code",
             WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    if (w->events)
        w->events->on_exit(w->ctx, status, buf_cstr(&w->last_words));
    worker_leave(w);
}

void worker_set_pid(struct worker *w, pid_t pid)
{
    int status;
    w->pid = pid;
    log_info("%s: pid %d started", w->label, (int)pid);
    if (hub_was_reaped(w->hub, pid, &status))
        worker_reaped(w, status);
}

/* --- what goes to the process
 * --------------------------------------------------------------------*/

void worker_send(struct worker *w, enum frame_type type, uint32_t cell, uint32_t arg,
                 const void *payload, size_t len, int fd)
{
    struct frame f = {.type = (uint8_t)type,
                      .nfds = fd >= 0,
                      .length = (uint32_t)len,
                      .number = w->seen,
                      .cell = cell,
                      .arg = arg,
                      .payload = payload};
    if (!w->polling)
        return;
    if (w->wire.out_bytes + len > WORKER_OUT_MAX || wire_send(&w->wire, &f, &fd) < 0)
        worker_lost_wire(w, "cannot send");
    else if (!TAILQ_EMPTY(&w->wire.out))
        worker_watch(w);
}

void worker_ack(struct worker *w)
{
    if (w->seen == w->acked)
        return;
    w->acked = w->seen;
    worker_send(w, FRAME_ACK, 0, 0, NULL, 0, -1);
}

void worker_kill(struct worker *w, int signal, const char *reason)
{
    if (!w->pid || w->reaped)
        return;
    log_info("%s: signal %d to pid %d: %s", w->label, signal, (int)w->pid, reason);
    kill(-w->pid, signal);
    kill(w->pid, signal); /* it may not have made its own process group yet */
}

void worker_close(struct worker *w)
{
    if (!w || w->closing)
        return;
    worker_kill(w, SIGKILL, "closed");
    hub_remove(w->hub, w);
    w->events = NULL;
    w->closing = true;
    worker_stop_wire(w);
    for (int i = 0; i < WORKER_PIPES; i++)
        worker_stop_pipe(&w->pipes[i]);
    worker_free_if_done(w);
}
