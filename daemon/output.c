/* SPDX-License-Identifier: Apache-2.0 */
/*
 * output.c - the numbered events of a group, and who is reading them.
 *
 * What the journal holds is the truth: the numbers that say how far a rank's events have got
 * (struct output_rank) are those of committed lines, because a later daemon starts from them. The
 * struct outlives output_close until its last subscriber is gone.
 */
#include "output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "journal.h"
#include "log.h"

#define OUTPUT_STREAM_MAX (64 * 1024) /* text of one merged stream event */
#define OUTPUT_READ (64 * 1024)       /* bytes read from the journal at a time */
#define OUTPUT_STRIDE (64 * 1024)     /* journal bytes between index entries */

struct output_index {
    uint64_t seq, pos; /* the event `seq` starts at pos */
};

struct output_sub {
    TAILQ_ENTRY(output_sub) link;
    struct output *out;
    uint32_t cell;
    uint64_t after, pos;
    uint64_t last;    /* number of the last line read, whoever it was for */
    struct buf chunk; /* journal bytes at pos; `used` of them are consumed */
    size_t used;
    struct buf gap; /* the line that stands for what is no longer kept */
    bool ended;
    void (*wake)(void *ctx);
    void *ctx;
};

struct output {
    struct journal *journal;
    char *dir, *group;
    uint64_t last_seq;
    struct buf lines; /* added, not committed */
    struct buf text;  /* stream text not made into a line yet */
    struct output_origin text_from;
    int text_fd;
    struct output_index *index;
    size_t index_len, index_cap;
    size_t index_sure; /* entries of committed lines; the positions of others are a guess */
    struct output_rank *added, *committed;
    size_t ranks;
    uint64_t first_seq, first_pos; /* what output_first_seq found, and for which start */
    const struct output_owner *owner;
    void *owner_ctx;
    bool closed, failing;
    TAILQ_HEAD(, output_sub) subs;
};

/* --- open and close --- */

/* A file's first line: what a later daemon must know of the lines that came before. */
static void output_fill_head(void *ctx, struct buf *out)
{
    struct output *o = ctx;
    struct jw w = JW_INIT(out);
    jw_object(&w, NULL);
    jw_object(&w, "head");
    jw_array(&w, "ranks");
    for (size_t i = 0; i < o->ranks; i++) {
        jw_array(&w, NULL);
        jw_int(&w, NULL, (int64_t)o->committed[i].rank_seq);
        jw_int(&w, NULL, (int64_t)o->committed[i].pipe_end[0]);
        jw_int(&w, NULL, (int64_t)o->committed[i].pipe_end[1]);
        jw_end_array(&w);
    }
    jw_end_array(&w);
    jw_object(&w, "state");
    if (o->owner)
        o->owner->head(o->owner_ctx, &w);
    jw_end_object(&w);
    jw_end_object(&w);
    jw_end_object(&w);
    buf_addc(out, '\n');
}

struct output *output_open(const char *dir, const char *group, uint64_t limit, struct err *err)
{
    char *path = util_printf("%s/journal", dir);
    struct journal *journal = journal_open(path, limit, err);
    free(path);
    if (!journal)
        return NULL;
    struct output *o = util_calloc(1, sizeof(*o));
    o->journal = journal;
    o->dir = util_strdup(dir);
    o->group = util_strdup(group);
    TAILQ_INIT(&o->subs);
    journal_set_head(journal, output_fill_head, o);
    return o;
}

void output_set_owner(struct output *o, const struct output_owner *owner, void *ctx)
{
    o->owner = owner;
    o->owner_ctx = ctx;
}

static void output_free_if_unused(struct output *o)
{
    if (!o->closed || !TAILQ_EMPTY(&o->subs))
        return;
    journal_close(o->journal);
    buf_deinit(&o->lines);
    buf_deinit(&o->text);
    free(o->index);
    free(o->added);
    free(o->committed);
    free(o->dir);
    free(o->group);
    free(o);
}

static void output_wake(struct output *o)
{
    struct output_sub *s, *next;
    for (s = TAILQ_FIRST(&o->subs); s; s = next) {
        next = TAILQ_NEXT(s, link);
        s->wake(s->ctx);
    }
}

