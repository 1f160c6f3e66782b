/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trace.c - what Python's faulthandler writes about threads, line by line.
 *
 * File names may hold anything, quotes too, so a frame is read from its right end. The name of a
 * cell's code is made by ddip_worker/shell.py.
 */
#include "trace.h"

#include <stdbool.h>
#include <string.h>

static bool trace_skip(struct trace_text *t, const char *what)
{
    size_t n = strlen(what);
    if (t->len < n || memcmp(t->at, what, n) != 0)
        return false;
    t->at += n;
    t->len -= n;
    return true;
}

/* Digits of base 10 or 16 at the start; false: there are none, or too many. */
static bool trace_number(struct trace_text *t, unsigned base, uint64_t max, uint64_t *out)
{
    static const char digits[] = "0123456789abcdef";
    size_t n = 0;
    *out = 0;
    for (; n < t->len; n++) {
        const char *d = memchr(digits, t->at[n], base);
        if (!d)
            break;
        *out = *out * base + (uint64_t)(d - digits);
        if (*out > max || n > 16)
            return false;
    }
    t->at += n;
    t->len -= n;
    return n > 0;
}

/* Where `what` is for the last time; NULL: nowhere. */
static const char *trace_last(struct trace_text t, const char *what)
{
    size_t n = strlen(what);
    for (size_t i = t.len; i >= n; i--) {
        if (memcmp(t.at + i - n, what, n) == 0)
            return t.at + i - n;
    }
    return NULL;
}

/* "<ipython-input-3-7-HASH>": In[3], cell 7; without the middle number it is no cell of ours. */
static void trace_cell(struct trace_line *l)
{
    struct trace_text t = l->file;
    uint64_t execution, cell;
    if (!trace_skip(&t, "<ipython-input-") || !trace_number(&t, 10, UINT32_MAX, &execution) ||
        !trace_skip(&t, "-"))
        return;
    l->execution = (uint32_t)execution;
    if (trace_number(&t, 10, UINT32_MAX, &cell) && trace_skip(&t, "-"))
        l->cell = (uint32_t)cell;
}

static enum trace_kind trace_frame(struct trace_text t, struct trace_line *l)
{
    static const char middle[] = "\", line ", in[] = " in ";
    const char *at = trace_last(t, middle);
    uint64_t number;
    if (!at)
        return TRACE_OTHER;
    l->file = (struct trace_text){t.at, (size_t)(at - t.at)};
    at += sizeof(middle) - 1;
    struct trace_text after = {at, (size_t)(t.at + t.len - at)};
    if (trace_number(&after, 10, INT32_MAX, &number))
        l->line = (int64_t)number;
    else
        trace_skip(&after, "???");
    if (!trace_skip(&after, in))
        return TRACE_OTHER;
    l->function = after;
    trace_cell(l);
    return TRACE_FRAME;
}

static enum trace_kind trace_thread(struct trace_text t, struct trace_line *l)
{
    if (!trace_number(&t, 16, UINT64_MAX / 16, &l->thread))
        return TRACE_OTHER;
    const char *end = trace_last(t, " (most recent call first):");
    if (end && trace_skip(&t, " [") && end > t.at && end[-1] == ']')
        l->name = (struct trace_text){t.at, (size_t)(end - 1 - t.at)};
    return TRACE_THREAD;
}

enum trace_kind trace_next(struct trace_text *rest, struct trace_line *l)
{
    *l = (struct trace_line){0};
    trace_skip(rest, "Stack (most recent call first):\n");
    if (!rest->len)
        return TRACE_END;
    const char *end = memchr(rest->at, '\n', rest->len);
    size_t len = end ? (size_t)(end - rest->at) : rest->len;
    l->text = (struct trace_text){rest->at, len};
    rest->at += len + (end != NULL);
    rest->len -= len + (end != NULL);
    struct trace_text t = l->text;
    if (trace_skip(&t, "Thread 0x"))
        return trace_thread(t, l);
    if (trace_skip(&t, "  File \""))
        return trace_frame(t, l);
    return TRACE_OTHER;
}
