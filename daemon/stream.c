/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stream.c - a subscriber's events as the bytes a client asked for.
 *
 * Plain text is the one format with a memory: lines of a rank are put together until they end, so
 * that ranks printing at once do not mix within a line.
 */
#include "stream.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"

#define STREAM_LINE_MAX 4096 /* a longer unfinished line is cut in plain text */

struct stream_lane {
    int rank;
    bool err;
    struct buf line;
};

struct stream {
    struct output_sub *sub;
    enum stream_format format;
    void (*tail)(void *ctx, struct buf *out);
    void *ctx;
    struct buf out; /* the formatted event; `used` of it given by stream_read */
    size_t used;
    bool begun, ended, no_wait;
    struct stream_lane *lanes;
    size_t lanes_len;
};

struct stream *stream_new(struct output *o, uint32_t cell, uint64_t after,
                          enum stream_format format, void (*tail)(void *ctx, struct buf *out),
                          void (*wake)(void *ctx), void *ctx)
{
    struct stream *s = util_calloc(1, sizeof(*s));
    s->sub = output_subscribe(o, cell, after, wake, ctx);
    s->format = format;
    s->tail = tail;
    s->ctx = ctx;
    return s;
}

void stream_no_wait(struct stream *s)
{
    s->no_wait = true;
}

void stream_free(struct stream *s)
{
    if (!s)
        return;
    output_unsubscribe(s->sub);
    for (size_t i = 0; i < s->lanes_len; i++)
        buf_deinit(&s->lanes[i].line);
    free(s->lanes);
    buf_deinit(&s->out);
    free(s);
}

const char *stream_media_type(enum stream_format format)
{
    static const char *const types[] = {[STREAM_NDJSON] = "application/x-ndjson",
                                        [STREAM_SSE] = "text/event-stream",
                                        [STREAM_PLAIN] = "text/plain; charset=utf-8",
                                        [STREAM_RECORD] = "application/json"};
    return types[format];
}

/* --- plain text --- */

static struct stream_lane *stream_lane(struct stream *s, int rank, bool err)
{
    for (size_t i = 0; i < s->lanes_len; i++) {
        if (s->lanes[i].rank == rank && s->lanes[i].err == err)
            return &s->lanes[i];
    }
    s->lanes = util_realloc(s->lanes, (s->lanes_len + 1) * sizeof(*s->lanes));
    s->lanes[s->lanes_len] = (struct stream_lane){.rank = rank, .err = err};
    return &s->lanes[s->lanes_len++];
}

static void stream_end_line(struct stream *s, struct stream_lane *l)
{
    if (l->rank >= 0)
        buf_addf(&s->out, "[%d] ", l->rank);
    buf_add(&s->out, l->line.data, l->line.len);
    buf_addc(&s->out, '\n');
    buf_reset(&l->line);
}

static void stream_lane_text(struct stream *s, struct stream_lane *l, const char *text)
{
    while (*text) {
        size_t n = strcspn(text, "\n");
        buf_add(&l->line, text, n);
        text += n;
        if (*text == '\n' || l->line.len > STREAM_LINE_MAX)
            stream_end_line(s, l);
        text += *text == '\n';
    }
}

static void stream_flush_lanes(struct stream *s, int rank)
{
    for (size_t i = 0; i < s->lanes_len; i++) {
        if ((rank == OUTPUT_NO_RANK || s->lanes[i].rank == rank) && s->lanes[i].line.len)
            stream_end_line(s, &s->lanes[i]);
    }
}

/* Whole text as lines of its own; colour escapes (ESC [ ... letter) are left out. */
static void stream_block(struct stream *s, int rank, const char *text)
{
    struct stream_lane block = {.rank = rank};
    for (; *text; text++) {
        if (text[0] == '\x1b' && text[1] == '[') {
            text += 2 + strspn(text + 2, "0123456789;");
            if (!*text)
                break;
        } else if (*text == '\n') {
            stream_end_line(s, &block);
        } else {
            buf_addc(&block.line, *text);
        }
    }
    if (block.line.len)
        stream_end_line(s, &block);
    buf_deinit(&block.line);
}

static void stream_plain_error(struct stream *s, int rank, const json *j)
{
    const json *line = json_first(json_get(j, "traceback"));
    const char *ename = json_string(json_get(j, "ename"));
    const char *evalue = json_string(json_get(j, "evalue"));
    for (; line; line = json_next(line)) {
        if (json_string(line))
            stream_block(s, rank, json_string(line));
    }
    if (!json_first(json_get(j, "traceback"))) {
        char *text = util_printf("%s: %s", ename ? ename : "error", evalue ? evalue : "");
        stream_block(s, rank, text);
        free(text);
    }
}