void output_close(struct output *o, bool remove_files)
{
    if (!o)
        return;
    struct err err = ERR_INIT;
    if (output_commit(o, &err) < 0)
        log_error("group=%s: %s", o->group, err.msg);
    if (remove_files)
        util_remove_tree(o->dir);
    o->closed = true;
    o->owner = NULL;
    output_wake(o);
    output_free_if_unused(o);
}

/* --- how far ranks are --- */

static struct output_rank *output_rank_of(struct output *o, int rank)
{
    if (rank < 0)
        return NULL;
    if ((size_t)rank >= o->ranks) {
        size_t n = (size_t)rank + 1;
        o->added = util_realloc(o->added, n * sizeof(*o->added));
        o->committed = util_realloc(o->committed, n * sizeof(*o->committed));
        memset(o->added + o->ranks, 0, (n - o->ranks) * sizeof(*o->added));
        memset(o->committed + o->ranks, 0, (n - o->ranks) * sizeof(*o->committed));
        o->ranks = n;
    }
    return &o->added[rank];
}

static void output_note_origin(struct output *o, const struct output_origin *from, int fd)
{
    struct output_rank *r = output_rank_of(o, from->rank);
    if (r && from->rank_seq)
        r->rank_seq = from->rank_seq;
    if (r && from->pipe_end)
        r->pipe_end[fd == 2] = from->pipe_end;
}

void output_rank_anew(struct output *o, int rank)
{
    *output_rank_of(o, rank) = (struct output_rank){0};
}

struct output_rank output_rank(const struct output *o, int rank)
{
    return (size_t)rank < o->ranks ? o->committed[rank] : (struct output_rank){0};
}

static void output_committed(struct output *o)
{
    if (o->ranks)
        memcpy(o->committed, o->added, o->ranks * sizeof(*o->added));
}

/* --- add --- */

static void output_index_add(struct output *o, uint64_t seq, uint64_t pos)
{
    if (o->index_len && pos - o->index[o->index_len - 1].pos < OUTPUT_STRIDE)
        return;
    if (o->index_len == o->index_cap) {
        o->index_cap = o->index_cap ? 2 * o->index_cap : 16;
        o->index = util_realloc(o->index, o->index_cap * sizeof(*o->index));
    }
    o->index[o->index_len++] = (struct output_index){seq, pos};
}

/* Lines went to `pos`, which was guessed as `guess`; what the journal has dropped is forgotten. */
static void output_index_settle(struct output *o, uint64_t guess, uint64_t pos)
{
    size_t old = 0;
    for (; o->index_sure < o->index_len; o->index_sure++)
        o->index[o->index_sure].pos += pos - guess;
    while (old < o->index_len && o->index[old].pos < journal_start(o->journal))
        old++;
    o->index_len -= old;
    o->index_sure -= old;
    memmove(o->index, o->index + old, o->index_len * sizeof(*o->index));
}

static uint64_t output_line(struct output *o, struct output_origin from, const char *members,
                            size_t len)
{
    uint64_t seq = ++o->last_seq;
    output_index_add(o, seq, journal_end(o->journal) + o->lines.len);
    line_write(&o->lines, seq, o->group, from, members, len);
    return seq;
}

/* Makes the merged stream text an event. */
static void output_flush_text(struct output *o)
{
    if (!o->text.len)
        return;
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    jw_string(&w, "type", "stream");
    jw_string(&w, "name", o->text_fd == 2 ? "stderr" : "stdout");
    jw_text(&w, "text", (const char *)o->text.data, o->text.len);
    output_line(o, o->text_from, (const char *)members.data, members.len);
    buf_deinit(&members);
    buf_reset(&o->text);
}

uint64_t output_add(struct output *o, struct output_origin from, const char *members, size_t len)
{
    output_flush_text(o);
    output_note_origin(o, &from, 1);
    return output_line(o, from, members, len);
}

void output_stream(struct output *o, struct output_origin from, int fd, const char *text,
                   size_t len)
{
    struct output_origin *have = &o->text_from;
    /* text read from a pipe has no number of the rank's; never merge it with text that has one */
    bool same = have->cell == from.cell && have->rank == from.rank && o->text_fd == fd &&
                (have->rank_seq == 0) == (from.rank_seq == 0);
    if (o->text.len && (!same || o->text.len + len > OUTPUT_STREAM_MAX))
        output_flush_text(o);
    *have = from;
    o->text_fd = fd;
    output_note_origin(o, &from, fd);
    buf_add(&o->text, text, len);
}

