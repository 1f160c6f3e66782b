/* SPDX-License-Identifier: Apache-2.0 */
/* test_ddipworker.c - libddipworker with a daemon that is there: HELLO, frames both ways, text, and
 * a daemon that is slow. */
#include <sys/eventfd.h>

#include "fake_daemon.h"

/* --- HELLO, WELCOME, numbers --- */

static int script_numbers(void)
{
    if (ddw_start("/elsewhere", "{}", 1) != EALREADY)
        return 1;
    int fd = memfd_create("payload", MFD_CLOEXEC);
    if (write(fd, "value", 5) != 5 || ddw_post(FRAME_STATE, 0, 0, "{\"a\":1}", 7, -1) ||
        ddw_post(FRAME_REPLY, 3, 9, "{}", 2, fd) || fcntl(fd, F_GETFD) < 0)
        return 2;
    close(fd);
    char *large = calloc(1, FRAME_MAX + 1);
    if (ddw_post(FRAME_EVENT, 3, 0, large, FRAME_MAX + 1, -1) != EMSGSIZE)
        return 3;
    free(large);
    if (ddw_post(FRAME_EVENT, 3, 0, "", 0, -1))
        return 4;
    rank_tell();
    ddw_flush(FAKE_WAIT_MS);
    rank_wait_step();
    return 0;
}

static void check_hello(void)
{
    struct stat st;
    ok(fake_accept() && is_frame(&fake.hello, FRAME_HELLO, 0, 0, FAKE_HELLO), "HELLO comes first");
    ok(fstat(fake.pipes[0], &st) == 0 && S_ISFIFO(st.st_mode) && fstat(fake.pipes[1], &st) == 0 &&
           S_ISFIFO(st.st_mode),
       "with the read ends of two pipes");
    ok((fcntl(fake.pipes[0], F_GETFL) & O_NONBLOCK) && fake.counters != MAP_FAILED &&
           fake.counters->taken[0] == 0 && fake.counters->seq == 0,
       "and their counters");
}

static void check_numbers(void)
{
    struct frame f;
    int fds[FRAME_MAX_FDS];
    char text[6] = "";
    fake_start(script_numbers, false, 60);
    check_hello();
    ok(fake_wait_told() && fake_quiet(50), "nothing is sent before WELCOME");
    fake_send(FRAME_WELCOME, 0, 0, NULL);
    ok(fake_frame(&f) && is_frame(&f, FRAME_STATE, 0, 0, "{\"a\":1}") && f.number == 1, "number 1");
    ok(fake_frame_fds(&f, fds, FAKE_WAIT_MS) && is_frame(&f, FRAME_REPLY, 3, 9, "{}") &&
           f.number == 2 && f.nfds == 1,
       "number 2, with a descriptor");
    ok(pread(fds[0], text, 5, 0) == 5 && strcmp(text, "value") == 0, "of the right file");
    close(fds[0]);
    ok(fake_frame(&f) && is_frame(&f, FRAME_EVENT, 3, 0, "") && f.number == 3,
       "number 3; the one that was too long has none");
    fake_step();
    fake_end("numbers");
}

/* --- from the daemon --- */

static int script_inbox(void)
{
    struct ddw_message m;
    int signal_fd = eventfd(0, EFD_CLOEXEC);
    for (uint32_t i = 1; i <= 3; i++) {
        if (ddw_wait(-1, &m) != 1 || m.type != FRAME_EXECUTE || m.cell != i || m.fd != -1 ||
            m.length != 4 || strcmp(m.payload, "code") != 0)
            return 1;
        ddw_message_free(m.handle);
    }
    char text[4] = "";
    if (ddw_wait(signal_fd, &m) != 1 || m.type != FRAME_REQUEST || m.arg != 7 || m.fd < 0 ||
        pread(m.fd, text, 3, 0) != 3 || strcmp(text, "abc") != 0)
        return 2;
    close(m.fd);
    ddw_message_free(m.handle);
    uint64_t one = 1;
    if (write(signal_fd, &one, sizeof(one)) != sizeof(one) || ddw_wait(signal_fd, &m) != 0)
        return 3;
    return 0;
}