static void stream_plain_done(struct stream *s, const json *j)
{
    const char *status = json_string(json_get(j, "status"));
    if (!status || strcmp(status, "ok") == 0)
        return;
    buf_addf(&s->out, "-- %s:", status);
    for (const json *r = json_first(json_get(j, "ranks")); r; r = json_next(r))
        buf_addf(&s->out, " [%s] %s", json_key(r), json_string(r) ? json_string(r) : "?");
    buf_addc(&s->out, '\n');
}

static void stream_plain(struct stream *s, const struct output_mark *m, const char *line,
                         size_t len)
{
    struct err err = ERR_INIT;
    json *j = json_parse_cut(line, len, &err);
    const char *text = json_string(json_get(j, "text"));
    const char *data = json_string(json_get(json_get(j, "data"), "text/plain"));
    if (strcmp(m->type, "stream") == 0 && text) {
        const char *name = json_string(json_get(j, "name"));
        stream_lane_text(s, stream_lane(s, m->rank, name && strcmp(name, "stderr") == 0), text);
    } else if (data && strcmp(m->type, "update_display_data") != 0) {
        stream_flush_lanes(s, m->rank);
        stream_block(s, m->rank, data);
    } else if (strcmp(m->type, "error") == 0) {
        stream_flush_lanes(s, m->rank);
        stream_plain_error(s, m->rank, j);
    } else if (strcmp(m->type, "rank_done") == 0) {
        stream_flush_lanes(s, m->rank);
    } else if (strcmp(m->type, "done") == 0) {
        stream_flush_lanes(s, OUTPUT_NO_RANK);
        stream_plain_done(s, j);
    }
    json_free(j);
}

/* --- all formats --- */

static void stream_format(struct stream *s, const struct output_mark *m, const char *line,
                          size_t len)
{
    switch (s->format) {
    case STREAM_NDJSON:
        buf_add(&s->out, line, len);
        break;
    case STREAM_SSE:
        buf_addf(&s->out, "id: %llu\nevent: %s\ndata: ", (unsigned long long)m->seq, m->type);
        buf_add(&s->out, line, len);
        buf_addc(&s->out, '\n');
        break;
    case STREAM_PLAIN:
        stream_plain(s, m, line, len);
        break;
    case STREAM_RECORD:
        buf_adds(&s->out, s->begun ? "," : "{\"events\":[");
        s->begun = true;
        buf_add(&s->out, line, len - 1);
        break;
    }
}

/* What comes after the last event. */
static void stream_finish(struct stream *s)
{
    s->ended = true;
    if (s->format == STREAM_PLAIN) {
        stream_flush_lanes(s, OUTPUT_NO_RANK);
    } else if (s->format == STREAM_RECORD) {
        buf_adds(&s->out, s->begun ? "]," : "{\"events\":[],");
        s->tail(s->ctx, &s->out);
        buf_adds(&s->out, "}\n");
    }
}

enum stream_status stream_next(struct stream *s, const char **data, size_t *len)
{
    buf_reset(&s->out);
    s->used = 0;
    while (!s->out.len) {
        struct output_mark mark;
        const char *line;
        size_t line_len;
        enum output_status st =
            s->ended ? OUTPUT_END : output_next(s->sub, &line, &line_len, &mark);
        if (st == OUTPUT_WAIT && !s->no_wait)
            return STREAM_WAIT;
        if (st == OUTPUT_LINE)
            stream_format(s, &mark, line, line_len);
        else if (!s->ended)
            stream_finish(s);
        else
            return STREAM_END;
    }
    *data = (const char *)s->out.data;
    *len = s->out.len;
    return STREAM_DATA;
}

ssize_t stream_read(struct stream *s, char *out, size_t cap)
{
    size_t put = 0;
    while (put < cap) {
        const char *data;
        size_t len;
        if (s->used == s->out.len) {
            enum stream_status st = stream_next(s, &data, &len);
            if (st != STREAM_DATA)
                return put ? (ssize_t)put : st == STREAM_END ? -1 : 0;
        }
        size_t n = s->out.len - s->used;
        n = n < cap - put ? n : cap - put;
        memcpy(out + put, s->out.data + s->used, n);
        s->used += n;
        put += n;
    }
    return (ssize_t)put;
}
