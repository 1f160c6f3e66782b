/* SPDX-License-Identifier: Apache-2.0 */
/* output_fixture.h - what the tests of output.c share: an output in a folder of its own, and
 * readers that look at every line. */
#ifndef DDIPD_OUTPUT_FIXTURE_H
#define DDIPD_OUTPUT_FIXTURE_H

#include "output.h"

#include <stdlib.h>

#include "json.h"
#include "tap.h"

static char folder[] = "/tmp/ddipd-test-output-XXXXXX";

/* A group's output in a folder of its own, and one reader of everything. */
struct fixture {
    char dir[128];
    struct output *out;
    struct output_sub *all;
    int wakes;
};

static inline void on_wake(void *ctx)
{
    ++*(int *)ctx;
}

static inline void fixture_init(struct fixture *f)
{
    static int next;
    struct err err = ERR_INIT;
    snprintf(f->dir, sizeof(f->dir), "%s/state/%d", folder, next++);
    f->out = output_open(f->dir, "g", 1 << 30, &err);
    if (!f->out)
        abort();
    f->wakes = 0;
    f->all = output_subscribe(f->out, OUTPUT_NO_CELL, 0, on_wake, &f->wakes);
}

static inline void fixture_deinit(struct fixture *f)
{
    output_unsubscribe(f->all);
    output_close(f->out, true);
}

static inline uint64_t add(struct output *o, uint32_t cell, int rank, const char *type)
{
    char members[128];
    int n = snprintf(members, sizeof(members), "\"type\":\"%s\",\"x\":\"done\"", type);
    return output_add(o, (struct output_origin){cell, rank, 0, 0}, members, (size_t)n);
}

static inline void say(struct output *o, uint32_t cell, int rank, int fd, uint64_t number,
                       const char *text)
{
    output_stream(o, (struct output_origin){cell, rank, number, 0}, fd, text, strlen(text));
}

static inline bool commit(struct output *o)
{
    struct err err = ERR_INIT;
    return output_commit(o, &err) == 0;
}

/* The next line, parsed; NULL: none. The mark must agree with it. */
static inline json *next_event(struct output_sub *s)
{
    const char *line;
    size_t len;
    struct output_mark m;
    struct err err = ERR_INIT;
    int64_t seq = 0, cell = OUTPUT_NO_CELL, rank = OUTPUT_NO_RANK;
    if (output_next(s, &line, &len, &m) != OUTPUT_LINE)
        return NULL;
    json *j = json_parse(line, len, &err);
    (void)json_integer(json_get(j, "seq"), &seq);
    (void)json_integer(json_get(j, "cell"), &cell);
    (void)json_integer(json_get(j, "rank"), &rank);
    const char *type = json_string(json_get(j, "type"));
    if (line[len - 1] == '\n' && j && (uint64_t)seq == m.seq && cell == m.cell && rank == m.rank &&
        type && strcmp(type, m.type) == 0)
        return j;
    ok(false, "line and mark agree: %.*s", (int)len, line);
    json_free(j);
    return NULL;
}

/* What is left to read, as "seq:cell:rank:type[:text]" words. */
static inline const char *events(struct output_sub *s)
{
    static struct buf b;
    json *j;
    buf_reset(&b);
    while ((j = next_event(s)) != NULL) {
        int64_t seq = 0, cell = 0, rank = -1;
        const char *text = json_string(json_get(j, "text"));
        (void)json_integer(json_get(j, "seq"), &seq);
        (void)json_integer(json_get(j, "cell"), &cell);
        (void)json_integer(json_get(j, "rank"), &rank);
        buf_addf(&b, "%s%d:%d:%d:%s", b.len ? " " : "", (int)seq, (int)cell, (int)rank,
                 json_string(json_get(j, "type")));
        if (text)
            buf_addf(&b, ":%s:%s", json_string(json_get(j, "name")), text);
        json_free(j);
    }
    return buf_cstr(&b);
}

static inline enum output_status status(struct output_sub *s)
{
    const char *line;
    size_t len;
    struct output_mark m;
    return output_next(s, &line, &len, &m);
}

/* Bytes this process has read so far; 0: not known here. */
static inline uint64_t bytes_read(void)
{
    unsigned long long n = 0;
    FILE *io = fopen("/proc/self/io", "re");
    if (io && fscanf(io, "rchar: %llu", &n) != 1)
        n = 0;
    if (io)
        fclose(io);
    return n;
}

/* Subscribes after many numbers from `from` on; each time the first event must be the next one. */
static inline uint64_t seek_errors(struct output *o, uint64_t from, uint64_t step, uint64_t *most)
{
    uint64_t wrong = 0, last = output_last_seq(o);
    int wakes = 0;
    for (uint64_t after = from; after <= last; after += step) {
        const char *line;
        size_t len;
        struct output_mark m = {0};
        uint64_t before = bytes_read();
        struct output_sub *s = output_subscribe(o, OUTPUT_NO_CELL, after, on_wake, &wakes);
        enum output_status st = output_next(s, &line, &len, &m);
        wrong += after < last ? st != OUTPUT_LINE || m.seq != after + 1 : st != OUTPUT_WAIT;
        output_unsubscribe(s);
        uint64_t read_now = bytes_read() - before;
        *most = read_now > *most ? read_now : *most;
    }
    return wrong;
}

#endif
