/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_daemon.h - the tests of libddipworker: this process is the daemon, a forked child the rank.
 *
 * A script runs in the child after ddw_start. The two share a few numbers, and step through pipes
 * that the library knows nothing of.
 */
#ifndef DDIPD_FAKE_DAEMON_H
#define DDIPD_FAKE_DAEMON_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ddipworker.h"
#include "tap.h"
#include "wire.h"

#define FAKE_WAIT_MS 20000 /* for what must come */
#define FAKE_HELLO "{\"secret\":\"s\"}"

struct fake {
    char path[64];
    int listener;
    pid_t pid;
    struct wire wire;
    int pipes[2]; /* read ends of the rank's fd 1 and 2 */
    struct frame_pipes *counters;
    struct frame hello;
    uint64_t seen; /* number of the newest frame */
};

static struct fake fake;
static struct {
    _Atomic uint64_t a, b, c, ns;
} * shared;
static int step_fds[2], told_fds[2];

/* --- the rank's side --- */

/* The rank waits here until the test calls fake_step. */
static inline void rank_wait_step(void)
{
    char byte;
    if (read(step_fds[0], &byte, 1) != 1)
        _exit(9);
}

/* The rank tells the test, which waits in fake_wait_told. */
static inline void rank_tell(void)
{
    if (write(told_fds[1], "x", 1) != 1)
        _exit(9);
}

static inline void rank_main(int (*script)(void), uint32_t orphan_timeout_s)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(step_fds[1]); /* so that it sees the test end */
    close(told_fds[0]);
    if (fake.listener >= 0)
        close(fake.listener);
    int rc = ddw_start(fake.path, FAKE_HELLO, orphan_timeout_s);
    _exit(rc ? 8 : script());
}

/* --- the daemon's side --- */

static inline void fake_listen(void)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    memcpy(addr.sun_path, fake.path, strlen(fake.path));
    unlink(fake.path);
    fake.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(fake.listener, (struct sockaddr *)&addr, sizeof(addr)) < 0 ||
        listen(fake.listener, 8) < 0)
        abort();
}

static inline void fake_deafen(void)
{
    close(fake.listener);
    unlink(fake.path);
    fake.listener = -1;
}

/* Starts a rank that runs the script; with a listener unless `alone`. */
static inline void fake_start(int (*script)(void), bool alone, uint32_t orphan_timeout_s)
{
    if (!shared)
        shared =
            mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset((void *)shared, 0, sizeof(*shared));
    fake = (struct fake){.listener = -1, .pipes = {-1, -1}};
    snprintf(fake.path, sizeof(fake.path), "/tmp/ddipd-test-%d.sock", (int)getpid());
    wire_init(&fake.wire, -1);
    if (!alone)
        fake_listen();
    if (pipe2(step_fds, O_CLOEXEC) < 0 || pipe2(told_fds, O_CLOEXEC) < 0)
        abort();
    fflush(stdout);
    fake.pid = fork();
    if (fake.pid == 0)
        rank_main(script, orphan_timeout_s);
    close(step_fds[0]);
    close(told_fds[1]);
}

static inline void fake_step(void)
{
    if (write(step_fds[1], "x", 1) != 1)
        printf("# the rank is gone\n");
}

static inline bool fake_wait_told(void)
{
    char byte;
    struct pollfd p = {.fd = told_fds[0], .events = POLLIN};
    return poll(&p, 1, FAKE_WAIT_MS) == 1 && read(told_fds[0], &byte, 1) == 1;
}

/* The next frame, or false after timeout_ms. Its descriptors: fds, or closed. */
static inline bool fake_frame_fds(struct frame *f, int *fds, int timeout_ms)
{
    int own[FRAME_MAX_FDS];
    const char *why;
    for (;;) {
        enum wire_status st = wire_next(&fake.wire, FRAME_MAX, f, fds ? fds : own, &why);
        if (st == WIRE_BAD)
            printf("# bad frame: %s\n", why);
        if (st == WIRE_FRAME) {
            for (int i = 0; i < f->nfds && !fds; i++)
                close(own[i]);
            fake.seen = f->type == FRAME_HELLO ? fake.seen : f->number;
            return true;
        }
        struct pollfd p = {.fd = fake.wire.fd, .events = POLLIN};
        if (st == WIRE_BAD || poll(&p, 1, timeout_ms) != 1 ||
            wire_fill(&fake.wire, 64 * 1024) != WIRE_FRAME)
            return false;
    }
}

static inline bool fake_frame(struct frame *f)
{
    return fake_frame_fds(f, NULL, FAKE_WAIT_MS);
}

