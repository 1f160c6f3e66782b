/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sweep.c - ends processes with all that descends from them, without blocking the loop.
 *
 * It is done in a short-lived child, as looking at other processes may block. What is asked for
 * within a few milliseconds, all ranks of a group say, is one child's work; the work of different
 * children is independent, so a stubborn process delays nobody else's end.
 */
#include "sweep.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "log.h"
#include "util.h"

#define SWEEP_GATHER_MS 2
#define SWEEP_LIMIT_MS 3000
#define SWEEP_AGAIN_MS 100 /* when no process could be started */

struct sweep_child {
    TAILQ_ENTRY(sweep_child) link;
    pid_t pid;
    uint64_t number;
};

struct sweep {
    uv_timer_t timer;
    struct kin_root *roots; /* not begun yet */
    size_t len, cap;
    uint64_t number; /* of the sweep they will be */
    TAILQ_HEAD(, sweep_child) children;
    TAILQ_HEAD(, sweep_wait) waits;
};

struct sweep *sweep_new(uv_loop_t *loop)
{
    struct sweep *s = util_calloc(1, sizeof(*s));
    uv_timer_init(loop, &s->timer);
    s->timer.data = s;
    s->number = 1;
    TAILQ_INIT(&s->children);
    TAILQ_INIT(&s->waits);
    return s;
}

/* Our descriptors, the lock among them, must not outlive the daemon in it. */
static _Noreturn void sweep_child_main(const struct sweep *s)
{
    close_range(0, ~0U, 0);
    _exit(kin_end(s->roots, s->len, false, SWEEP_LIMIT_MS) ? 1 : 0);
}

/* With signals blocked, as the handlers in the child are still the loop's. */
static pid_t sweep_fork(const struct sweep *s)
{
    sigset_t all, old;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &old);
    pid_t pid = fork();
    if (pid == 0)
        sweep_child_main(s);
    sigprocmask(SIG_SETMASK, &old, NULL);
    return pid;
}

static void sweep_begin(uv_timer_t *timer)
{
    struct sweep *s = timer->data;
    pid_t pid = sweep_fork(s);
    if (pid < 0) {
        log_warn("cannot start a process to end others: trying again");
        uv_timer_start(timer, sweep_begin, SWEEP_AGAIN_MS, 0);
        return;
    }
    struct sweep_child *c = util_calloc(1, sizeof(*c));
    *c = (struct sweep_child){.pid = pid, .number = s->number++};
    TAILQ_INSERT_TAIL(&s->children, c, link);
    s->len = 0;
}

void sweep_add(struct sweep *s, struct kin_root root)
{
    if (s->len == s->cap)
        s->roots = util_realloc(s->roots, (s->cap = s->cap * 2 + 16) * sizeof(*s->roots));
    s->roots[s->len++] = root;
    if (!uv_is_active((uv_handle_t *)&s->timer))
        uv_timer_start(&s->timer, sweep_begin, SWEEP_GATHER_MS, 0);
}

bool sweep_wait(struct sweep *s, struct sweep_wait *w)
{
    if (!s->len && TAILQ_EMPTY(&s->children))
        return false;
    w->last = s->len ? s->number : s->number - 1;
    TAILQ_INSERT_TAIL(&s->waits, w, link);
    return true;
}

/* The number of the oldest sweep that is not over. */
static uint64_t sweep_oldest(const struct sweep *s)
{
    const struct sweep_child *first = TAILQ_FIRST(&s->children);
    return first ? first->number : s->number;
}

static void sweep_tell(struct sweep *s)
{
    struct sweep_wait *w, *next;
    uint64_t oldest = sweep_oldest(s);
    for (w = TAILQ_FIRST(&s->waits); w; w = next) {
        next = TAILQ_NEXT(w, link);
        if (w->last < oldest) {
            TAILQ_REMOVE(&s->waits, w, link);
            w->done(w->ctx);
        }
    }
}

bool sweep_reaped(struct sweep *s, pid_t pid, int status)
{
    struct sweep_child *c;
    TAILQ_FOREACH(c, &s->children, link)
    {
        if (c->pid == pid)
            break;
    }
    if (!c)
        return false;
    if (!WIFEXITED(status) || WEXITSTATUS(status))
        log_warn("some processes started by ranks could not be ended within %d ms", SWEEP_LIMIT_MS);
    TAILQ_REMOVE(&s->children, c, link);
    free(c);
    sweep_tell(s);
    return true;
}

static void sweep_closed(uv_handle_t *handle)
{
    struct sweep *s = handle->data;
    free(s->roots);
    free(s);
}

void sweep_close(struct sweep *s)
{
    struct sweep_child *c;
    if (s->len)
        sweep_fork(s);
    while ((c = TAILQ_FIRST(&s->children)) != NULL) {
        TAILQ_REMOVE(&s->children, c, link);
        free(c);
    }
    uv_close((uv_handle_t *)&s->timer, sweep_closed);
}