static void check_inbox(void)
{
    int fd = memfd_create("payload", MFD_CLOEXEC);
    struct frame request = {.type = FRAME_REQUEST, .nfds = 1, .arg = 7};
    fake_start(script_inbox, false, 60);
    ok(fake_welcome(0), "connected");
    for (uint32_t i = 1; i <= 3; i++)
        fake_send(FRAME_EXECUTE, 0, i, "code");
    ok(write(fd, "abc", 3) == 3 && wire_send(&fake.wire, &request, &fd) == 0, "frames are sent");
    close(fd);
    fake_end("they arrive in order, with payload and descriptor; a signal wakes");
}

/* --- questions beside the cell --- */

#define QUESTIONS_KEPT 8

static int script_questions(void)
{
    struct ddw_message m;
    ddw_begin(1);
    ddw_wait(-1, &m); /* the frame after the questions: they are all there */
    ddw_message_free(m.handle);
    for (uint32_t i = 1; i <= QUESTIONS_KEPT; i++) {
        ddw_wait_question(&m);
        if (m.type != FRAME_QUESTION || m.arg != 3 + i || m.fd != -1 || m.length != 2)
            return (int)i;
        ddw_message_free(m.handle);
    }
    rank_tell();
    ddw_wait_question(&m);
    return m.arg == 99 ? 0 : 20;
}

static void check_questions(void)
{
    int fd = memfd_create("payload", MFD_CLOEXEC);
    fake_start(script_questions, false, 60);
    ok(fake_welcome(0), "connected");
    for (uint32_t i = 1; i <= QUESTIONS_KEPT + 3; i++) {
        struct frame f = {.type = FRAME_QUESTION, .arg = i, .nfds = i == 5, .length = 2};
        f.payload = (const uint8_t *)"{}";
        wire_send(&fake.wire, &f, i == 5 ? &fd : NULL);
    }
    close(fd);
    fake_send(FRAME_EXECUTE, 0, 1, "code");
    ok(fake_wait_told(), "the newest %d questions are kept, whatever the cell is at",
       QUESTIONS_KEPT);
    struct frame last = {.type = FRAME_QUESTION, .arg = 99};
    wire_send(&fake.wire, &last, NULL);
    fake_end("and who waits for the next is woken");
}

/* --- text --- */

static int script_text(void)
{
    ddw_begin(1);
    ddw_stream(1, "line\n", 5);
    ddw_stream(1, "part", 4);
    ddw_stream(2, "error\n", 6);
    ddw_stream(1, "held", 4);
    ddw_stream_flush();
    ddw_stream(1, "bar\r", 4);
    ddw_stream(1, "of cell 1", 9);
    ddw_begin(2);
    ddw_stream(1, "before an event", 15);
    ddw_post(FRAME_EVENT, 2, 0, "{}", 2, -1);
    ddw_stream(1, "", 0);
    ddw_stream(2, "a\nb", 3);
    ddw_end();
    ddw_flush(FAKE_WAIT_MS);
    rank_wait_step();
    return 0;
}

static void check_text(void)
{
    static const struct {
        uint32_t cell, fd;
        const char *text, *name;
    } want[] = {{1, 1, "line\n", "a line goes out at once"},
                {1, 1, "part", "part of one when another stream speaks"},
                {1, 2, "error\n", "stderr"},
                {1, 1, "held", "or when told to"},
                {1, 1, "bar\r", "a carriage return ends a line, too"},
                {1, 1, "of cell 1", "late text stays its cell's"},
                {2, 1, "before an event", "text goes before an event"},
                {2, 0, "{}", "then the event"},
                {2, 2, "a\nb", "several lines at once"}};
    struct frame f;
    fake_start(script_text, false, 60);
    ok(fake_welcome(0), "connected");
    for (size_t i = 0; i < UTIL_COUNT(want); i++)
        ok(fake_frame(&f) && f.number == i + 1 &&
               is_frame(&f, want[i].fd ? FRAME_STREAM : FRAME_EVENT, want[i].cell, want[i].fd,
                        want[i].text),
           "%s", want[i].name);
    fake_step();
    fake_end("text");
}

#define LARGE_PARTS 40000 /* of seven bytes each: one, two and four byte characters */

static int script_large_text(void)
{
    char *text = malloc(LARGE_PARTS * 7);
    for (int i = 0; i < LARGE_PARTS; i++)
        memcpy(text + i * 7, "a\xc3\xa4\xf0\x9f\x98\x80", 7);
    ddw_stream(1, text, LARGE_PARTS * 7);
    free(text);
    ddw_flush(FAKE_WAIT_MS);
    rank_wait_step();
    return 0;
}

