/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trace.h - what Python's faulthandler writes about threads, line by line. Pure: borrows the text.
 *
 *   Thread 0x00007f21c8b5f740 [MainThread] (most recent call first):
 *   Stack (most recent call first):
 *     File "<ipython-input-3-7-0c2b4b2b2d2a>", line 4 in <module>
 *
 * The first line of a thread is the worker library's, the others are faulthandler's.
 */
#ifndef DDIPD_TRACE_H
#define DDIPD_TRACE_H

#include <stddef.h>
#include <stdint.h>

enum trace_kind {
    TRACE_END,
    TRACE_THREAD, /* thread, name */
    TRACE_FRAME,  /* file, line, function; innermost first */
    TRACE_OTHER,  /* something else, faulthandler's remark on a thread perhaps */
};

struct trace_text {
    const char *at;
    size_t len;
};

struct trace_line {
    struct trace_text text; /* the whole line, without its end */
    uint64_t thread;
    struct trace_text name;
    struct trace_text file, function;
    int64_t line;       /* 0: not known */
    uint32_t execution; /* N of a cell's "Cell In[N]"; 0: no code of a cell */
    uint32_t cell;      /* number of the cell here; 0: not known */
};

/* Takes the next line off *rest. */
enum trace_kind trace_next(struct trace_text *rest, struct trace_line *l);

#endif
