/* SPDX-License-Identifier: Apache-2.0 */
/*
 * channel.c - the connection with a process: frames both ways, and the text of its fds 1 and 2.
 *
 * Order is the trap here. Text a rank prints from Python comes as STREAM frames; text written to
 * its fd 1 and 2 by anything else comes through the pipes. Both keep their order among each other
 * thus: before pipes are looked at, the socket is read; and every frame says how many bytes had
 * been written to the pipes when it was made, so those are delivered first.
 */
#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hub.h"
#include "log.h"

#define CHANNEL_FILL (64 * 1024) /* bytes read from the socket at a time */
#define CHANNEL_TURN 4           /* reads of one source per loop turn, so that all get theirs */
#define CHANNEL_OUT_MAX (256u * 1024 * 1024)
/* A rank that prints line after line would wake us for each. After this many batches within a
 * window the socket is left alone for a moment: the lines gather there and are merged. */
#define CHANNEL_PACE_BATCHES 16
#define CHANNEL_PACE_WINDOW_NS (20ull * 1000 * 1000)
#define CHANNEL_PACE_MS 3
#define CHANNEL_AGAIN_MS 3 /* until a frame the callee would not take is offered again */

static void channel_on_wire(uv_poll_t *poll, int status, int events);
static void channel_on_text(uv_poll_t *poll, int status, int events);
static void channel_on_paced(uv_timer_t *timer);
static bool channel_commit(struct channel *c);

void channel_init(struct channel *c, struct hub *hub, const char *label,
                  const struct worker_events *events, void *ctx)
{
    *c = (struct channel){.hub = hub, .label = label, .events = events, .ctx = ctx};
    wire_init(&c->wire, -1);
    for (int i = 0; i < 2; i++)
        c->texts[i] = (struct channel_text){.channel = c, .num = i + 1, .pipe = {.fd = -1}};
    uv_timer_init(hub_loop(hub), &c->pace);
    c->pace.data = c;
    c->handles++;
}

bool channel_idle(const struct channel *c)
{
    return c->closing && !c->handles && !c->depth;
}

static void channel_tell_idle(struct channel *c)
{
    if (channel_idle(c))
        c->on_idle(c);
}

bool channel_enter(struct channel *c)
{
    if (c->closing)
        return false;
    c->depth++;
    return true;
}

void channel_leave(struct channel *c)
{
    c->depth--;
    channel_tell_idle(c);
}

/* --- handles --- */

static void channel_wire_closed(uv_handle_t *handle)
{
    struct channel *c = handle->data;
    wire_deinit(&c->wire);
    c->handles--;
    channel_tell_idle(c);
}

static void channel_pace_closed(uv_handle_t *handle)
{
    struct channel *c = handle->data;
    c->handles--;
    channel_tell_idle(c);
}

static void channel_text_closed(uv_handle_t *handle)
{
    struct channel_text *t = handle->data;
    close(t->pipe.fd);
    t->pipe.fd = -1;
    t->channel->handles--;
    channel_tell_idle(t->channel);
}

static void channel_stop_text(struct channel_text *t)
{
    if (t->pipe.fd >= 0 && !uv_is_closing((uv_handle_t *)&t->poll))
        uv_close((uv_handle_t *)&t->poll, channel_text_closed);
}

static void channel_start_text(struct channel_text *t, int fd)
{
    struct channel *c = t->channel;
    if (t->pipe.fd >= 0) { /* a reconnected rank sends the pipes we have */
        close(fd);
        return;
    }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
    t->pipe.fd = fd;
    t->poll.data = t;
    c->handles++;
    uv_poll_init(hub_loop(c->hub), &t->poll, fd);
}

/* The pipes are read only while the rank is connected: without us its library reads them. */
static void channel_watch(struct channel *c)
{
    for (int i = 0; i < 2; i++) {
        struct channel_text *t = &c->texts[i];
        if (t->pipe.fd < 0 || uv_is_closing((uv_handle_t *)&t->poll))
            continue;
        if (c->connected && !c->stalled && !c->refused)
            uv_poll_start(&t->poll, UV_READABLE, channel_on_text);
        else
            uv_poll_stop(&t->poll);
    }
    if (!c->connected)
        return;
    bool deaf = c->stalled || uv_is_active((uv_handle_t *)&c->pace);
    int events = (deaf ? 0 : UV_READABLE) | (TAILQ_EMPTY(&c->wire.out) ? 0 : UV_WRITABLE);
    if (events)
        uv_poll_start(&c->poll, events, channel_on_wire);
    else
        uv_poll_stop(&c->poll);
}

