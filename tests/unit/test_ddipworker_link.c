/* SPDX-License-Identifier: Apache-2.0 */
/* test_ddipworker_link.c - libddipworker while daemons come and go: nothing is lost or doubled,
 * what had to be dropped is counted, and fd 1 never blocks. */
#include "fake_daemon.h"

/* --- 100 reconnections --- */

#define RECONNECTS 100

/* Numbered lines and events, as long as the test wants them. */
static int script_chatter(void)
{
    char text[64];
    uint32_t seed = 1;
    while (!shared->b) {
        unsigned long long i = ++shared->a;
        int n = snprintf(text, sizeof(text), "%llu\n", i);
        if (i % 5 == 0)
            ddw_post(FRAME_EVENT, 1, 0, text, (uint64_t)n, -1);
        else
            ddw_stream(1 + i % 2, text, (uint64_t)n);
        seed = seed * 1664525u + 1013904223u;
        if ((seed >> 16) % 8 == 0)
            usleep(seed >> 25);
    }
    ddw_post(FRAME_DONE, 1, 0, "{}", 2, -1);
    ddw_flush(FAKE_WAIT_MS);
    rank_wait_step();
    return 0;
}

struct chatter {
    uint64_t next;  /* the line that must come next */
    uint64_t acked; /* as the rank was told */
    uint32_t wrong, doubled, connections;
    bool done;
};

/* A frame seen already is skipped; a new one's lines follow those before. */
static void hear(struct chatter *c, const struct frame *f, uint64_t seen)
{
    if (f->number <= seen) {
        c->doubled++;
        fake.seen = seen;
        return;
    }
    c->done = f->type == FRAME_DONE;
    const char *p = (const char *)f->payload, *end = p + f->length;
    while (p < end && !c->done) {
        c->wrong += strtoull(p, NULL, 10) != c->next++;
        p = (const char *)memchr(p, '\n', (size_t)(end - p)) + 1;
    }
}

/* One connection: a random number of frames, some acknowledged; then it is cut somewhere. */
static void converse(struct chatter *c, unsigned *seed, int frames)
{
    struct frame f;
    uint64_t seen = fake.seen;
    uint64_t expect = rand_r(seed) % 2 ? c->acked : seen; /* some daemons have forgotten a little */
    c->connections += fake_welcome(expect);
    c->acked = expect; /* WELCOME acknowledges as well */
    c->wrong += fake.hello.number < seen;
    while (frames-- && !c->done && fake_frame(&f)) {
        c->wrong += f.number != ++expect;
        hear(c, &f, seen);
        seen = fake.seen;
        if (rand_r(seed) % 4 == 0) {
            c->acked = f.number; /* never what this connection has not brought */
            fake_send(FRAME_ACK, c->acked, 0, NULL);
        }
    }
    if (!c->done)
        fake_drop();
}

static void check_reconnect(void)
{
    struct chatter c = {.next = 1};
    unsigned seed = 42;
    fake_start(script_chatter, false, 60);
    for (int i = 0; i < RECONNECTS; i++)
        converse(&c, &seed, rand_r(&seed) % 60);
    shared->b = 1;
    converse(&c, &seed, 1 << 30);
    ok(c.connections == RECONNECTS + 1, "%d reconnections", (int)c.connections);
    ok(c.wrong == 0, "frames come in order, from the first that was asked for (%u wrong)", c.wrong);
    ok(c.done && c.next == shared->a + 1, "%d lines, none lost, none twice", (int)shared->a);
    ok(c.doubled > 0, "frames without acknowledgement were sent again (%u)", c.doubled);
    fake_step();
    fake_end("reconnections");
}

/* --- without a daemon --- */

/* The rank's own reading keeps fd 1 from blocking. */
static int script_alone(void)
{
    char line[16];
    ddw_begin(5);
    for (int i = 0; i < 50000; i++) {
        snprintf(line, sizeof(line), "%06d\n", i);
        if (write(1, line, 7) != 7)
            return 1;
    }
    rank_tell();
    rank_wait_step();
    ddw_flush(FAKE_WAIT_MS);
    rank_wait_step();
    return 0;
}

static void check_alone(void)
{
    struct frame f;
    struct buf text = BUF_INIT;
    uint32_t wrong = 0;
    fake_start(script_alone, true, 60);
    ok(fake_wait_told(), "350 kB are written to fd 1 while there is no daemon");
    fake_listen();
    ok(fake_welcome(0), "a daemon comes");
    while (text.len < 350000 && fake_frame_fds(&f, NULL, 2000)) {
        wrong += f.type != FRAME_STREAM || f.cell != 5 || f.arg != 1;
        buf_add(&text, f.payload, f.length);
    }
    /* what the rank had not read when the daemon came is in the pipe */
    while (text.len < 350000) {
        const char *rest = fake_pipe_text(0, 1);
        if (!*rest)
            break;
        buf_adds(&text, rest);
    }
    bool good = text.len == 350000;
    for (int i = 0; i < 50000 && good; i++)
        good = atoi((char *)text.data + 7 * i) == i;
    ok(good && wrong == 0, "and gets all of it, in order, as text of the cell (%zu bytes)",
       text.len);
    ok(fake.counters->taken[0] == 350000, "the counters know");
    buf_deinit(&text);
    fake_step();
    fake_step();
    fake_end("alone");
}

