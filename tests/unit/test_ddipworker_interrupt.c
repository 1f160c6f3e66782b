/* SPDX-License-Identifier: Apache-2.0 */
/* test_ddipworker_interrupt.c - libddipworker: SIGINT reaches user code of the right cell, until it
 * is noticed, and nothing else. */
#include <sched.h>

#include "fake_daemon.h"

/* --- the rank: cells that count signals --- */

static volatile sig_atomic_t signals, strays, in_cell;

static void on_sigint(int signum)
{
    (void)signum;
    if (in_cell)
        signals++;
    else
        strays++;
}

static void catch_sigint(void)
{
    struct sigaction action = {.sa_handler = on_sigint};
    sigaction(SIGINT, &action, NULL);
}

static void spin(uint64_t ns)
{
    uint64_t end = util_monotonic_ns() + ns;
    while (util_monotonic_ns() < end)
        ;
}

/* User code: for a moment, or until it is interrupted. 'u' or a number of microseconds. */
static void run_cell(const char *payload)
{
    uint64_t end = util_monotonic_ns() + (uint64_t)FAKE_WAIT_MS * 1000000u;
    if (*payload != 'u')
        spin(strtoull(payload, NULL, 10) * 1000);
    while (*payload == 'u' && !signals && util_monotonic_ns() < end)
        sched_yield();
}

/* Runs cells until EXIT; DONE says "before signals strays". */
static int script_cells(void)
{
    struct ddw_message m;
    catch_sigint();
    while (ddw_wait(-1, &m) == 1 && m.type == FRAME_EXECUTE) {
        char json[64];
        signals = 0;
        in_cell = 1;
        shared->a = m.cell; /* about to begin */
        int before = ddw_begin(m.cell);
        shared->b = m.cell; /* begun */
        if (!before)
            run_cell(m.payload);
        ddw_end();
        sched_yield(); /* a signal sent before ddw_end's end is handled by now */
        in_cell = 0;
        int n = snprintf(json, sizeof(json), "%d %d %d", before, (int)signals, (int)strays);
        ddw_post(FRAME_DONE, m.cell, 0, json, (uint64_t)n, -1);
        ddw_message_free(m.handle);
    }
    return m.type == FRAME_EXIT ? 0 : 1;
}

/* --- the daemon: one cell, and perhaps an interrupt --- */

struct outcome {
    int before, signals, strays;
};

static bool wait_done(uint32_t cell, struct outcome *o)
{
    struct frame f;
    char text[64];
    if (!fake_frame(&f) || f.type != FRAME_DONE || f.cell != cell)
        return false;
    snprintf(text, sizeof(text), "%.*s", (int)f.length, (const char *)f.payload);
    fake_send(FRAME_ACK, f.number, 0, NULL);
    return sscanf(text, "%d %d %d", &o->before, &o->signals, &o->strays) == 3;
}

static void interrupt(uint32_t cell)
{
    fake_send(FRAME_INTERRUPT, 0, cell, NULL);
}

static void wait_for(_Atomic uint64_t *number, uint64_t cell)
{
    uint64_t end = util_monotonic_ns() + (uint64_t)FAKE_WAIT_MS * 1000000u;
    while (*number < cell && util_monotonic_ns() < end)
        sched_yield();
}

#define CELLS 6000

struct tally {
    int lost, wrong, before, during, after, strays;
};

/* Six kinds of cell in turn; in the random ones begin, interrupt and end race. */
static void race_cell(uint32_t cell, unsigned *seed, struct tally *t)
{
    struct outcome o = {0};
    char code[16];
    unsigned kind = cell % 6;
    snprintf(code, sizeof(code), "%d", rand_r(seed) % 200);
    if (kind == 0)
        interrupt(cell);
    fake_send(FRAME_EXECUTE, 0, cell, kind == 1 ? "u" : code);
    if (kind == 1 || kind >= 4)
        wait_for(kind == 1 ? &shared->b : &shared->a, cell);
    if (kind >= 4)
        spin((uint64_t)rand_r(seed) % 80 * 1000);
    if (kind == 1 || kind == 3 || kind == 5)
        interrupt(cell);
    if (kind == 4)
        interrupt(cell - 1); /* too late: that one is over */
    if (!wait_done(cell, &o)) {
        t->lost++;
        return;
    }
    t->strays = o.strays;
    t->wrong += o.before && o.signals;
    t->wrong += kind == 0 && !o.before;
    t->wrong += kind == 1 && (o.before || !o.signals);
    t->wrong += (kind == 2 || kind == 4) && (o.before || o.signals);
    t->before += o.before;
    t->during += o.signals > 0;
    t->after += (kind == 3 || kind == 5) && !o.before && !o.signals;
}

