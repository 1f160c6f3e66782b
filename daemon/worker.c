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
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hub.h"
#include "log.h"

#define WORKER_FILL (64 * 1024)      /* bytes read from the socket at a time */
#define WORKER_TURN 4                /* reads of one source per loop turn, so that all get theirs */
#define WORKER_LAST_WORDS (8 * 1024) /* early output that is kept */
#define WORKER_OUT_MAX (256u * 1024 * 1024)
/* A rank that prints line after line would wake us for each. After this many batches within a
 * window the socket is left alone for a moment: the lines gather there and are merged. */
#define WORKER_PACE_BATCHES 16
#define WORKER_PACE_WINDOW_NS (20ull * 1000 * 1000)
#define WORKER_PACE_MS 3

struct worker_pipe {
    struct worker *w;
    uv_poll_t poll;
    int fd;          /* -1: none */
    int num;         /* 1 stdout, 2 stderr, 0 early output */
    struct buf held; /* read, not delivered yet */
    uint64_t taken;  /* bytes read in all, by us and by the rank's library before */
};

enum { WORKER_EARLY, WORKER_STDOUT, WORKER_STDERR, WORKER_PIPES };

struct worker {
    struct hub *hub;
    char *label;
    char secret[33];
    const struct worker_events *events; /* NULL after worker_close */
    void *ctx;
    pid_t pid;
    int doom; /* signal to send as soon as there is a process, or 0 */
    bool reaped, exited;
    int status;
    struct wire wire;
    uv_poll_t poll;
    bool polling;
    uv_timer_t pace;
    uint64_t window_ns; /* start of the window, and the batches in it */
    unsigned window_batches;
    struct worker_pipe pipes[WORKER_PIPES];
    struct frame_pipes *counters; /* shared with the rank; NULL: not yet */
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
    uv_timer_init(hub_loop(hub), &w->pace);
    w->pace.data = w;
    w->handles++;
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
    for (int i = 0; i < WORKER_PIPES; i++)
        buf_deinit(&w->pipes[i].held);
    if (w->counters)
        munmap(w->counters, sizeof(*w->counters));
    buf_deinit(&w->last_words);
    free(w->label);
    free(w);
}

/* --- handles --- */

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