/* --- more than is kept --- */

static int script_gap(void)
{
    char *megabyte = calloc(1, 1 << 20);
    ddw_begin(6);
    for (int i = 0; i < 100; i++)
        ddw_post(FRAME_EVENT, 6, 0, megabyte, 1 << 20, -1);
    ddw_stream(1, megabyte, 1 << 20);
    ddw_stream_flush();
    ddw_post(FRAME_DONE, 6, 0, megabyte, 1 << 20, -1);
    free(megabyte);
    rank_tell();
    ddw_flush(FAKE_WAIT_MS);
    rank_wait_step();
    return 0;
}

static void check_gap(void)
{
    struct frame f = {0};
    uint64_t events = 0, text = 0, gaps = 0, numbers = 0;
    unsigned long long dropped = 0, bytes = 0;
    fake_start(script_gap, true, 60);
    ok(fake_wait_told(), "100 MB of events do not block a rank that is alone");
    fake_listen();
    fake_welcome(0);
    while (f.type != FRAME_DONE && fake_frame(&f)) {
        numbers += f.number == numbers + 1;
        events += f.type == FRAME_EVENT && f.length == 1 << 20;
        text += f.type == FRAME_STREAM ? f.length : 0;
        if (f.type == FRAME_GAP) {
            char json[128];
            snprintf(json, sizeof(json), "%.*s", (int)f.length, (const char *)f.payload);
            unsigned long long more = 0, more_bytes = 0;
            gaps += sscanf(json, "{\"dropped_events\":%llu,\"dropped_bytes\":%llu}", &more,
                           &more_bytes) == 2 &&
                    f.cell == 6;
            dropped += more;
            bytes += more_bytes;
        }
    }
    ok(events == 63, "64 MiB of them are kept (%d)", (int)events);
    ok(gaps >= 1 && f.type == FRAME_DONE && f.length == 1 << 20,
       "then it says what is missing, and the end of the cell is never dropped");
    ok(numbers == f.number, "numbers have no gap");
    ok(dropped + events + text / 65536 == 116 && bytes + (events << 20) + text == 101u << 20,
       "what came and what is missing is all there was (%llu bytes)", bytes);
    fake_step();
    fake_end("the bound");
}

/* --- a daemon that never comes back, or sends us away --- */

static int script_orphan(void)
{
    struct ddw_message m;
    uint64_t start = util_monotonic_ns();
    if (ddw_wait(-1, &m) != 1 || m.type != FRAME_EXIT)
        return 1;
    shared->ns = util_monotonic_ns() - start;
    ddw_message_free(m.handle);
    return 0;
}

static void check_orphan(void)
{
    fake_start(script_orphan, true, 1);
    fake_end("a rank without a daemon is told to exit");
    ok(shared->ns > 0.9e9 && shared->ns < 5e9, "after the time it was given (%d ms)",
       (int)(shared->ns / 1000000));
    fake_start(script_orphan, false, 1);
    fake_welcome(0);
    usleep(300000);
    fake_drop();
    fake_deafen();
    fake_end("one that lost its daemon, too");
    ok(shared->ns > 1.1e9, "counted from the loss");
}

static int script_refused(void)
{
    ddw_stream(1, "x\n", 2);
    rank_wait_step();
    ddw_flush(FAKE_WAIT_MS);
    rank_wait_step();
    return 0;
}

static void check_refused(void)
{
    struct frame f;
    int tries = 0;
    fake_start(script_refused, false, 60);
    uint64_t end = util_monotonic_ns() + 1000000000u;
    for (uint64_t now; (now = util_monotonic_ns()) < end;) {
        struct pollfd p = {.fd = fake.listener, .events = POLLIN};
        if (poll(&p, 1, (int)((end - now) / 1000000) + 1) == 1)
            tries += fake_accept();
        fake_drop();
    }
    ok(tries >= 2 && tries <= 12, "a rank that is sent away tries a few times a second (%d)",
       tries);
    ok(fake_welcome(0) && fake_frame(&f) && is_frame(&f, FRAME_STREAM, 0, 1, "x\n"),
       "and once it is let in, nothing is lost");
    fake_step();
    fake_step();
    fake_end("refused");
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    check_reconnect();
    check_alone();
    check_gap();
    check_orphan();
    check_refused();
    return tap_done();
}
