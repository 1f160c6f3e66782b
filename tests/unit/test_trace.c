/* SPDX-License-Identifier: Apache-2.0 */
/* test_trace.c - faulthandler's text, line by line, and bytes that are none. */
#include "trace.h"

#include <stdbool.h>
#include <stdlib.h>

#include "tap.h"
#include "util.h"

static struct trace_text text_of(const char *s)
{
    return (struct trace_text){s, strlen(s)};
}

static bool same(struct trace_text t, const char *want)
{
    return t.len == strlen(want) && memcmp(t.at, want, t.len) == 0;
}

static void check_threads(void)
{
    struct trace_text rest = text_of("Thread 0x00007f21c8b5f740 [MainThread] (most recent call "
                                     "first):\nStack (most recent call first):\n"
                                     "  File \"/x/a.py\", line 12 in f\n"
                                     "\nThread 0xff [a [b] c] (most recent call first):\n"
                                     "  <no Python frame>");
    struct trace_line l;
    ok(trace_next(&rest, &l) == TRACE_THREAD && l.thread == 0x7f21c8b5f740 &&
           same(l.name, "MainThread"),
       "a thread has an id and a name");
    ok(trace_next(&rest, &l) == TRACE_FRAME && same(l.file, "/x/a.py") && l.line == 12 &&
           same(l.function, "f") && !l.execution && !l.cell,
       "then comes a frame; faulthandler's own head is left out");
    ok(trace_next(&rest, &l) == TRACE_OTHER && l.text.len == 0, "an empty line");
    ok(trace_next(&rest, &l) == TRACE_THREAD && l.thread == 255 && same(l.name, "a [b] c"),
       "a name may have brackets");
    ok(trace_next(&rest, &l) == TRACE_OTHER && same(l.text, "  <no Python frame>"),
       "a remark is kept as it is, without an end of line too");
    ok(trace_next(&rest, &l) == TRACE_END && trace_next(&rest, &l) == TRACE_END, "the end stays");
}

static struct trace_line frame_of(const char *s)
{
    struct trace_text rest = text_of(s);
    struct trace_line l;
    if (trace_next(&rest, &l) != TRACE_FRAME)
        l = (struct trace_line){.line = -1};
    return l;
}

static void check_frames(void)
{
    struct trace_line l =
        frame_of("  File \"<ipython-input-3-7-0c2b4b2b2d2a>\", line 4 in <module>");
    ok(l.execution == 3 && l.cell == 7 && l.line == 4 && same(l.function, "<module>"),
       "the code of a cell says which one");
    l = frame_of("  File \"<ipython-input-12-345678901234>\", line 1 in g");
    ok(l.execution == 12 && l.cell == 0, "a hash of digits is no number of a cell");
    l = frame_of("  File \"<ipython-input-4294967296-7-0c>\", line 1 in g");
    ok(l.line == 1 && l.execution == 0 && l.cell == 0, "a number that is too large is none");
    l = frame_of("  File \"a\", line 1 in x\", line 23 in f in g");
    ok(same(l.file, "a\", line 1 in x") && l.line == 23 && same(l.function, "f in g"),
       "a file's name may look like a frame");
    l = frame_of("  File \"a.py\", line ??? in f");
    ok(l.line == 0 && same(l.function, "f"), "a line may be unknown");
    ok(frame_of("  File \"a.py\", line 99999999999 in f").line == -1, "but not beyond all bounds");
    ok(frame_of("  File \"a.py\", line 3").line == -1, "without a function it is no frame");
    ok(frame_of("  File \"a.py").line == -1, "nor when it is cut");
}

/* Pieces of what is parsed, shuffled: every line ends, inside the text. */
static void check_noise(void)
{
    static const char *const parts[] = {"Thread 0x",
                                        "  File \"",
                                        "\", line ",
                                        " in ",
                                        "\n",
                                        "12",
                                        "<ipython-input-",
                                        "-",
                                        "(most recent call first):",
                                        "[",
                                        "]",
                                        "Stack (most recent call first):\n",
                                        "ff",
                                        " ",
                                        ">"};
    unsigned seed = 7;
    bool good = true;
    for (int i = 0; i < 20000 && good; i++) {
        struct buf b = BUF_INIT;
        for (int n = rand_r(&seed) % 30; n > 0; n--)
            buf_adds(&b, parts[(size_t)rand_r(&seed) % UTIL_COUNT(parts)]);
        char *exact = util_malloc(b.len + 1); /* a sanitizer sees one byte too far */
        memcpy(exact, b.len ? (const char *)b.data : "", b.len);
        struct trace_text rest = {exact, b.len};
        struct trace_line l;
        size_t left = rest.len + 1;
        enum trace_kind kind;
        while ((kind = trace_next(&rest, &l)) != TRACE_END && good) {
            good = rest.len < left && l.text.at >= exact &&
                   l.text.at + l.text.len <= exact + b.len && l.file.len <= l.text.len &&
                   l.function.len <= l.text.len;
            left = rest.len;
        }
        free(exact);
        buf_deinit(&b);
    }
    ok(good, "20000 shuffled texts: each line is inside, and the end comes");
}

int main(void)
{
    check_threads();
    check_frames();
    check_noise();
    return tap_done();
}
