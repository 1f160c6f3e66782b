/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ddipworker.c - what the Python half of a rank calls, through ctypes.
 *
 * SIGINT is the trap: it must reach user code of the right cell, never the loop around it. The
 * thread signals the main thread only between ddw_begin and ddw_end of that cell, under the lock; a
 * request that comes before ddw_begin is remembered and returned by it. The Python half still has
 * to gate its handler, because a signal sent before ddw_end may be handled after it.
 */
#include "ddipworker.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "ddw.h"
#include "kin.h"

/* Questions that nobody has come to answer: whoever asked has been told so by the daemon. */
#define DDW_QUESTIONS_MAX 8

struct ddw ddw = {.lock = PTHREAD_MUTEX_INITIALIZER,
                  .asked = PTHREAD_COND_INITIALIZER,
                  .wire = {.fd = -1},
                  .backlog = {.room = PTHREAD_COND_INITIALIZER}};

/* --- start --- */

static void ddw_before_fork(void)
{
    pthread_mutex_lock(&ddw.lock);
}

static void ddw_after_fork_parent(void)
{
    pthread_mutex_unlock(&ddw.lock);
}

/* A child of the rank has no control thread; what it prints goes out through fd 1 and 2. */
static void ddw_after_fork_child(void)
{
    ddw.forked = true;
    ddw.running = false;
    if (ddw.wire.fd >= 0)
        close(ddw.wire.fd);
    ddw.wire.fd = -1;
    pthread_mutex_unlock(&ddw.lock);
}

static int ddw_start_thread(void)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&ddw.thread, NULL, link_run, NULL);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc;
}

void ddw_end_children(uint32_t timeout_ms)
{
    struct kin_root self = {getpid(), kin_start_time(getpid())};
    if (!ddw.forked)
        kin_end(&self, 1, true, timeout_ms);
}

int ddw_start(const char *socket_path, const char *hello_json, uint32_t orphan_timeout_s)
{
    if (ddw.path)
        return EALREADY;
    kin_mark_self();
    ddw.main = pthread_self();
    ddw.path = util_strdup(socket_path);
    ddw.hello = util_strdup(hello_json);
    ddw.orphan_timeout_ns = (uint64_t)orphan_timeout_s * 1000000000u;
    TAILQ_INIT(&ddw.inbox);
    TAILQ_INIT(&ddw.questions);
    TAILQ_INIT(&ddw.backlog.frames);
    ddw.kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    ddw.inbox_kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    ddw.abort_kick = eventfd(0, EFD_CLOEXEC); /* blocking: a thread waits in read */
    if (ddw.kick < 0 || ddw.inbox_kick < 0 || ddw.abort_kick < 0)
        return errno;
    int rc = capture_start();
    if (rc == 0)
        rc = pthread_atfork(ddw_before_fork, ddw_after_fork_parent, ddw_after_fork_child);
    return rc ? rc : ddw_start_thread();
}

/* --- to the daemon --- */

static void ddw_write_plain(int fd, const char *text, size_t len)
{
    while (len) {
        ssize_t n = write(fd, text, len);
        if (n < 0 && errno != EINTR)
            return;
        if (n > 0) {
            text += n;
            len -= (size_t)n;
        }
    }
}

void ddw_stream(int fd, const char *text, uint64_t len)
{
    if (ddw.forked) {
        ddw_write_plain(fd, text, len);
        return;
    }
    pthread_mutex_lock(&ddw.lock);
    backlog_text(fd, text, len, true);
    pthread_mutex_unlock(&ddw.lock);
}

void ddw_stream_flush(void)
{
    if (ddw.forked)
        return;
    pthread_mutex_lock(&ddw.lock);
    backlog_flush_held(true);
    pthread_mutex_unlock(&ddw.lock);
}

int ddw_post(uint32_t type, uint32_t cell, uint32_t arg, const char *json, uint64_t len, int fd)
{
    if (ddw.forked)
        return EPIPE;
    pthread_mutex_lock(&ddw.lock);
    int rc = backlog_add((uint8_t)type, cell, arg, json, len, fd, true);
    pthread_mutex_unlock(&ddw.lock);
    return rc;
}

void ddw_flush(uint32_t timeout_ms)
{
    fflush(NULL);
    if (ddw.forked)
        return;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&ddw.lock);
    backlog_flush_held(true);
    while (ddw.backlog.unsent && ddw.welcomed) {
        if (pthread_cond_timedwait(&ddw.backlog.room, &ddw.lock, &until) == ETIMEDOUT)
            break;
    }
    pthread_mutex_unlock(&ddw.lock);
}

/* --- from the daemon --- */

static void ddw_put(struct inbox *inbox, const struct frame *f, int fd)
{
    struct inbox_message *in = util_malloc(sizeof(*in) + f->length + 1);
    if (f->length)
        memcpy(in->payload, f->payload, f->length);
    in->payload[f->length] = '\0';
    in->m = (struct ddw_message){.type = f->type,
                                 .cell = f->cell,
                                 .arg = f->arg,
                                 .fd = fd,
                                 .length = f->length,
                                 .payload = in->payload,
                                 .handle = in};
    TAILQ_INSERT_TAIL(inbox, in, link);
}

static void ddw_put_inbox(const struct frame *f, int fd)
{
    ddw_put(&ddw.inbox, f, fd);
    uint64_t one = 1;
    ssize_t ignored = write(ddw.inbox_kick, &one, sizeof(one));
    (void)ignored;
}

