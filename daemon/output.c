/* SPDX-License-Identifier: Apache-2.0 */
/*
 * output.c - the numbered events of a group, and who is reading them.
 *
 * The common members of a line come in a fixed order (output_prefix), so a reader can tell sequence
 * number, cell, rank and type without parsing JSON. The struct outlives output_close until its last
 * subscriber is gone.
 */
#include "output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "journal.h"
#include "json.h"
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
    struct buf chunk; /* journal bytes at pos; `used` of them are consumed */
    size_t used;
    bool ended;
    void (*wake)(void *ctx);
    void *ctx;
};

struct output {
    struct journal *journal;
    char *dir, *path, *group;
    uint64_t last_seq;
    struct buf lines; /* added, not committed */
    struct buf text;  /* stream text not made into a line yet */
    struct output_origin text_from;
    int text_fd;
    struct output_index *index;
    size_t index_len, index_cap;
    bool closed, failing;
    TAILQ_HEAD(, output_sub) subs;
};

struct output *output_open(const char *dir, const char *group, struct err *err)
{
    if (util_mkdirs(dir, 0700, err) < 0)
        return NULL;
    char *path = util_printf("%s/journal.ndjson", dir);
    struct journal *journal = journal_open(path, err);
    if (!journal) {
        free(path);
        return NULL;
    }
    struct output *o = util_calloc(1, sizeof(*o));
    o->journal = journal;
    o->dir = util_strdup(dir);
    o->path = path;
    o->group = util_strdup(group);
    TAILQ_INIT(&o->subs);
    return o;
}

static void output_free_if_unused(struct output *o)
{
    if (!o->closed || !TAILQ_EMPTY(&o->subs))
        return;
    journal_close(o->journal);
    buf_deinit(&o->lines);
    buf_deinit(&o->text);
    free(o->index);
    free(o->dir);
    free(o->path);
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
    output_wake(o);
    output_free_if_unused(o);
}

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

/* {"seq":7,"group":"default","cell":3,"rank":0,"time":1764518400.123456,"rank_seq":12,<members>} */
static uint64_t output_line(struct output *o, struct output_origin from, const char *members,
                            size_t len)
{
    uint64_t seq = ++o->last_seq;
    output_index_add(o, seq, journal_end(o->journal) + o->lines.len);
    struct jw w = JW_INIT(&o->lines);
    jw_object(&w, NULL);
    jw_int(&w, "seq", (int64_t)seq);
    jw_string(&w, "group", o->group);
    if (from.cell != OUTPUT_NO_CELL)
        jw_int(&w, "cell", from.cell);
    else
        jw_null(&w, "cell");
    if (from.rank != OUTPUT_NO_RANK)
        jw_int(&w, "rank", from.rank);
    else
        jw_null(&w, "rank");
    buf_addc(&o->lines, ',');
    buf_add(&o->lines, members, len);
    jw_double(&w, "time", util_now());
    if (from.rank_seq)
        jw_int(&w, "rank_seq", (int64_t)from.rank_seq);
    jw_end_object(&w);
    buf_addc(&o->lines, '\n');
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
    buf_add(&o->text, text, len);
}

int output_commit(struct output *o, struct err *err)
{
    output_flush_text(o);
    if (!o->lines.len)
        return 0;
    if (journal_append(o->journal, o->lines.data, o->lines.len, err) < 0) {
        o->failing = true;
        return -1;
    }
    if (o->failing)
        log_info("group=%s: the journal takes events again", o->group);
    o->failing = false;
    buf_reset(&o->lines);
    output_wake(o);
    return 0;
}

uint64_t output_last_seq(const struct output *o)
{
    return o->last_seq;
}

/* Journal position at or before the event after `after`. */
static uint64_t output_seek(const struct output *o, uint64_t after)
{
    size_t lo = 0, hi = o->index_len;
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
    s->after = after;
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
    free(s);
    output_free_if_unused(o);
}

/* Reads the number after key, which must stand at *p; null gives -1. Moves *p past it. */
static int64_t output_member(const char **p, const char *end, const char *key)
{
    size_t n = strlen(key);
    if ((size_t)(end - *p) < n || memcmp(*p, key, n) != 0)
        return -1;
    *p += n;
    if (**p == 'n') {
        *p += 4;
        return -1;
    }
    int64_t v = 0;
    while (*p < end && **p >= '0' && **p <= '9')
        v = 10 * v + (*(*p)++ - '0');
    return v;
}

static void output_mark_line(const struct output *o, const char *line, size_t len,
                             struct output_mark *m)
{
    const char *p = line, *end = line + len;
    m->seq = (uint64_t)output_member(&p, end, "{\"seq\":");
    p += strlen(",\"group\":\"\"") + strlen(o->group); /* a group's name needs no escapes */
    int64_t cell = output_member(&p, end, ",\"cell\":");
    m->cell = cell < 0 ? OUTPUT_NO_CELL : (uint32_t)cell;
    m->rank = (int)output_member(&p, end, ",\"rank\":");
    m->type[0] = '\0';
    static const char key[] = ",\"type\":\"";
    if ((size_t)(end - p) > sizeof(key) && memcmp(p, key, sizeof(key) - 1) == 0) {
        p += sizeof(key) - 1;
        size_t n = strcspn(p, "\"");
        snprintf(m->type, sizeof(m->type), "%.*s", (int)n, p);
    }
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

enum output_status output_next(struct output_sub *s, const char **line, size_t *len,
                               struct output_mark *mark)
{
    while (!s->ended && output_raw_line(s, line, len)) {
        output_mark_line(s->out, *line, *len, mark);
        if (mark->seq <= s->after || (s->cell != OUTPUT_NO_CELL && mark->cell != s->cell))
            continue;
        s->ended = s->cell != OUTPUT_NO_CELL && strcmp(mark->type, "done") == 0;
        return OUTPUT_LINE;
    }
    return s->ended || s->out->closed ? OUTPUT_END : OUTPUT_WAIT;
}
