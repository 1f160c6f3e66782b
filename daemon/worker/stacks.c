/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stacks.c - where the rank's threads are in Python, also while they hold the GIL or wait in C.
 *
 * faulthandler walks frames without the GIL, which is safe only while they stand still: walking
 * other threads' ended in a crash within a hundred dumps when threads came and went meanwhile. So
 * each thread dumps itself, in a handler of a signal that is sent to it alone, one after another:
 * the main thread, which runs cells, and if wanted those that Python has started.
 *
 * The signal is ours alone. When somebody has put another handler in its place none is sent, since
 * its default would end the process. Children inherit the handler until exec, but get no signal.
 */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ddw.h"

#define STACKS_MAX (128u * 1024)
#define STACKS_THREADS 64 /* dumped at most; faulthandler stops at 100 frames of each */
#define STACKS_CHECK_NS (200ull * 1000 * 1000)
#define STACKS_GIVE_UP_NS (1500ull * 1000 * 1000) /* before the daemon's own deadline */

enum stacks_state { STACKS_IDLE, STACKS_ASKED, STACKS_DUMPING, STACKS_TAKEN };

/* Runs in the thread that is dumped, anywhere in it: async-signal-safe, as faulthandler's is. */
static void stacks_on_signal(int signum)
{
    int saved = errno, asked = STACKS_ASKED;
    if (!ddw.forked && atomic_load(&ddw.stacks.tid) == gettid() &&
        atomic_compare_exchange_strong(&ddw.stacks.state, &asked, STACKS_DUMPING)) {
        ddw.stacks.dump(signum);
        atomic_store(&ddw.stacks.state, STACKS_TAKEN);
        link_kick();
    }
    errno = saved;
}

static void stacks_add_thread(const char *name)
{
    struct stacks_watch *s = &ddw.stacks;
    if (s->len == s->cap) {
        s->cap = s->cap ? 2 * s->cap : 16;
        s->threads = util_realloc(s->threads, s->cap * sizeof(*s->threads));
    }
    struct stacks_thread *t = &s->threads[s->len++];
    *t = (struct stacks_thread){.tid = gettid(), .id = (uint64_t)pthread_self()};
    for (size_t i = 0; i + 1 < sizeof(t->name) && name[i]; i++)
        t->name[i] = name[i] < ' ' || name[i] > '~' ? '?' : name[i];
}

static void stacks_remove_thread(void)
{
    struct stacks_watch *s = &ddw.stacks;
    int asked = STACKS_ASKED;
    for (size_t i = 1; i < s->len; i++) {
        if (s->threads[i].tid != gettid())
            continue;
        memmove(&s->threads[i], &s->threads[i + 1], (--s->len - i) * sizeof(*s->threads));
        s->next -= i < s->next;
        break;
    }
    if (atomic_load(&s->tid) == gettid() &&
        atomic_compare_exchange_strong(&s->state, &asked, STACKS_TAKEN))
        link_kick();
}

int ddw_stacks(int signum, int fd)
{
    struct sigaction action;
    if (sigaction(signum, NULL, &action) < 0)
        return errno;
    if (action.sa_flags & SA_SIGINFO || action.sa_handler == SIG_DFL ||
        action.sa_handler == SIG_IGN)
        return EINVAL;
    pthread_mutex_lock(&ddw.lock);
    ddw.stacks = (struct stacks_watch){.signal = signum, .fd = fd, .dump = action.sa_handler};
    stacks_add_thread("MainThread");
    pthread_mutex_unlock(&ddw.lock);
    /* faulthandler's flags: system calls go on afterwards where the kernel can do that */
    action.sa_flags = SA_RESTART | SA_ONSTACK;
    action.sa_handler = stacks_on_signal;
    return sigaction(signum, &action, NULL) < 0 ? errno : 0;
}

void ddw_stacks_thread(const char *name)
{
    if (ddw.forked || !ddw.stacks.signal)
        return;
    pthread_mutex_lock(&ddw.lock);
    if (name)
        stacks_add_thread(name);
    else
        stacks_remove_thread();
    pthread_mutex_unlock(&ddw.lock);
}

/* --- one answer --- */

static void stacks_none(const char *why)
{
    char text[160];
    int n = snprintf(text, sizeof(text), "none %s\n", why);
    backlog_add(FRAME_TRACE, 0, ddw.stacks.from, text, (size_t)n, -1, false);
}