static void worker_pace_closed(uv_handle_t *handle)
{
    struct worker *w = handle->data;
    w->handles--;
    worker_free_if_done(w);
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
    int events = (uv_is_active((uv_handle_t *)&w->pace) ? 0 : UV_READABLE) |
                 (TAILQ_EMPTY(&w->wire.out) ? 0 : UV_WRITABLE);
    if (!events)
        uv_poll_stop(&w->poll);
    else
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

/* --- what comes from the process --- */

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

static void worker_on_paced(uv_timer_t *timer)
{
    struct worker *w = timer->data;
    if (w->polling)
        worker_watch(w);
}

static void worker_pace(struct worker *w)
{
    uint64_t now = util_monotonic_ns();
    if (now - w->window_ns > WORKER_PACE_WINDOW_NS) {
        w->window_ns = now;
        w->window_batches = 0;
    }
    if (++w->window_batches > WORKER_PACE_BATCHES && w->polling)
        uv_timer_start(&w->pace, worker_on_paced, WORKER_PACE_MS, 0);
}

static void worker_end_batch(struct worker *w)
{
    if (w->batch && w->events) {
        w->batch = false;
        w->events->on_batch(w->ctx);
        worker_pace(w);
    }
}

static void worker_text(struct worker *w, const struct worker_pipe *p, const char *text, size_t len)
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

/* Delivers up to len held bytes, all but the start of a character that is not complete yet. */
static void worker_deliver(struct worker *w, struct worker_pipe *p, size_t len)
{
    if (len >= p->held.len)
        len = p->held.len - util_utf8_partial((const char *)p->held.data, p->held.len);
    if (!len)
        return;
    worker_text(w, p, (const char *)p->held.data, len);
    buf_consume(&p->held, len);
    if (!p->held.len)
        buf_reset(&p->held);
}

/* Under the sequence lock that the rank's library looks at (see struct frame_pipes). */
static ssize_t worker_take(struct worker *w, struct worker_pipe *p, void *out, size_t cap)
{
    struct frame_pipes *shared = p->num == WORKER_EARLY ? NULL : w->counters;
    if (shared)
        shared->seq |= 1;
    ssize_t n = read(p->fd, out, cap);
    if (n > 0)
        p->taken += (uint64_t)n;
    if (shared) {
        shared->taken[p->num - 1] = p->taken;
        shared->seq++;
    }
    return n;
}

/* Reads a pipe once, into what is held. False: empty, or at its end (then it is stopped). */
static bool worker_read_pipe(struct worker *w, struct worker_pipe *p)
{
    if (p->fd < 0 || uv_is_closing((uv_handle_t *)&p->poll) || p->held.len >= WORKER_FILL)
        return false;
    ssize_t n = worker_take(w, p, buf_room(&p->held, WORKER_FILL), WORKER_FILL);
    if (n > 0)
        p->held.len += (size_t)n;
    else if (n == 0 || (errno != EAGAIN && errno != EINTR))
        worker_stop_pipe(p);
    return n > 0;
}

/* Delivers what was written to a pipe before it had seen `position` bytes (modulo 2^32). */
static void worker_deliver_until(struct worker *w, struct worker_pipe *p, uint32_t position)
{
    for (;;) {
        uint32_t delivered = (uint32_t)(p->taken - p->held.len);
        int32_t want = (int32_t)(position - delivered);
        if (want <= 0)
            return;
        size_t held = p->held.len;
        worker_deliver(w, p, (size_t)want); /* first: what is held leaves no room to read more */
        if ((size_t)want <= held || !worker_read_pipe(w, p))
            return;
    }
}

/* The socket has been read empty: whatever is held is newer than every frame so far. */
static void worker_deliver_held(struct worker *w)
{
    for (int i = WORKER_EARLY; i < WORKER_PIPES; i++)
        worker_deliver(w, &w->pipes[i], w->pipes[i].held.len);
}

static void worker_frame(struct worker *w, const struct frame *f, int fds[FRAME_MAX_FDS])
{
    worker_deliver_until(w, &w->pipes[WORKER_STDOUT], f->out);
    worker_deliver_until(w, &w->pipes[WORKER_STDERR], f->err);
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
        int fds[FRAME_MAX_FDS] = {-1, -1, -1};
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

/* One turn's share of frames, then, if there are no more, what the pipes gave. */
static void worker_read_turn(struct worker *w)
{
    bool more = true;
    for (int i = 0; i < WORKER_TURN && more; i++)
        more = w->polling && worker_read_wire(w);
    if (!more)
        worker_deliver_held(w);
    worker_end_batch(w);
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
        worker_read_turn(w);
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
    worker_read_pipe(w, p);
    worker_read_turn(w);
    worker_leave(w);
}

/* The rank's counters; it could shrink an unsealed file under our feet. */
static struct frame_pipes *worker_map_counters(int fd)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) < 0 ||
        st.st_size != sizeof(struct frame_pipes))
        return NULL;
    void *at = mmap(NULL, sizeof(struct frame_pipes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

static void worker_attach_pipes(struct worker *w, int fds[FRAME_MAX_FDS])
{
    if (!w->counters)
        w->counters = worker_map_counters(fds[2]);
    close(fds[2]);
    for (int i = 0; i < 2; i++) {
        struct worker_pipe *p = &w->pipes[WORKER_STDOUT + i];
        if (w->counters)
            p->taken = w->counters->taken[i];
        worker_start_pipe(w, WORKER_STDOUT + i, fds[i]);
    }
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
    worker_attach_pipes(w, fds);
    worker_send(w, FRAME_WELCOME, 0, 0, NULL, 0, -1);
    if (!worker_enter(w))
        return;
    int none[FRAME_MAX_FDS] = {-1, -1, -1};
    worker_frame(w, hello, none);
    worker_parse(w);
    worker_end_batch(w);
    worker_leave(w);
}

/* --- exit --- */

/* Reads what a pipe holds now, and no more: a child that lives on may be writing all the time. */
static void worker_drain_pipe(struct worker *w, struct worker_pipe *p)
{
    int held = 0;
    if (p->fd < 0 || ioctl(p->fd, FIONREAD, &held) < 0)
        return;
    worker_deliver_until(w, p, (uint32_t)(p->taken + (uint64_t)held));
}

/* Everything the process sent is in the socket and the pipes; other holders of them do not count.
 */
static void worker_last_reads(struct worker *w)
{
    while (w->polling && worker_read_wire(w))
        ;
    worker_deliver_held(w);
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
    if (w->doom)
        worker_kill(w, w->doom, "was to end before it had started");
    if (hub_was_reaped(w->hub, pid, &status))
        worker_reaped(w, status);
}

void worker_never(struct worker *w, int code, const char *why)
{
    if (w->exited || !worker_enter(w))
        return;
    w->exited = w->reaped = true;
    worker_last_reads(w);
    log_info("%s: not started: %s", w->label, why);
    if (w->events)
        w->events->on_exit(w->ctx, code << 8, why);
    worker_leave(w);
}

/* --- what goes to the process --- */

void worker_send(struct worker *w, enum frame_type type, uint32_t cell, uint32_t arg,
                 const void *payload, size_t len, int fd)
{
    struct frame f = {.type = (uint8_t)type,
                      .nfds = fd >= 0,
                      .length = (uint32_t)len,
                      .number = w->acked, /* of WELCOME and ACK; the rank keeps what comes after */
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
    if (!w->pid)
        w->doom = signal;
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
    uv_close((uv_handle_t *)&w->pace, worker_pace_closed);
    w->events = NULL;
    w->closing = true;
    worker_stop_wire(w);
    for (int i = 0; i < WORKER_PIPES; i++)
        worker_stop_pipe(&w->pipes[i]);
    worker_free_if_done(w);
}
