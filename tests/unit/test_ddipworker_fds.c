/* SPDX-License-Identifier: Apache-2.0 */
/* test_ddipworker_fds.c - libddipworker: what is written to fd 1 and 2, and forked children. */
#include <pthread.h>

#include "fake_daemon.h"

/* --- fd 1 and 2 --- */

static int script_positions(void)
{
    uint32_t seed = 7;
    for (uint32_t i = 0; i < 3000; i++) {
        char bytes[600];
        memset(bytes, 'x', sizeof(bytes));
        seed = seed * 1664525u + 1013904223u;
        size_t n = (seed >> 16) % sizeof(bytes);
        int which = seed >> 31;
        if (write(which + 1, bytes, n) != (ssize_t)n)
            return 1;
        if (which == 0)
            shared->a += n;
        else
            shared->b += n;
        char json[64];
        int len = snprintf(json, sizeof(json), "%llu %llu", (unsigned long long)shared->a,
                           (unsigned long long)shared->b);
        ddw_post(FRAME_EVENT, 1, 0, json, (uint64_t)len, -1);
    }
    ddw_flush(FAKE_WAIT_MS);
    rank_wait_step();
    return 0;
}

static _Atomic bool reader_stop;

static void *read_pipes(void *unused)
{
    char bytes[1000];
    (void)unused;
    while (!reader_stop) {
        if (fake_read_pipe(0, bytes, sizeof(bytes)) <= 0 &&
            fake_read_pipe(1, bytes, sizeof(bytes)) <= 0)
            usleep(20);
    }
    return NULL;
}

static void check_positions(void)
{
    struct frame f;
    pthread_t reader;
    uint32_t wrong = 0, got = 0;
    fake_start(script_positions, false, 60);
    fake_accept();
    fake.counters->taken[0] = 0xffffff00u; /* so that it passes 2^32 */
    reader_stop = false;
    pthread_create(&reader, NULL, read_pipes, NULL);
    fake_send(FRAME_WELCOME, 0, 0, NULL);
    /* frames made before that count from 0 */
    for (; got < 3000 && fake_frame(&f); got++) {
        char text[64];
        unsigned long long out = 0, err = 0;
        snprintf(text, sizeof(text), "%.*s", (int)f.length, (const char *)f.payload);
        sscanf(text, "%llu %llu", &out, &err);
        bool good = f.err == (uint32_t)err && (f.out == (uint32_t)(out + 0xffffff00u) ||
                                               (f.out == (uint32_t)out && out < 65536));
        wrong += !good;
        fake_send(FRAME_ACK, f.number, 0, NULL);
    }
    ok(got == 3000 && wrong == 0,
       "3000 frames say how much was written to fd 1 and 2 before them, "
       "while another thread reads (%u wrong)",
       wrong);
    reader_stop = true;
    pthread_join(reader, NULL);
    fake_step();
    fake_end("positions");
}

/* --- forked children --- */

static int forked_child(void)
{
    if (ddw_post(FRAME_EVENT, 1, 0, "{}", 2, -1) != EPIPE)
        return 1;
    ddw_stream(1, "child out\n", 10);
    ddw_stream(2, "child err\n", 10);
    printf("child printf\n");
    ddw_stream_flush();
    ddw_flush(1000);
    return 0;
}

static _Atomic bool talker_stop;

static void *talk(void *unused)
{
    (void)unused;
    while (!talker_stop)
        ddw_stream(1, "talk\n", 5);
    return NULL;
}

static int script_fork(void)
{
    int status = -1;
    pid_t pid = fork();
    if (pid == 0)
        _exit(forked_child());
    waitpid(pid, &status, 0);
    ddw_stream(1, "parent\n", 7);
    rank_wait_step();
    pthread_t talker;
    pthread_create(&talker, NULL, talk, NULL);
    for (int i = 0; i < 100 && status == 0; i++) {
        pid = fork();
        if (pid == 0) {
            alarm(10);
            ddw_stream(2, "", 0);
            _exit(0);
        }
        waitpid(pid, &status, 0);
    }
    talker_stop = true;
    pthread_join(talker, NULL);
    ddw_post(FRAME_DONE, 1, 0, "{}", 2, -1);
    ddw_flush(FAKE_WAIT_MS);
    rank_wait_step();
    return status;
}

static void check_fork(void)
{
    struct frame f;
    fake_start(script_fork, false, 60);
    fake_welcome(0);
    is_str(fake_pipe_text(0, 23), "child out\nchild printf\n", "a child writes to fd 1");
    is_str(fake_pipe_text(1, 10), "child err\n", "and to fd 2");
    ok(fake_frame(&f) && is_frame(&f, FRAME_STREAM, 0, 1, "parent\n") && f.number == 1,
       "the rank itself still speaks through its connection");
    fake_step();
    uint64_t number = 1;
    do {
        if (!fake_frame(&f) || f.number != ++number)
            break;
        fake_send(FRAME_ACK, f.number, 0, NULL);
    } while (f.type != FRAME_DONE);
    ok(f.type == FRAME_DONE, "100 forks beside a thread that prints do no harm");
    fake_step();
    fake_end("forks");
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    check_positions();
    check_fork();
    return tap_done();
}