static void stacks_post(void)
{
    static char text[STACKS_MAX];
    ssize_t n = pread(ddw.stacks.fd, text, sizeof(text), 0);
    while (n == (ssize_t)sizeof(text) && text[n - 1] != '\n')
        n--; /* cut: whole lines only */
    backlog_add(FRAME_TRACE, 0, ddw.stacks.from, text, n > 0 ? (size_t)n : 0, -1, false);
}

static bool stacks_signal_is_ours(void)
{
    struct sigaction action;
    return sigaction(ddw.stacks.signal, NULL, &action) == 0 && !(action.sa_flags & SA_SIGINFO) &&
           action.sa_handler == stacks_on_signal;
}

/* Why the main thread takes no signal; NULL: it may yet. */
static const char *stacks_deaf(void)
{
    char path[64], line[256], state = 0;
    unsigned long long blocked = 0;
    snprintf(path, sizeof(path), "/proc/self/task/%d/status", (int)getpid());
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof(line), f)) {
        sscanf(line, "State: %c", &state);
        sscanf(line, "SigBlk: %llx", &blocked);
    }
    if (f)
        fclose(f);
    if (state == 'D')
        return "its main thread is in an uninterruptible wait (state D)";
    if (blocked >> (ddw.stacks.signal - 1) & 1)
        return "its main thread has blocked the signal that stacks need";
    return NULL;
}

/* Asks the next thread to dump itself. False: there is none left. */
static bool stacks_next(uint64_t now)
{
    struct stacks_watch *s = &ddw.stacks;
    char head[128];
    if (s->next >= s->len || !s->left || now >= s->until_ns)
        return false;
    s->left--;
    const struct stacks_thread *t = &s->threads[s->next++];
    int n = snprintf(head, sizeof(head), "Thread 0x%016llx [%s] (most recent call first):\n",
                     (unsigned long long)t->id, t->name);
    if (write(s->fd, head, (size_t)n) != n)
        return false;
    s->check_ns = now + STACKS_CHECK_NS;
    atomic_store(&s->tid, t->tid);
    atomic_store(&s->state, STACKS_ASKED);
    tgkill(getpid(), t->tid, s->signal);
    return true;
}

static void stacks_start(uint64_t now)
{
    struct stacks_watch *s = &ddw.stacks;
    s->from = s->asked;
    /* as many as there are now: others that come while some go would be followed without an end */
    s->left = !s->asked_all ? 1 : s->len < STACKS_THREADS ? s->len : STACKS_THREADS;
    s->asked_all = false;
    s->next = 0;
    s->until_ns = now + STACKS_GIVE_UP_NS;
    if (!s->signal)
        stacks_none("the process does not watch its stacks yet");
    else if (!stacks_signal_is_ours())
        stacks_none("the rank's code has its own handler for the signal that stacks need");
    else if (ftruncate(s->fd, 0) < 0 || lseek(s->fd, 0, SEEK_SET) < 0 || !stacks_next(now))
        stacks_none("the rank's code has closed the file that stacks need");
}

/* A thread has not answered: the main thread may have its reasons, others are passed over. */
static void stacks_check(uint64_t now)
{
    struct stacks_watch *s = &ddw.stacks;
    int asked = STACKS_ASKED;
    s->check_ns = now + STACKS_CHECK_NS;
    const char *why = s->next == 1 ? stacks_deaf() : NULL;
    if (s->next == 1 && !why && now < s->until_ns)
        return;
    if (!atomic_compare_exchange_strong(&s->state, &asked,
                                        s->next == 1 ? STACKS_IDLE : STACKS_TAKEN))
        return;
    if (s->next == 1) {
        s->check_ns = 0;
        stacks_none(why ? why : "its main thread has not taken the signal that stacks need");
        if (s->asked != s->from)
            stacks_start(now);
    }
}

void stacks_ask(uint32_t id, bool all)
{
    ddw.stacks.asked = id;
    ddw.stacks.asked_all |= all;
    if (atomic_load(&ddw.stacks.state) == STACKS_IDLE)
        stacks_start(util_monotonic_ns());
}

void stacks_turn(uint64_t now)
{
    struct stacks_watch *s = &ddw.stacks;
    if (s->check_ns && now >= s->check_ns && atomic_load(&s->state) == STACKS_ASKED)
        stacks_check(now);
    if (atomic_load(&s->state) != STACKS_TAKEN || stacks_next(now))
        return;
    stacks_post();
    s->check_ns = 0;
    atomic_store(&s->state, STACKS_IDLE);
    if (s->asked != s->from)
        stacks_start(now);
}