int output_commit(struct output *o, struct err *err)
{
    output_flush_text(o);
    if (!o->lines.len)
        return 0;
    uint64_t guess = journal_end(o->journal), pos = 0;
    if (journal_append(o->journal, o->lines.data, o->lines.len, &pos, err) < 0) {
        o->failing = true;
        return -1;
    }
    if (o->failing)
        log_info("group=%s: the journal takes events again", o->group);
    o->failing = false;
    buf_reset(&o->lines);
    output_index_settle(o, guess, pos);
    output_committed(o);
    output_wake(o);
    return 0;
}

bool output_failing(const struct output *o)
{
    return o->failing;
}

void output_retract(struct output *o, uint64_t last_seq)
{
    buf_reset(&o->lines);
    o->index_len = o->index_sure;
    o->last_seq = last_seq;
    o->failing = false;
}

uint64_t output_last_seq(const struct output *o)
{
    return o->last_seq;
}

/* --- what an earlier daemon left --- */

static void output_replay_head(struct output *o, const json *head, const struct output_replay *r,
                               void *ctx)
{
    int rank = 0;
    for (const json *j = json_first(json_get(head, "ranks")); j; j = json_next(j), rank++) {
        struct output_rank *to = output_rank_of(o, rank);
        uint64_t *fields[] = {&to->rank_seq, &to->pipe_end[0], &to->pipe_end[1]};
        size_t i = 0;
        for (const json *n = json_first(j); n && i < UTIL_COUNT(fields); n = json_next(n), i++) {
            int64_t value = 0;
            (void)json_integer(n, &value);
            *fields[i] = (uint64_t)value;
        }
    }
    r->head(ctx, json_get(head, "state"));
}

static void output_replay_line(struct output *o, const char *line, size_t len, uint64_t pos,
                               const struct output_replay *r, void *ctx)
{
    struct output_mark m;
    struct output_origin from;
    int fd;
    if (line_mark(line, len, strlen(o->group), &m)) {
        line_origin(line, len, &m, &from, &fd);
        if (m.rank != OUTPUT_NO_RANK && m.cell == OUTPUT_NO_CELL && strcmp(m.type, "status") == 0)
            output_rank_anew(o, m.rank); /* a new process: it counts from 1 again */
        output_note_origin(o, &from, fd);
        output_index_add(o, m.seq, pos);
        o->last_seq = m.seq;
        r->event(ctx, &m, line, len);
    } else if (!o->last_seq) { /* later heads repeat what their files' predecessors have told */
        struct err err = ERR_INIT;
        json *j = json_parse(line, len, &err);
        if (j && json_get(j, "head"))
            output_replay_head(o, json_get(j, "head"), r, ctx);
        else
            log_warn("group=%s: a line of the journal is no event: %s", o->group, err.msg);
        json_free(j);
    }
}

int output_replay(struct output *o, const struct output_replay *r, void *ctx, struct err *err)
{
    struct buf chunk = BUF_INIT;
    uint64_t pos = journal_start(o->journal); /* of the chunk's first byte */
    int rc = 0;
    for (;;) {
        ssize_t n = journal_read(o->journal, pos + chunk.len, buf_room(&chunk, OUTPUT_READ),
                                 OUTPUT_READ, err);
        rc = n < 0 ? -1 : 0;
        if (n <= 0)
            break;
        chunk.len += (size_t)n;
        size_t used = 0;
        const char *nl;
        while ((nl = memchr(chunk.data + used, '\n', chunk.len - used)) != NULL) {
            const char *line = (const char *)chunk.data + used;
            size_t len = (size_t)(nl - line) + 1;
            output_replay_line(o, line, len, pos + used, r, ctx);
            used += len;
        }
        buf_consume(&chunk, used);
        pos += used;
    }
    buf_deinit(&chunk);
    o->index_sure = o->index_len;
    output_committed(o);
    return rc;
}

/* --- readers --- */

/* Journal position at or before the event after `after`. */
static uint64_t output_seek(const struct output *o, uint64_t after)
{
    size_t lo = 0, hi = o->index_sure;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (o->index[mid].seq <= after + 1)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo ? o->index[lo - 1].pos : 0;
}

struct output_sub *output_subscribe(struct output *o, uint32_t cell, uint64_t after,
                                    void (*wake)(void *ctx), void *ctx)
{
    struct output_sub *s = util_calloc(1, sizeof(*s));
    s->out = o;
    s->cell = cell;
    s->after = s->last = after;
    s->pos = output_seek(o, after);
    s->wake = wake;
    s->ctx = ctx;
    TAILQ_INSERT_TAIL(&o->subs, s, link);
    return s;
}