static struct inbox_message *ddw_take_question(void)
{
    struct inbox_message *in = TAILQ_FIRST(&ddw.questions);
    TAILQ_REMOVE(&ddw.questions, in, link);
    ddw.questions_len--;
    return in;
}

/* The newest count: the oldest is given up when there are too many. */
static void ddw_put_question(const struct frame *f)
{
    if (ddw.questions_len == DDW_QUESTIONS_MAX)
        free(ddw_take_question());
    ddw_put(&ddw.questions, f, -1);
    ddw.questions_len++;
    pthread_cond_signal(&ddw.asked);
}

void ddw_received(const struct frame *f, int fd)
{
    if (f->type == FRAME_ABORT) {
        ddw.aborted = ddw.running;
        abort_now();
        uint64_t one = 1;
        ssize_t ignored = write(ddw.abort_kick, &one, sizeof(one));
        (void)ignored;
        return;
    }
    if (f->type == FRAME_STACKS) {
        stacks_ask(f->arg, f->length > 0);
        return;
    }
    if (f->type == FRAME_QUESTION) {
        if (fd >= 0)
            close(fd);
        ddw_put_question(f);
        return;
    }
    if (f->type == FRAME_EXECUTE && f->cell <= ddw.newest) {
        if (fd >= 0)
            close(fd);
        return; /* a daemon that has been restarted cannot know that we have it already */
    }
    if (f->type == FRAME_EXECUTE)
        ddw.newest = f->cell;
    if (f->type != FRAME_INTERRUPT) {
        ddw_put_inbox(f, fd);
        return;
    }
    if (ddw.running && ddw.cell == f->cell)
        interrupt_begin();
    else if (f->cell > ddw.cell)
        ddw.interrupted = f->cell; /* still in the inbox: ddw_begin will say so */
}

void ddw_orphaned(void)
{
    ddw_put_inbox(&(struct frame){.type = FRAME_EXIT}, -1);
}

int ddw_wait(int signal_fd, struct ddw_message *m)
{
    for (;;) {
        pthread_mutex_lock(&ddw.lock);
        struct inbox_message *in = TAILQ_FIRST(&ddw.inbox);
        if (in) {
            TAILQ_REMOVE(&ddw.inbox, in, link);
            *m = in->m;
        }
        pthread_mutex_unlock(&ddw.lock);
        if (in)
            return 1;
        struct pollfd fds[2] = {{.fd = ddw.inbox_kick, .events = POLLIN},
                                {.fd = signal_fd, .events = POLLIN}};
        int n = poll(fds, 2, -1);
        char drain[64];
        ssize_t ignored = 0;
        if (fds[0].revents & POLLIN)
            ignored = read(ddw.inbox_kick, drain, sizeof(uint64_t));
        if (n < 0 || (fds[1].revents & POLLIN)) {
            if (n > 0)
                ignored = read(signal_fd, drain, sizeof(drain));
            (void)ignored;
            return 0;
        }
    }
}

void ddw_wait_question(struct ddw_message *m)
{
    pthread_mutex_lock(&ddw.lock);
    while (TAILQ_EMPTY(&ddw.questions))
        pthread_cond_wait(&ddw.asked, &ddw.lock);
    *m = ddw_take_question()->m;
    pthread_mutex_unlock(&ddw.lock);
}

void ddw_message_free(void *handle)
{
    free(handle);
}

int ddw_begin(uint32_t cell)
{
    pthread_mutex_lock(&ddw.lock);
    link_read_pipes(); /* late output of the cell before stays that cell's */
    backlog_flush_held(true);
    bool interrupted = ddw.interrupted == cell;
    ddw.cell = cell;
    ddw.running = !interrupted;
    ddw.aborted = false;
    pthread_mutex_unlock(&ddw.lock);
    return interrupted;
}

void ddw_bracket(int open)
{
    pthread_mutex_lock(&ddw.lock);
    if (open)
        abort_bracket_open();
    else
        abort_bracket_close();
    pthread_mutex_unlock(&ddw.lock);
}

int ddw_abort(void)
{
    pthread_mutex_lock(&ddw.lock);
    int count = abort_now();
    pthread_mutex_unlock(&ddw.lock);
    return count;
}

int ddw_abort_fd(void)
{
    return ddw.abort_kick;
}

int ddw_aborted(void)
{
    pthread_mutex_lock(&ddw.lock);
    bool aborted = ddw.aborted;
    pthread_mutex_unlock(&ddw.lock);
    return aborted;
}

void ddw_end(void)
{
    fflush(NULL);
    pthread_mutex_lock(&ddw.lock);
    ddw.running = false;
    interrupt_end();
    stacks_turn(util_monotonic_ns()); /* what was asked in the cell is answered before its end */
    pthread_mutex_unlock(&ddw.lock);
}

int ddw_interrupt_seen(void)
{
    pthread_mutex_lock(&ddw.lock);
    bool raise_it = interrupt_seen(util_monotonic_ns());
    pthread_mutex_unlock(&ddw.lock);
    return raise_it;
}

void ddw_interrupt_swallowed(void)
{
    if (ddw.forked)
        return;
    pthread_mutex_lock(&ddw.lock);
    if (ddw.running) {
        interrupt_later(util_monotonic_ns());
        link_kick();
    }
    pthread_mutex_unlock(&ddw.lock);
}