static void channel_lost(struct channel *c, const char *why)
{
    if (why && !c->closing)
        log_warn("%s: connection dropped: %s", c->label, why);
    if (!c->connected)
        return;
    c->connected = false;
    uv_close((uv_handle_t *)&c->poll, channel_wire_closed);
    channel_watch(c);
}

void channel_close(struct channel *c, void (*on_idle)(struct channel *c))
{
    c->on_idle = on_idle;
    c->events = NULL;
    c->closing = true;
    channel_lost(c, NULL);
    uv_close((uv_handle_t *)&c->pace, channel_pace_closed);
    for (int i = 0; i < 2; i++) {
        channel_stop_text(&c->texts[i]);
        buf_deinit(&c->texts[i].pipe.held);
    }
    if (c->counters)
        munmap(c->counters, sizeof(*c->counters));
    c->counters = NULL;
}

/* --- text --- */

/* Delivers up to len held bytes, all but the start of a character that is not complete yet. */
static void channel_deliver(struct channel *c, struct channel_text *t, size_t len)
{
    const char *text = (const char *)t->pipe.held.data;
    if (len >= t->pipe.held.len)
        len = t->pipe.held.len - util_utf8_partial(text, t->pipe.held.len);
    if (!len)
        return;
    c->batch = true;
    if (c->events)
        c->events->on_output(c->ctx, t->num, text, len, pipe_at(&t->pipe) + len);
    pipe_delivered(&t->pipe, len);
}

/* Looks into a pipe once. False: nothing new, or at its end (then it is stopped). */
static bool channel_look(struct channel *c, struct channel_text *t)
{
    if (t->pipe.fd < 0 || uv_is_closing((uv_handle_t *)&t->poll))
        return false;
    enum pipe_status st = pipe_look(&t->pipe, hub_pipe_tools(c->hub), CHANNEL_FILL);
    if (st == PIPE_END)
        channel_stop_text(t);
    return st == PIPE_MORE;
}

/* Delivers what was written to a pipe before it had seen `position` bytes (modulo 2^32). */
static void channel_deliver_until(struct channel *c, struct channel_text *t, uint32_t position)
{
    for (;;) {
        int32_t want = (int32_t)(position - (uint32_t)pipe_at(&t->pipe));
        if (want <= 0)
            return;
        size_t held = t->pipe.held.len;
        channel_deliver(c, t, (size_t)want); /* first: what is held leaves no room to look */
        if ((size_t)want <= held)
            return;
        /* what fills the pipe may be what we have: it goes once it is in the journal */
        if (!channel_look(c, t) && !(channel_commit(c) && channel_look(c, t)))
            return;
    }
}

/* The socket has been read empty: whatever is held is newer than every frame so far. */
static void channel_deliver_held(struct channel *c)
{
    for (int i = 0; i < 2; i++)
        channel_deliver(c, &c->texts[i], c->texts[i].pipe.held.len);
}

static void channel_lost_text(struct channel *c, struct channel_text *t, uint64_t bytes)
{
    if (!bytes || !c->events)
        return;
    c->batch = true;
    c->events->on_lost_text(c->ctx, t->num, bytes);
}

void channel_skip(struct channel *c, const uint64_t until[2])
{
    for (int i = 0; i < 2; i++)
        (void)pipe_skip(&c->texts[i].pipe, until[i]);
}

/* --- frames --- */

/* Text that the rank's library took out of a pipe. */
static void channel_pipe_frame(struct channel *c, const struct frame *f)
{
    struct channel_text *t = &c->texts[f->arg == 2];
    uint32_t end = f->arg == 2 ? f->err : f->out;
    channel_lost_text(c, t, pipe_add(&t->pipe, end, f->payload, f->length));
    channel_deliver(c, t, t->pipe.held.len);
}

