/* SPDX-License-Identifier: Apache-2.0 */
/* line.c - an event as one JSON line: its common members, written and read back without parsing. */
#include "line.h"

#include <stdio.h>
#include <string.h>

#include "json.h"

static void line_number_or_null(struct jw *w, const char *key, bool there, int64_t value)
{
    if (there)
        jw_int(w, key, value);
    else
        jw_null(w, key);
}

void line_write(struct buf *out, uint64_t seq, const char *group, struct output_origin from,
                const char *members, size_t len)
{
    struct jw w = JW_INIT(out);
    jw_object(&w, NULL);
    jw_int(&w, "seq", (int64_t)seq);
    jw_string(&w, "group", group);
    line_number_or_null(&w, "cell", from.cell != OUTPUT_NO_CELL, from.cell);
    line_number_or_null(&w, "rank", from.rank != OUTPUT_NO_RANK, from.rank);
    buf_addc(out, ',');
    buf_add(out, members, len);
    jw_double(&w, "time", util_now());
    if (from.pipe_end)
        jw_int(&w, "pipe_end", (int64_t)from.pipe_end);
    if (from.rank_seq)
        jw_int(&w, "rank_seq", (int64_t)from.rank_seq);
    jw_end_object(&w);
    buf_addc(out, '\n');
}

/* Reads the number after key, which must stand at *p; null gives -1. Moves *p past it. */
static int64_t line_member(const char **p, const char *end, const char *key)
{
    size_t n = strlen(key);
    if ((size_t)(end - *p) <= n || memcmp(*p, key, n) != 0)
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

bool line_mark(const char *line, size_t len, size_t group_len, struct output_mark *m)
{
    static const char type[] = ",\"type\":\"";
    const char *p = line, *end = line + len;
    int64_t seq = line_member(&p, end, "{\"seq\":");
    size_t group = strlen(",\"group\":\"\"") + group_len; /* a group's name needs no escapes */
    *m = (struct output_mark){.rank = OUTPUT_NO_RANK};
    if (seq < 0 || (size_t)(end - p) < group)
        return false;
    p += group;
    int64_t cell = line_member(&p, end, ",\"cell\":");
    m->seq = (uint64_t)seq;
    m->cell = cell < 0 ? OUTPUT_NO_CELL : (uint32_t)cell;
    m->rank = (int)line_member(&p, end, ",\"rank\":");
    if ((size_t)(end - p) > sizeof(type) && memcmp(p, type, sizeof(type) - 1) == 0) {
        p += sizeof(type) - 1;
        const char *quote = memchr(p, '"', (size_t)(end - p));
        snprintf(m->type, sizeof(m->type), "%.*s", quote ? (int)(quote - p) : 0, p);
    }
    return true;
}

void line_origin(const char *line, size_t len, const struct output_mark *m,
                 struct output_origin *from, int *fd)
{
    static const char err[] = ",\"type\":\"stream\",\"name\":\"stderr\"";
    *from = (struct output_origin){.cell = m->cell, .rank = m->rank};
    *fd = memmem(line, len < 256 ? len : 256, err, sizeof(err) - 1) ? 2 : 1;
    /* members of ours stand at the very end: `,"rank_seq":12}\n` */
    const char *p = memrchr(line, ',', len), *end = line + len;
    if (!p)
        return;
    const char *q = p;
    int64_t number = line_member(&p, end, ",\"rank_seq\":");
    int64_t pipe_end = line_member(&q, end, ",\"pipe_end\":");
    from->rank_seq = number > 0 ? (uint64_t)number : 0;
    from->pipe_end = pipe_end > 0 ? (uint64_t)pipe_end : 0;
}
