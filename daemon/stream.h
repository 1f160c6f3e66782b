/* SPDX-License-Identifier: Apache-2.0 */
/* stream.h - a subscriber's events as the bytes a client asked for. */
#ifndef DDIPD_STREAM_H
#define DDIPD_STREAM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "output.h"

enum stream_format {
    STREAM_NDJSON, /* one event per line, as in the journal */
    STREAM_SSE,    /* text/event-stream: id is the sequence number, event the type */
    STREAM_PLAIN,  /* text/plain: "[rank] text" per line of output */
    STREAM_RECORD, /* application/json: one object {"events": [...], ...} */
};

struct stream;

/* See output_subscribe. tail (STREAM_RECORD): appends the members after "events", without braces.
 */
struct stream *stream_new(struct output *o, uint32_t cell, uint64_t after,
                          enum stream_format format, void (*tail)(void *ctx, struct buf *out),
                          void (*wake)(void *ctx), void *ctx);
/* Ends with what is there now instead of waiting for more. */
void stream_no_wait(struct stream *s);
void stream_free(struct stream *s);

enum stream_status { STREAM_DATA, STREAM_WAIT, STREAM_END };

/* The bytes of the next event (perhaps of several: never empty). Borrowed until the next call. */
enum stream_status stream_next(struct stream *s, const char **data, size_t *len);
/* The same into a buffer: bytes put there, 0: wait, -1: the end. */
ssize_t stream_read(struct stream *s, char *out, size_t cap);

const char *stream_media_type(enum stream_format format);

#endif