void output_unsubscribe(struct output_sub *s)
{
    if (!s)
        return;
    struct output *o = s->out;
    TAILQ_REMOVE(&o->subs, s, link);
    buf_deinit(&s->chunk);
    buf_deinit(&s->gap);
    free(s);
    output_free_if_unused(o);
}

/* The next whole line of the journal, whoever it is for. */
static bool output_raw_line(struct output_sub *s, const char **line, size_t *len)
{
    struct err err = ERR_INIT;
    for (;;) {
        char *start = s->chunk.len > s->used ? (char *)s->chunk.data + s->used : NULL;
        char *nl = start ? memchr(start, '\n', s->chunk.len - s->used) : NULL;
        if (nl) {
            *line = start;
            *len = (size_t)(nl - start) + 1;
            s->used += *len;
            return true;
        }
        buf_consume(&s->chunk, s->used);
        s->used = 0;
        if (s->pos < journal_start(s->out->journal)) { /* dropped before it was read */
            s->pos = journal_start(s->out->journal);
            s->chunk.len = 0;
        }
        if (!s->chunk.len)
            buf_reset(&s->chunk);
        ssize_t n = journal_read(s->out->journal, s->pos, buf_room(&s->chunk, OUTPUT_READ),
                                 OUTPUT_READ, &err);
        if (n < 0)
            log_error("group=%s: %s", s->out->group, err.msg);
        if (n <= 0)
            return false;
        s->chunk.len += (size_t)n;
        s->pos += (uint64_t)n;
    }
}

/* Numbers are missing: one `gap` event with the number of the last of them stands for all. */
static void output_make_gap(struct output_sub *s, uint64_t until, struct output_mark *mark)
{
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    jw_string(&w, "type", "gap");
    jw_int(&w, "dropped_events", (int64_t)(until - s->last));
    jw_string(&w, "reason", "the journal's limit: the oldest events are no longer kept");
    buf_reset(&s->gap);
    struct output_origin from = {.cell = s->cell, .rank = OUTPUT_NO_RANK};
    line_write(&s->gap, until, s->out->group, from, (const char *)members.data, members.len);
    buf_deinit(&members);
    (void)line_mark((const char *)s->gap.data, s->gap.len, strlen(s->out->group), mark);
    const struct output_owner *owner = s->out->owner;
    s->ended =
        s->cell != OUTPUT_NO_CELL && owner && owner->cell_last(s->out->owner_ctx, s->cell) <= until;
}

enum output_status output_next(struct output_sub *s, const char **line, size_t *len,
                               struct output_mark *mark)
{
    while (!s->ended && output_raw_line(s, line, len)) {
        if (!line_mark(*line, *len, strlen(s->out->group), mark))
            continue;
        if (mark->seq > s->last + 1) {
            s->used -= *len; /* it comes after the gap */
            output_make_gap(s, mark->seq - 1, mark);
            s->last = mark->seq; /* the gap's number */
            *line = (const char *)s->gap.data;
            *len = s->gap.len;
            return OUTPUT_LINE;
        }
        s->last = mark->seq > s->last ? mark->seq : s->last;
        if (mark->seq <= s->after || (s->cell != OUTPUT_NO_CELL && mark->cell != s->cell))
            continue;
        s->ended = s->cell != OUTPUT_NO_CELL && strcmp(mark->type, "done") == 0;
        return OUTPUT_LINE;
    }
    return s->ended || s->out->closed ? OUTPUT_END : OUTPUT_WAIT;
}

uint64_t output_first_seq(struct output *o)
{
    if (o->first_seq && o->first_pos == journal_start(o->journal))
        return o->first_seq;
    struct output_sub *s = output_subscribe(o, OUTPUT_NO_CELL, 0, NULL, NULL);
    const char *line;
    size_t len;
    struct output_mark m;
    o->first_seq = 0;
    while (!o->first_seq && output_raw_line(s, &line, &len)) {
        if (line_mark(line, len, strlen(o->group), &m))
            o->first_seq = m.seq;
    }
    o->first_pos = journal_start(o->journal);
    output_unsubscribe(s);
    return o->first_seq ? o->first_seq : o->last_seq + 1;
}
