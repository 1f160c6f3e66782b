/* SPDX-License-Identifier: Apache-2.0 */
/* test_ddipworker_stacks.c - libddipworker: threads dump themselves when the daemon asks. The dump
 * is a line of ours instead of faulthandler's. */
#include <pthread.h>
#include <stdatomic.h>

#include "fake_daemon.h"

#define SIGNAL (SIGRTMAX - 5)

static int dump_fd;
static volatile sig_atomic_t dumps;

static void dump(int signum)
{
    char line[64];
    (void)signum;
    int n = snprintf(line, sizeof(line), "  File \"x\", line %d in f\n", (int)++dumps);
    if (write(dump_fd, line, (size_t)n) != n)
        _exit(7);
}

static void watch(void)
{
    struct sigaction action = {.sa_handler = dump};
    dump_fd = memfd_create("dump", MFD_CLOEXEC);
    sigaction(SIGNAL, &action, NULL);
    if (ddw_stacks(SIGNAL, dump_fd) != 0)
        _exit(6);
}

static void ask(uint32_t id, const char *what)
{
    struct frame f = {.type = FRAME_STACKS,
                      .arg = id,
                      .length = (uint32_t)strlen(what),
                      .payload = (const uint8_t *)what};
    (void)wire_send(&fake.wire, &f, NULL);
}

/* The next TRACE's text; id and text, or "". */
static const char *trace(uint32_t *id)
{
    static char text[4096];
    struct frame f;
    text[0] = '\0';
    *id = 0;
    if (fake_frame(&f) && f.type == FRAME_TRACE && f.length < sizeof(text)) {
        memcpy(text, f.payload, f.length);
        text[f.length] = '\0';
        *id = f.arg;
        fake_send(FRAME_ACK, f.number, 0, NULL);
    }
    return text;
}

static int count(const char *text, const char *what)
{
    int n = 0;
    for (; (text = strstr(text, what)) != NULL; text++)
        n++;
    return n;
}

static void *thread_run(void *stop)
{
    ddw_stacks_thread("loader");
    rank_tell();
    while (!atomic_load((_Atomic int *)stop))
        usleep(1000);
    ddw_stacks_thread(NULL);
    return NULL;
}

/* Main waits in a step; another thread runs, ends, and does not matter any more. */
static int script_threads(void)
{
    _Atomic int stop = 0;
    pthread_t thread;
    watch();
    pthread_create(&thread, NULL, thread_run, &stop);
    for (char byte; read(step_fds[0], &byte, 1) < 0 && errno == EINTR;)
        ;
    stop = 1;
    pthread_join(thread, NULL);
    rank_tell();
    for (char byte; read(step_fds[0], &byte, 1) < 0 && errno == EINTR;)
        ;
    return 0;
}

static void check_threads(void)
{
    uint32_t id;
    fake_start(script_threads, false, 60);
    fake_welcome(0);
    fake_wait_told();
    ask(1, "");
    const char *text = trace(&id);
    ok(id == 1 && count(text, "Thread 0x") == 1 && strstr(text, "[MainThread]"),
       "the main thread alone");
    ok(count(text, "  File ") == 1, "with its dump");
    ask(2, "all");
    text = trace(&id);
    ok(id == 2 && count(text, "Thread 0x") == 2 && strstr(text, "[loader]"), "all threads");
    ok(count(text, "  File ") == 2 && strstr(text, "[MainThread]") < strstr(text, "[loader]"),
       "each dumped itself, main first");
    fake_step();
    fake_wait_told();
    ask(3, "all");
    ok(count(trace(&id), "Thread 0x") == 1 && id == 3, "a thread that has ended is forgotten");
    for (uint32_t i = 4; i < 104; i++)
        ask(i, i % 2 ? "all" : "");
    int answers = 0;
    do {
        answers++;
        text = trace(&id);
    } while (id && id < 103);
    ok(id == 103 && answers <= 100, "a hundred questions: the newest is answered (%d answers)",
       answers);
    fake_step();
    fake_end("threads");
}

/* A thread that comes and goes all the time. */
static void *thread_brief(void *unused)
{
    (void)unused;
    ddw_stacks_thread("brief");
    ddw_stacks_thread(NULL);
    return NULL;
}

static int script_churn(void)
{
    watch();
    rank_tell();
    while (!shared->a) {
        pthread_t threads[4];
        for (int i = 0; i < 4; i++)
            pthread_create(&threads[i], NULL, thread_brief, NULL);
        for (int i = 0; i < 4; i++)
            pthread_join(threads[i], NULL);
        shared->b += 4;
    }
    return 0;
}

static void check_churn(void)
{
    uint32_t id = 0;
    int bad = 0;
    fake_start(script_churn, false, 60);
    fake_welcome(0);
    fake_wait_told();
    for (uint32_t i = 1; i <= 500; i++) {
        ask(i, "all");
        const char *text = trace(&id);
        bad += id != i || !strstr(text, "[MainThread]");
    }
    ok(bad == 0, "500 questions while threads come and go (%llu did)",
       (unsigned long long)shared->b);
    shared->a = 1;
    fake_end("churn");
}

static void other_handler(int signum)
{
    (void)signum;
    shared->b++;
}

/* Blocked signal; then somebody else's handler; then none at all. */
static int script_deaf(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGNAL);
    watch();
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    rank_tell();
    rank_wait_step();
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    signal(SIGNAL, other_handler);
    rank_tell();
    rank_wait_step();
    signal(SIGNAL, SIG_DFL);
    rank_tell();
    rank_wait_step();
    return shared->b ? 1 : 0;
}

static void check_deaf(void)
{
    uint32_t id;
    fake_start(script_deaf, false, 60);
    fake_welcome(0);
    fake_wait_told();
    ask(1, "all");
    const char *text = trace(&id);
    ok(id == 1 && strncmp(text, "none ", 5) == 0 && strstr(text, "blocked"),
       "a blocked signal is named");
    for (uint32_t i = 2; i <= 3; i++) {
        fake_step();
        fake_wait_told();
        ask(i, "all");
        text = trace(&id);
        ok(id == i && strstr(text, "own handler"), "no signal is sent to another handler");
    }
    fake_step();
    fake_end("deaf");
}

static int script_unwatched(void)
{
    rank_wait_step();
    return ddw_stacks(SIGNAL, 0) == EINVAL ? 0 : 1;
}

static void check_unwatched(void)
{
    uint32_t id;
    fake_start(script_unwatched, false, 60);
    fake_welcome(0);
    ask(1, "all");
    ok(strncmp(trace(&id), "none ", 5) == 0 && id == 1, "nothing is watched: none");
    fake_step();
    fake_end("without a handler there is nothing to watch");
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    check_threads();
    check_churn();
    check_deaf();
    check_unwatched();
    return tap_done();
}
