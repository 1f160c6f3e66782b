/* SPDX-License-Identifier: Apache-2.0 */
/* test_pipe.c - pipe.c: text stays in the pipe until it is in the journal; a second daemon and the
 * rank's library neither repeat nor lose any. */
#include "pipe.h"

#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "tap.h"

#define STDOUT 1

static struct pipe_tools tools;
static struct frame_pipes shared;
static int ends[2];

static void put(const char *text)
{
    if (write(ends[1], text, strlen(text)) != (ssize_t)strlen(text))
        abort();
}

static int inside(void)
{
    int n = -1;
    ioctl(ends[0], FIONREAD, &n);
    return n;
}

/* What a daemon does with what it holds; len 0: all. */
static const char *deliver(struct pipe *p, size_t len)
{
    static char text[64];
    len = len ? len : p->held.len;
    snprintf(text, sizeof(text), "%.*s", (int)len, (const char *)p->held.data);
    pipe_delivered(p, len);
    return text;
}

static struct pipe fresh(uint64_t at)
{
    struct pipe p = {.fd = ends[0], .got = at};
    pipe_resume(&p, at, &shared, STDOUT);
    return p;
}

static void reset(void)
{
    memset(&shared, 0, sizeof(shared));
    if (pipe(ends) < 0)
        abort();
}

static void end(void)
{
    close(ends[0]);
    close(ends[1]);
}

static void check_look(void)
{
    reset();
    struct pipe p = fresh(0);
    ok(pipe_look(&p, &tools, 1000) == PIPE_EMPTY, "nothing there");
    put("abc");
    ok(pipe_look(&p, &tools, 1000) == PIPE_MORE && inside() == 3, "looking takes nothing out");
    ok(pipe_look(&p, &tools, 1000) == PIPE_EMPTY, "nor gives the same again");
    put("def");
    ok(pipe_look(&p, &tools, 1000) == PIPE_MORE, "what was added is seen");
    is_str(deliver(&p, 4), "abcd", "delivered");
    pipe_take(&p, &tools, &shared, STDOUT);
    ok(inside() == 0 && shared.taken[0] == 6 && shared.carry[0].len == 2,
       "a short rest waits in the shared memory, or the pipe would stay readable");
    is_str(deliver(&p, 0), "ef", "and is still held");
    put("0123456789");
    pipe_look(&p, &tools, 1000);
    deliver(&p, 3);
    pipe_take(&p, &tools, &shared, STDOUT);
    ok(inside() == 7 && shared.taken[0] == 9, "a longer rest stays in the pipe");
    ok(shared.seq % 2 == 0, "the counters are not left locked");
    close(ends[1]);
    ok(pipe_look(&p, &tools, 1000) == PIPE_EMPTY, "known bytes are not the end");
    deliver(&p, 0);
    pipe_take(&p, &tools, &shared, STDOUT);
    ok(pipe_look(&p, &tools, 1000) == PIPE_END, "but then it is");
    buf_deinit(&p.held);
    close(ends[0]);
}

static void check_killed_before_commit(void)
{
    reset();
    struct pipe p = fresh(0);
    put("told ");
    pipe_look(&p, &tools, 1000);
    deliver(&p, 0);
    pipe_take(&p, &tools, &shared, STDOUT);
    put("not told");
    pipe_look(&p, &tools, 1000);
    deliver(&p, 0); /* the journal never got it */
    struct pipe q = fresh(5);
    ok(pipe_look(&q, &tools, 1000) == PIPE_MORE, "the next daemon finds it");
    is_str(deliver(&q, 0), "not told", "all of it");
    buf_deinit(&p.held);
    buf_deinit(&q.held);
    end();
}

static void check_killed_after_commit(void)
{
    reset();
    struct pipe p = fresh(0);
    put("told and more");
    pipe_look(&p, &tools, 1000);
    deliver(&p, 5); /* journalled, and killed before pipe_take */
    struct pipe q = fresh(5);
    pipe_look(&q, &tools, 1000);
    is_str(deliver(&q, 0), "and more", "what the journal has is not told again");
    pipe_take(&q, &tools, &shared, STDOUT);
    ok(inside() == 0 && shared.taken[0] == 13, "and is taken out");
    buf_deinit(&p.held);
    buf_deinit(&q.held);
    end();
}

static void check_character(void)
{
    reset();
    struct pipe p = fresh(0);
    put("x\xe2\x82");
    pipe_look(&p, &tools, 1000);
    deliver(&p, 1);
    pipe_take(&p, &tools, &shared, STDOUT);
    ok(inside() == 0, "half a character is not left in the pipe");
    struct pipe q = fresh(1);
    put("\xac!");
    pipe_look(&q, &tools, 1000);
    is_str(deliver(&q, 0), "\xe2\x82\xac!", "the next daemon puts it together");
    buf_deinit(&p.held);
    buf_deinit(&q.held);
    end();
}

/* The library reads like this while no daemon is there. */
static void library_takes(size_t n)
{
    char drop[64];
    ssize_t got = read(ends[0], drop, n);
    shared.taken[0] += got > 0 ? (uint64_t)got : 0;
}

static void check_library(void)
{
    reset();
    struct pipe p = fresh(0);
    put("12345678");
    library_takes(6);
    pipe_resume(&p, 3, &shared, STDOUT); /* the journal has 123; the library's frame says 1-6 */
    ok(pipe_look(&p, &tools, 1000) == PIPE_EMPTY, "the pipe waits for frames that come before");
    ok(pipe_add(&p, 6, (const uint8_t *)"123456", 6) == 0, "a frame of which half is known");
    is_str(deliver(&p, 0), "456", "gives the other half");
    ok(pipe_add(&p, 6, (const uint8_t *)"123456", 6) == 0 && p.held.len == 0, "again: nothing");
    pipe_look(&p, &tools, 1000);
    is_str(deliver(&p, 0), "78", "then the pipe goes on");
    ok(pipe_add(&p, 13, (const uint8_t *)"abc", 3) == 2, "two bytes before a frame are gone");
    is_str(deliver(&p, 0), "abc", "which is told, and the frame given");
    ok(pipe_skip(&p, 20) == 7 && pipe_skip(&p, 20) == 0 && pipe_at(&p) == 20, "a gap is skipped");
    buf_deinit(&p.held);
    end();
}

static void check_wrap(void)
{
    reset();
    uint64_t far = (1ull << 32) - 2;
    struct pipe p = {.fd = -1, .got = far, .taken = far};
    ok(pipe_add(&p, 3, (const uint8_t *)"hello", 5) == 0 && p.got == far + 5,
       "positions in frames go round after 4 GiB");
    is_str(deliver(&p, 0), "hello", "without a trace");
    buf_deinit(&p.held);
    end();
}

int main(void)
{
    struct err err = ERR_INIT;
    if (pipe_tools_open(&tools, &err) < 0)
        return 1;
    check_look();
    check_killed_before_commit();
    check_killed_after_commit();
    check_character();
    check_library();
    check_wrap();
    pipe_tools_close(&tools);
    return tap_done();
}
