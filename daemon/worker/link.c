/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link.c - the control thread: connects to the daemon, again and again, and moves frames.
 *
 * All signals are blocked here, so that SIGINT always lands in the main thread. While there is no
 * daemon, the thread itself reads the pipes behind fd 1 and 2, so that nothing the rank prints can
 * block it; with a daemon it leaves them alone, the daemon reads them.
 */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "ddw.h"

#define LINK_RETRY_NS (250ull * 1000 * 1000)
#define LINK_HOLD_NS (10ull * 1000 * 1000) /* how long an unfinished line may wait for its end */
#define LINK_READ (64 * 1024)

void link_kick(void)
{
    uint64_t one = 1;
    ssize_t ignored = write(ddw.kick, &one, sizeof(one));
    (void)ignored; /* full: the thread is awake anyhow */
}

static int link_connect(void)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    if (strlen(ddw.path) >= sizeof(addr.sun_path))
        return -1;
    strcpy(addr.sun_path, ddw.path);
    /* non-blocking: a stopped daemon with a full queue of connections must not stop this thread */
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Connects and says HELLO; the daemon's WELCOME then sets ddw.welcomed. */
static void link_open(void)
{
    int fd = link_connect();
    ddw.retry_ns = util_monotonic_ns() + LINK_RETRY_NS;
    if (fd < 0) {
        if (!ddw.lost_ns)
            ddw.lost_ns = util_monotonic_ns();
        return;
    }
    wire_init(&ddw.wire, fd);
    struct frame hello = {.type = FRAME_HELLO,
                          .nfds = 3,
                          .length = (uint32_t)strlen(ddw.hello),
                          .number = ddw.backlog.last_number,
                          .cell = ddw.cell,
                          .payload = (const uint8_t *)ddw.hello};
    int fds[FRAME_MAX_FDS] = {ddw.pipe_read[0], ddw.pipe_read[1], ddw.pipes_fd};
    capture_position(&hello.out, &hello.err);
    if (wire_send(&ddw.wire, &hello, fds) < 0)
        wire_deinit(&ddw.wire);
}

static void link_lost(void)
{
    wire_deinit(&ddw.wire);
    ddw.welcomed = false;
    if (!ddw.lost_ns)
        ddw.lost_ns = util_monotonic_ns();
    pthread_cond_broadcast(&ddw.backlog.room);
}

static void link_frame(const struct frame *f, int fds[FRAME_MAX_FDS])
{
    switch (f->type) {
    case FRAME_WELCOME:
        ddw.welcomed = true;
        ddw.lost_ns = ddw.retry_ns = 0;
        backlog_restart(f->number);
        break;
    case FRAME_ACK:
        backlog_acked(f->number);
        break;
    default:
        ddw_received(f, f->nfds ? fds[0] : -1);
        return;
    }
    for (size_t i = 0; i < f->nfds; i++)
        close(fds[i]);
}

/* Reads once. False: the connection is gone. */
static bool link_read(void)
{
    enum wire_status st = wire_fill(&ddw.wire, LINK_READ);
    struct frame f;
    int fds[FRAME_MAX_FDS];
    const char *why;
    while (st == WIRE_FRAME) {
        st = wire_next(&ddw.wire, FRAME_MAX, &f, fds, &why);
        if (st == WIRE_FRAME)
            link_frame(&f, fds);
    }
    return st == WIRE_EMPTY;
}

/* Without a daemon: what the rank prints at fd level becomes frames in the backlog. */
static bool link_read_pipe(int which)
{
    static char bytes[LINK_READ];
    ssize_t n = capture_read(which, bytes, sizeof(bytes));
    if (n > 0)
        backlog_pipe_text(which, bytes, (size_t)n);
    return n > 0;
}

/* Before a frame is made: what was written earlier goes first. */
void link_read_pipes(void)
{
    for (int i = 0; i < 2 && ddw.lost_ns && ddw.wire.fd < 0; i++) {
        while (link_read_pipe(i))
            ;
    }
}

static int link_until(uint64_t now, uint64_t then)
{
    return now >= then ? 0 : (int)((then - now) / 1000000 + 1);
}

static int link_sooner(int a, int b)
{
    return a < 0 || (b >= 0 && b < a) ? b : a;
}

/* How long poll may wait: for an unfinished line, the next interrupt, the next try to connect. */
static int link_timeout_ms(uint64_t now)
{
    const struct backlog *b = &ddw.backlog;
    int ms = -1;
    if (b->watched)
        ms = link_until(now, (b->held.len ? b->held_since_ns : now) + LINK_HOLD_NS);
    if (ddw.stacks.check_ns)
        ms = link_sooner(ms, link_until(now, ddw.stacks.check_ns));
    if (ddw.interrupt_next_ns)
        ms = link_sooner(ms, link_until(now, ddw.interrupt_next_ns));
    return ddw.wire.fd < 0 ? link_sooner(ms, link_until(now, ddw.retry_ns)) : ms;
}

/* An unfinished line has waited long enough; after a quiet interval nothing is watched any more. */
static void link_send_held(uint64_t now, bool quiet)
{
    struct backlog *b = &ddw.backlog;
    if (b->held.len && now - b->held_since_ns >= LINK_HOLD_NS)
        backlog_flush_held(false);
    else if (!b->held.len && quiet)
        b->watched = false;
}

static void link_turn(const struct pollfd fds[4], bool timed_out)
{
    if (fds[0].revents & POLLIN) {
        uint64_t drained;
        ssize_t ignored = read(ddw.kick, &drained, sizeof(drained));
        (void)ignored;
    }
    bool pending;
    if (ddw.wire.fd >= 0 && (fds[1].revents & (POLLIN | POLLHUP | POLLERR)) && !link_read())
        link_lost();
    if (ddw.wire.fd >= 0 && (wire_flush(&ddw.wire, &pending) < 0 || backlog_send() < 0))
        link_lost();
    for (int i = 0; i < 2; i++) {
        if (fds[2 + i].revents & POLLIN)
            link_read_pipe(i);
    }
    uint64_t now = util_monotonic_ns();
    link_send_held(now, timed_out);
    interrupt_again(now);
    stacks_turn(now);
    if (ddw.lost_ns && !ddw.orphaned && now - ddw.lost_ns > ddw.orphan_timeout_ns) {
        ddw.orphaned = true;
        ddw_orphaned();
    }
}

void *link_run(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&ddw.lock);
    for (;;) {
        if (ddw.wire.fd < 0 && util_monotonic_ns() >= ddw.retry_ns)
            link_open();
        bool alone = ddw.lost_ns != 0 && ddw.wire.fd < 0;
        short out = ddw.backlog.unsent && ddw.welcomed ? POLLOUT : 0;
        struct pollfd fds[4] = {{.fd = ddw.kick, .events = POLLIN},
                                {.fd = ddw.wire.fd, .events = (short)(POLLIN | out)},
                                {.fd = alone ? ddw.pipe_read[0] : -1, .events = POLLIN},
                                {.fd = alone ? ddw.pipe_read[1] : -1, .events = POLLIN}};
        int timeout = link_timeout_ms(util_monotonic_ns());
        pthread_mutex_unlock(&ddw.lock);
        bool timed_out = poll(fds, 4, timeout) == 0;
        pthread_mutex_lock(&ddw.lock);
        link_turn(fds, timed_out);
    }
}