static void check_large_text(void)
{
    struct frame f;
    size_t total = 0, cut = 0, frames = 0, wrong = 0;
    static const char part[] = "a\xc3\xa4\xf0\x9f\x98\x80";
    fake_start(script_large_text, false, 60);
    fake_welcome(0);
    while (total < LARGE_PARTS * 7 && fake_frame(&f)) {
        frames++;
        cut += util_utf8_valid((const char *)f.payload, f.length) != f.length;
        for (uint32_t i = 0; i < f.length; i++)
            wrong += f.payload[i] != (uint8_t)part[(total + i) % 7];
        total += f.length;
    }
    ok(total == LARGE_PARTS * 7 && wrong == 0, "280 kB without a line end arrive as they were");
    ok(frames >= 4 && cut == 0, "in pieces that cut no character");
    fake_step();
    fake_end("large text");
}

/* --- an unfinished line --- */

#define HELD_ROUNDS 20

static int script_held(void)
{
    for (int i = 0; i < HELD_ROUNDS; i++) {
        rank_wait_step();
        shared->ns = util_monotonic_ns();
        ddw_stream(1, "x", 1);
    }
    rank_wait_step();
    return 0;
}

static void check_held(void)
{
    struct frame f;
    double soonest = 1e9, latest = 0;
    int quick = 0;
    fake_start(script_held, false, 60);
    fake_welcome(0);
    for (int i = 0; i < HELD_ROUNDS; i++) {
        usleep(i % 3 * 7000); /* also while the thread still looks every 10 ms */
        fake_step();
        if (!fake_frame(&f))
            break;
        double ms = (double)(util_monotonic_ns() - shared->ns) / 1e6;
        soonest = ms < soonest ? ms : soonest;
        latest = ms > latest ? ms : latest;
        quick += ms < 25;
    }
    ok(soonest > 8, "an unfinished line waits for its end (%.1f ms)", soonest);
    ok(quick >= HELD_ROUNDS / 2, "about 10 ms (%d of %d; %.1f ms at most)", quick, HELD_ROUNDS,
       latest);
    ok(latest < 2000, "and never long");
    fake_step();
    fake_end("an unfinished line");
}

/* --- a slow daemon --- */

static int script_slow(void)
{
    char *megabyte = calloc(1, 1 << 20);
    struct ddw_message m;
    ddw_wait(-1, &m); /* the bound is another one before WELCOME */
    ddw_message_free(m.handle);
    for (int i = 0; i < 20; i++) {
        if (ddw_post(FRAME_EVENT, 1, 0, megabyte, 1 << 20, -1))
            return 1;
        shared->a++;
    }
    free(megabyte);
    uint64_t start = util_monotonic_ns();
    ddw_flush(100);
    shared->ns = util_monotonic_ns() - start;
    rank_tell();
    ddw_flush(FAKE_WAIT_MS);
    rank_wait_step();
    return 0;
}

static void check_slow(void)
{
    struct frame f;
    uint64_t got = 0;
    fake_start(script_slow, false, 60);
    fake_welcome(0);
    fake_send(FRAME_EXECUTE, 0, 1, "go");
    while (got < 9 && fake_frame_fds(&f, NULL, 300))
        got++;
    ok(got == 7 && shared->a == 7, "8 MiB are not acknowledged: the sender waits (%d)", (int)got);
    while (got < 14 && fake.seen == got) {
        fake_send(FRAME_ACK, fake.seen, 0, NULL);
        got += fake_frame(&f);
    }
    ok(got == 14, "acknowledged, it goes on");
    fake_send(FRAME_ACK, fake.seen, 0, NULL);
    ok(fake_wait_told() && shared->a == 20, "what is left fits");
    ok(shared->ns > 90e6 && shared->ns < 5e9, "a flush gives up after its time (%d ms)",
       (int)(shared->ns / 1000000));
    while (got < 20 && fake_frame(&f))
        got += f.number == got + 1 && f.length == 1 << 20;
    ok(got == 20, "all arrive, none twice");
    fake_step();
    fake_end("a slow daemon");
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    check_numbers();
    check_inbox();
    check_questions();
    check_text();
    check_large_text();
    check_held();
    check_slow();
    return tap_done();
}
