/* SPDX-License-Identifier: Apache-2.0 */
/*
 * line.h - an event as one JSON line: its common members, written and read back without parsing.
 *
 *   {"seq":7,"group":"default","cell":3,"rank":0,"type":"stream",...,"time":1764518400.123456,
 *    "rank_seq":12}
 *
 * The order is fixed, and the journal's files start with a line that is no event: {"head":{...}}.
 */
#ifndef DDIPD_LINE_H
#define DDIPD_LINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "util.h"

#define OUTPUT_NO_CELL 0u /* cells count from 1; events outside any cell carry null */
#define OUTPUT_NO_RANK (-1)

/* Where an event comes from. */
struct output_origin {
    uint32_t cell;
    int rank;
    uint64_t rank_seq; /* the rank's own number, 0: none */
    uint64_t pipe_end; /* text read from fd 1 or 2: the pipe's position after it, 0: none */
};

/* What can be told about a line without parsing it. */
struct output_mark {
    uint64_t seq;
    uint32_t cell;
    int rank;
    char type[32];
};

/* members: the JSON members after the common ones, `"type":"status",...`, no braces. */
void line_write(struct buf *out, uint64_t seq, const char *group, struct output_origin from,
                const char *members, size_t len);

/* False: the line is a file's head. */
bool line_mark(const char *line, size_t len, size_t group_len, struct output_mark *m);

/* The members at the line's end, 0 where they are not there; fd: 1 or 2 of a stream event. */
void line_origin(const char *line, size_t len, const struct output_mark *m,
                 struct output_origin *from, int *fd);

#endif