/* False: the callee wants it later. */
static bool channel_frame(struct channel *c, const struct frame *f, int fds[FRAME_MAX_FDS])
{
    bool hello = f->type == FRAME_HELLO;
    if (!hello && f->number <= c->seen)
        return true; /* sent again after a reconnection, and known */
    if (f->type == FRAME_STREAM && (f->flags & FRAME_FLAG_PIPE)) {
        channel_pipe_frame(c, f);
    } else {
        channel_deliver_until(c, &c->texts[0], f->out);
        channel_deliver_until(c, &c->texts[1], f->err);
        if (c->events && !c->events->on_frame(c->ctx, f, fds, !c->last))
            return false;
    }
    c->batch = true;
    if (!hello)
        c->seen = f->number;
    return true;
}

/* Handles the whole frames that have been read. False: the connection is of no use any more, or the
 * next frame has to wait. */
static bool channel_parse(struct channel *c)
{
    c->refused = false;
    while (c->connected && !c->stalled) {
        struct frame f;
        int fds[FRAME_MAX_FDS] = {-1, -1, -1};
        const char *why;
        enum wire_status st = wire_next(&c->wire, FRAME_MAX, &f, fds, &why);
        if (st == WIRE_BAD)
            channel_lost(c, why);
        if (st != WIRE_FRAME)
            return st != WIRE_BAD;
        bool taken = channel_frame(c, &f, fds);
        for (size_t i = 0; i < FRAME_MAX_FDS; i++) {
            if (fds[i] >= 0)
                close(fds[i]);
        }
        if (!taken) {
            c->refused = true;
            c->wire.used -= FRAME_HEADER + f.length;
            uv_timer_start(&c->pace, channel_on_paced, CHANNEL_AGAIN_MS, 0);
            return false;
        }
    }
    return false;
}

/* Reads once and handles what came. False: nothing more to read now. */
static bool channel_read(struct channel *c)
{
    if (!c->connected || c->stalled)
        return false;
    enum wire_status st = wire_fill(&c->wire, CHANNEL_FILL);
    if (st == WIRE_CLOSED)
        channel_lost(c, NULL);
    return st == WIRE_FRAME && channel_parse(c);
}

/* --- batches --- */

/* The journal has what was delivered: pipes and process may forget it. False: it does not. */
static bool channel_commit(struct channel *c)
{
    if (c->batch && c->events && !c->events->on_batch(c->ctx)) {
        c->stalled = true;
        channel_watch(c);
        return false;
    }
    c->batch = false;
    for (int i = 0; i < 2 && c->counters; i++)
        pipe_take(&c->texts[i].pipe, hub_pipe_tools(c->hub), c->counters, i + 1);
    if (c->seen != c->acked) {
        c->acked = c->seen;
        channel_send(c, FRAME_ACK, 0, 0, NULL, 0, -1);
    }
    return true;
}

static void channel_pace(struct channel *c)
{
    uint64_t now = util_monotonic_ns();
    if (now - c->window_ns > CHANNEL_PACE_WINDOW_NS) {
        c->window_ns = now;
        c->window_batches = 0;
    }
    if (++c->window_batches > CHANNEL_PACE_BATCHES && c->connected)
        uv_timer_start(&c->pace, channel_on_paced, CHANNEL_PACE_MS, 0);
}

/* One turn's share of frames, then, if there are no more, what the pipes gave. */
static void channel_turn(struct channel *c)
{
    bool more = channel_parse(c);
    for (int i = 0; i < CHANNEL_TURN && more; i++)
        more = channel_read(c);
    if (!more && !c->refused && !c->stalled)
        channel_deliver_held(c);
    if (c->batch && channel_commit(c))
        channel_pace(c);
    channel_watch(c);
}

static void channel_on_wire(uv_poll_t *poll, int status, int events)
{
    struct channel *c = poll->data;
    bool pending;
    if (!channel_enter(c))
        return;
    if (status < 0 || ((events & UV_WRITABLE) && wire_flush(&c->wire, &pending) < 0))
        channel_lost(c, NULL);
    else if (events & UV_READABLE)
        channel_turn(c);
    channel_watch(c);
    channel_leave(c);
}

