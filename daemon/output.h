/* SPDX-License-Identifier: Apache-2.0 */
/*
 * output.h - the numbered events of a group, and who is reading them.
 *
 * An event is encoded once, as one JSON line, and that line is the journal's, the HTTP body's and
 * the WebSocket message. Events are added, then committed: commit writes the batch to the journal
 * and wakes the subscribers. A subscriber is a cursor into the journal: it can neither stall a rank
 * nor make the daemon hold memory, however slow it is.
 */
#ifndef DDIPD_OUTPUT_H
#define DDIPD_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"
#include "util.h"

struct output;
struct output_sub;

#define OUTPUT_NO_CELL 0u /* cells count from 1; events outside any cell carry null */
#define OUTPUT_NO_RANK (-1)

/* Where an event comes from. */
struct output_origin {
    uint32_t cell;
    int rank;
    uint64_t rank_seq; /* the rank's own number, 0: none */
};

/* The journal is dir/journal.ndjson; dir is made. NULL: *err says why. */
struct output *output_open(const char *dir, const char *group, struct err *err) ERR_MUST_CHECK;
/* No event comes after this; readers get what is there, then the end. Removes the files if asked.
 */
void output_close(struct output *o, bool remove_files);

/* Adds an event. members: the JSON members after the common ones, `"type":"status",...`, no braces.
 * Returns its sequence number. */
uint64_t output_add(struct output *o, struct output_origin from, const char *members, size_t len);

/* Adds text of a stream (fd 1 or 2); text of the same origin is merged until something else comes.
 */
void output_stream(struct output *o, struct output_origin from, int fd, const char *text,
                   size_t len);

/* Writes what was added and wakes subscribers. -1: the journal took nothing, all is kept and the
 * next commit tries again. */
int output_commit(struct output *o, struct err *err) ERR_MUST_CHECK;

uint64_t output_last_seq(const struct output *o);

/* What output_next found out about a line. */
struct output_mark {
    uint64_t seq;
    uint32_t cell;
    int rank;
    char type[32];
};

enum output_status { OUTPUT_LINE, OUTPUT_WAIT, OUTPUT_END };

/*
 * Reads events after sequence number `after`; cell OUTPUT_NO_CELL: of all cells, endless. With a
 * cell, the end comes after its `done`. wake must only schedule: it is called inside output_commit.
 */
struct output_sub *output_subscribe(struct output *o, uint32_t cell, uint64_t after,
                                    void (*wake)(void *ctx), void *ctx);
void output_unsubscribe(struct output_sub *s);

/* OUTPUT_LINE: *line (with its '\n') is borrowed until the next call. */
enum output_status output_next(struct output_sub *s, const char **line, size_t *len,
                               struct output_mark *mark);

#endif
