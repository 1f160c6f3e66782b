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
#include "json.h"
#include "line.h"
#include "util.h"

struct output;
struct output_sub;

/* How far a rank's events are in the journal: its own numbers, and positions in its pipes. */
struct output_rank {
    uint64_t rank_seq;
    uint64_t pipe_end[2];
};

/* What output asks the group. */
struct output_owner {
    /* Members of an object: what a later daemon needs of all that came before. Every further file
     * of the journal starts with it, since earlier ones may be gone by then. */
    void (*head)(void *ctx, struct jw *w);
    /* Number of the cell's last event; UINT64_MAX: not done yet, 0: long gone. */
    uint64_t (*cell_last)(void *ctx, uint32_t cell);
};

/* What output_replay finds, in order. */
struct output_replay {
    void (*head)(void *ctx, const json *state); /* first of all, if the oldest events are gone */
    void (*event)(void *ctx, const struct output_mark *m, const char *line, size_t len);
};

/* The journal is the folder dir/journal; both are made. limit: bytes kept. NULL: *err says why. */
struct output *output_open(const char *dir, const char *group, uint64_t limit,
                           struct err *err) ERR_MUST_CHECK;
void output_set_owner(struct output *o, const struct output_owner *owner, void *ctx);
/* Goes through what an earlier daemon left; afterwards numbers continue from there. */
int output_replay(struct output *o, const struct output_replay *r, void *ctx,
                  struct err *err) ERR_MUST_CHECK;
/* No event comes after this; readers get what is there, then the end. Removes the files if asked.
 */
void output_close(struct output *o, bool remove_files);

/* The rank has a new process, which counts from 1. */
void output_rank_anew(struct output *o, int rank);
struct output_rank output_rank(const struct output *o, int rank);

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
bool output_failing(const struct output *o); /* the last commit did */
/* Takes back what was added since the last commit, when last_seq was the last number; no text. */
void output_retract(struct output *o, uint64_t last_seq);

/* Numbers of the first event that is kept and of the last one. */
uint64_t output_first_seq(struct output *o);
uint64_t output_last_seq(const struct output *o);

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