static void channel_on_text(uv_poll_t *poll, int status, int events)
{
    struct channel_text *t = poll->data;
    struct channel *c = t->channel;
    (void)status;
    (void)events;
    if (!channel_enter(c))
        return;
    channel_look(c, t);
    channel_turn(c);
    channel_leave(c);
}

static void channel_on_paced(uv_timer_t *timer)
{
    struct channel *c = timer->data;
    if (!channel_enter(c))
        return;
    channel_turn(c);
    channel_leave(c);
}

/* --- the connection --- */

/* The rank's counters; it could shrink an unsealed file under our feet. */
static struct frame_pipes *channel_map_counters(int fd)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) < 0 ||
        st.st_size != sizeof(struct frame_pipes))
        return NULL;
    void *at = mmap(NULL, sizeof(struct frame_pipes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

void channel_start_from(struct channel *c, uint64_t seen, const uint64_t pipe_end[2])
{
    c->seen = c->acked = seen;
    for (int i = 0; i < 2; i++)
        c->texts[i].pipe.got = pipe_end[i];
}

void channel_attach(struct channel *c, struct wire *wire, const struct frame *hello,
                    int fds[FRAME_MAX_FDS])
{
    if (!channel_enter(c))
        return;
    c->wire = *wire;
    TAILQ_INIT(&c->wire.out);
    c->connected = true;
    c->poll.data = c;
    c->handles++;
    uv_poll_init(hub_loop(c->hub), &c->poll, c->wire.fd);
    if (!c->counters)
        c->counters = channel_map_counters(fds[2]);
    close(fds[2]);
    for (int i = 0; i < 2; i++) {
        struct pipe *p = &c->texts[i].pipe;
        channel_start_text(&c->texts[i], fds[i]);
        if (c->counters)
            pipe_resume(p, pipe_at(p), c->counters, i + 1);
    }
    channel_watch(c);
    channel_send(c, FRAME_WELCOME, 0, 0, NULL, 0, -1);
    int none[FRAME_MAX_FDS] = {-1, -1, -1};
    (void)channel_frame(c, hello, none);
    channel_turn(c);
    channel_leave(c);
}

void channel_send(struct channel *c, enum frame_type type, uint32_t cell, uint32_t arg,
                  const void *payload, size_t len, int fd)
{
    struct frame f = {.type = (uint8_t)type,
                      .nfds = fd >= 0,
                      .length = (uint32_t)len,
                      .number = c->acked, /* of WELCOME and ACK; the rank keeps what comes after */
                      .cell = cell,
                      .arg = arg,
                      .payload = payload};
    if (!c->connected)
        return;
    if (c->wire.out_bytes + len > CHANNEL_OUT_MAX || wire_send(&c->wire, &f, &fd) < 0)
        channel_lost(c, "cannot send");
    else if (!TAILQ_EMPTY(&c->wire.out))
        channel_watch(c);
}

/* --- the end --- */

/* What a pipe holds now, and no more: a child that lives on may be writing all the time. */
static void channel_drain_text(struct channel *c, struct channel_text *t)
{
    int held = 0;
    if (t->pipe.fd < 0 || !c->counters || ioctl(t->pipe.fd, FIONREAD, &held) < 0)
        return;
    t->pipe.taken = c->counters->taken[t->num - 1];
    channel_lost_text(c, t, pipe_skip(&t->pipe, t->pipe.taken)); /* it died with the library */
    channel_deliver_until(c, t, (uint32_t)(t->pipe.taken + (uint64_t)held));
}

bool channel_finish(struct channel *c)
{
    c->last = true;
    (void)channel_parse(c);
    while (channel_read(c))
        ;
    if (!c->stalled)
        channel_deliver_held(c);
    for (int i = 0; i < 2 && !c->stalled; i++)
        channel_drain_text(c, &c->texts[i]);
    if (!c->stalled)
        (void)channel_commit(c);
    if (c->stalled)
        return false;
    channel_lost(c, NULL);
    for (int i = 0; i < 2; i++)
        channel_stop_text(&c->texts[i]);
    return true;
}

bool channel_resume(struct channel *c)
{
    if (!c->stalled)
        return true;
    c->stalled = false;
    if (!channel_commit(c))
        return false;
    if (!c->last)
        channel_turn(c);
    return !c->stalled;
}