static void check_races(void)
{
    struct tally t = {0};
    unsigned seed = 7;
    fake_start(script_cells, false, 60);
    fake_welcome(0);
    for (uint32_t cell = 1; cell <= CELLS && !t.lost; cell++)
        race_cell(cell, &seed, &t);
    ok(t.lost == 0, "%d cells, each is done", CELLS);
    ok(t.wrong == 0, "an interrupt reaches its cell, before or after its start, and no other (%d)",
       t.wrong);
    ok(t.strays == 0, "no signal comes outside a cell (%d)", t.strays);
    ok(t.before >= CELLS / 6 && t.during >= CELLS / 6,
       "some came before (%d), some during (%d), %d too late", t.before, t.during, t.after);
    fake_send(FRAME_EXIT, 0, 0, NULL);
    fake_end("races");
}

/* --- again and again, until it is seen --- */

static bool wait_signals(int count, int ms)
{
    uint64_t end = util_monotonic_ns() + (uint64_t)ms * 1000000u;
    while (signals < count && util_monotonic_ns() < end)
        usleep(1000);
    return signals >= count;
}

/* Each part returns what is wrong, or 0. */
static int ignore_until_seen(void)
{
    in_cell = 1;
    if (ddw_begin(1))
        return 1;
    rank_tell();
    if (!wait_signals(3, FAKE_WAIT_MS))
        return 2;
    if (ddw_interrupt_seen() != 1)
        return 3;
    if (ddw_interrupt_seen() != 0)
        return 4;
    int now = signals;
    if (wait_signals(now + 1, 400))
        return 5;
    if (ddw_interrupt_seen() != 1) /* long after: one from somebody else */
        return 6;
    ddw_interrupt_swallowed();
    if (!wait_signals(now + 1, FAKE_WAIT_MS))
        return 7;
    return ddw_interrupt_seen() == 1 ? 0 : 8;
}

static int ignore_until_end(void)
{
    signals = 0;
    rank_tell();
    if (!wait_signals(1, FAKE_WAIT_MS))
        return 11;
    ddw_end();
    sched_yield();
    int now = signals;
    if (ddw_begin(2)) /* the next cell must not get what was meant for this one */
        return 12;
    return wait_signals(now + 1, 400) ? 13 : 0;
}

static int script_again(void)
{
    catch_sigint();
    int rc = ignore_until_seen();
    return rc ? rc : ignore_until_end();
}

static void check_again(void)
{
    fake_start(script_again, false, 60);
    fake_welcome(0);
    ok(fake_wait_told(), "a cell runs");
    interrupt(1);
    ok(fake_wait_told(), "a signal that is ignored comes again, until it is seen, and if it came "
                         "to nothing then; its "
                         "echo is told");
    interrupt(1);
    fake_end("one that is never seen stops with its cell");
}

/* --- children --- */

static pid_t child_that_waits(bool own_session)
{
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGINT, SIG_DFL);
        if (own_session)
            setsid();
        rank_tell();
        alarm(30);
        for (;;)
            pause();
    }
    return pid;
}

static int script_children(void)
{
    struct ddw_message m;
    int status = 0;
    catch_sigint();
    in_cell = 1;
    ddw_begin(1);
    pid_t ours = child_that_waits(false), away = child_that_waits(true);
    if (!wait_signals(1, FAKE_WAIT_MS))
        return 1;
    ddw_interrupt_seen();
    ddw_end();
    while (waitpid(ours, &status, 0) < 0 && errno == EINTR)
        ;
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGINT)
        return 2;
    usleep(50000);
    if (waitpid(away, &status, WNOHANG) != 0)
        return 3;
    kill(away, SIGKILL);
    waitpid(away, &status, 0);
    return ddw_wait(-1, &m) == 1 ? 0 : 4;
}

static void check_children(void)
{
    fake_start(script_children, false, 60);
    fake_welcome(0);
    ok(fake_wait_told() && fake_wait_told(), "two children wait, one in a session of its own");
    interrupt(1);
    fake_send(FRAME_EXIT, 0, 0, NULL);
    fake_end("the one in ours gets the signal");
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    check_races();
    check_again();
    check_children();
    return tap_done();
}