static inline bool fake_quiet(int ms)
{
    struct frame f;
    return !fake_frame_fds(&f, NULL, ms);
}

static inline bool is_frame(const struct frame *f, enum frame_type type, uint32_t cell,
                            uint32_t arg, const char *payload)
{
    return f->type == type && f->cell == cell && f->arg == arg && f->length == strlen(payload) &&
           memcmp(f->payload, payload, f->length) == 0;
}

static inline void fake_send(enum frame_type type, uint64_t number, uint32_t cell,
                             const char *payload)
{
    struct frame f = {.type = (uint8_t)type,
                      .number = number,
                      .cell = cell,
                      .length = payload ? (uint32_t)strlen(payload) : 0,
                      .payload = (const uint8_t *)payload};
    (void)wire_send(&fake.wire, &f, NULL);
}

/* Takes the next connection and its HELLO. The pipes and counters are kept from the first one. */
static inline bool fake_accept(void)
{
    struct pollfd p = {.fd = fake.listener, .events = POLLIN};
    int fds[FRAME_MAX_FDS];
    wire_deinit(&fake.wire);
    if (poll(&p, 1, FAKE_WAIT_MS) != 1)
        return false;
    wire_init(&fake.wire, accept4(fake.listener, NULL, NULL, SOCK_CLOEXEC));
    if (!fake_frame_fds(&fake.hello, fds, FAKE_WAIT_MS) || fake.hello.type != FRAME_HELLO ||
        fake.hello.nfds != 3)
        return false;
    for (int i = 0; i < 2; i++) {
        if (fake.pipes[i] < 0)
            fake.pipes[i] = fds[i];
        else
            close(fds[i]);
    }
    if (!fake.counters)
        fake.counters =
            mmap(NULL, sizeof(*fake.counters), PROT_READ | PROT_WRITE, MAP_SHARED, fds[2], 0);
    close(fds[2]);
    return true;
}

/* Connection and WELCOME: the rank sends what comes after `seen`. */
static inline bool fake_welcome(uint64_t seen)
{
    bool good = fake_accept();
    fake_send(FRAME_WELCOME, seen, 0, NULL);
    return good;
}

static inline void fake_drop(void)
{
    wire_deinit(&fake.wire);
}

/* Reads a pipe once, as worker.c does: under the sequence lock. */
static inline ssize_t fake_read_pipe(int which, void *out, size_t cap)
{
    struct frame_pipes *c = fake.counters;
    c->seq |= 1;
    ssize_t n = read(fake.pipes[which], out, cap);
    if (n > 0)
        c->taken[which] += (uint64_t)n;
    c->seq++;
    return n;
}

/* What the rank wrote to fd 1 or 2 until it held len bytes; "" after a while. */
static inline const char *fake_pipe_text(int which, size_t len)
{
    static char text[4096];
    size_t have = 0;
    while (have < len) {
        struct pollfd p = {.fd = fake.pipes[which], .events = POLLIN};
        if (poll(&p, 1, FAKE_WAIT_MS) != 1)
            break;
        ssize_t n = fake_read_pipe(which, text + have, sizeof(text) - 1 - have);
        if (n <= 0)
            break;
        have += (size_t)n;
    }
    text[have] = '\0';
    return text;
}

/* What the rank said on stderr, a sanitizer perhaps. */
static inline void fake_show_stderr(void)
{
    char text[4096];
    ssize_t n;
    while (fake.pipes[1] >= 0 && (n = read(fake.pipes[1], text, sizeof(text))) > 0)
        printf("# %.*s\n", (int)n, text);
}

/* Waits for the rank's end, which must be a good one. */
static inline void fake_end(const char *name)
{
    int status = -1;
    for (int i = 0; i < FAKE_WAIT_MS && waitpid(fake.pid, &status, WNOHANG) == 0; i++)
        usleep(1000);
    if (status == -1) {
        kill(fake.pid, SIGKILL);
        waitpid(fake.pid, &status, 0);
    }
    ok(status == 0, "%s: the rank ended well (status %d, signal %d)", name, status >> 8,
       status & 0x7f);
    if (status)
        fake_show_stderr();
    fake_drop();
    if (fake.listener >= 0)
        fake_deafen();
    for (int i = 0; i < 2; i++) {
        if (fake.pipes[i] >= 0)
            close(fake.pipes[i]);
    }
    if (fake.counters)
        munmap(fake.counters, sizeof(*fake.counters));
    close(step_fds[1]);
    close(told_fds[0]);
}

#endif
