/* SPDX-License-Identifier: Apache-2.0 */
/* test_stream.c - stream.c: events as NDJSON, SSE, plain text and one record, whole or in pieces.
 */
#include "stream.h"

#include <stdlib.h>

#include "output_fixture.h"

static int wakes;

static void tail(void *ctx, struct buf *out)
{
    buf_addf(out, "\"cell\":\"%s\"", (const char *)ctx);
}

static void on_woken(void *ctx)
{
    (void)ctx;
    wakes++;
}

static struct stream *open_stream(struct output *o, uint32_t cell, enum stream_format format)
{
    return stream_new(o, cell, 0, format, format == STREAM_RECORD ? tail : NULL, on_woken,
                      (void *)"the tail");
}

static void add_json(struct output *o, int rank, const char *members)
{
    output_add(o, (struct output_origin){1, rank, 0, 0}, members, strlen(members));
}

/* All that stream_next gives now. */
static enum stream_status take(struct stream *s, struct buf *out)
{
    const char *data;
    size_t len;
    enum stream_status st;
    while ((st = stream_next(s, &data, &len)) == STREAM_DATA) {
        buf_add(out, data, len);
        if (!len)
            ok(false, "stream_next gave no bytes");
    }
    return st;
}

/* The plain text of what has been added, and of the end of the group. */
static const char *plain(struct fixture *f)
{
    static struct buf b;
    struct stream *s = open_stream(f->out, OUTPUT_NO_CELL, STREAM_PLAIN);
    buf_reset(&b);
    commit(f->out);
    take(s, &b);
    output_close(f->out, true);
    f->out = NULL;
    if (take(s, &b) != STREAM_END)
        buf_adds(&b, "NO END");
    stream_free(s);
    output_unsubscribe(f->all);
    return buf_cstr(&b);
}

/* --- formats --- */

static void check_ndjson(struct output *o, const char *journal)
{
    struct buf b = BUF_INIT;
    struct stream *s = open_stream(o, 1, STREAM_NDJSON);
    ok(take(s, &b) == STREAM_END, "NDJSON ends with the cell");
    is_str(buf_cstr(&b), journal, "and is the journal's lines");
    stream_free(s);
    buf_deinit(&b);
}

/* Each line of the journal in its frame. */
static void check_sse(struct output *o, const char *journal)
{
    struct buf b = BUF_INIT, want = BUF_INIT;
    static const char *const types[] = {"stream", "error", "done"};
    struct stream *s = open_stream(o, 1, STREAM_SSE);
    ok(take(s, &b) == STREAM_END, "SSE ends with the cell");
    for (unsigned i = 0; i < 3; i++) {
        size_t n = strcspn(journal, "\n") + 1;
        buf_addf(&want, "id: %u\nevent: %s\ndata: %.*s\n", i + 1, types[i], (int)n, journal);
        journal += n;
    }
    is_str(buf_cstr(&b), buf_cstr(&want), "with number, type and line");
    stream_free(s);
    buf_deinit(&b);
    buf_deinit(&want);
}

static void check_record(struct output *o)
{
    struct buf b = BUF_INIT;
    struct err err = ERR_INIT;
    int count = 0;
    struct stream *s = open_stream(o, 1, STREAM_RECORD);
    ok(take(s, &b) == STREAM_END, "a record ends with the cell");
    json *j = json_parse((char *)b.data, b.len, &err);
    for (const json *e = json_first(json_get(j, "events")); e; e = json_next(e))
        count += json_get(e, "seq") != NULL;
    ok(count == 3 && b.data[b.len - 1] == '\n', "and is one JSON object with the events");
    is_str(json_string(json_get(j, "cell")), "the tail", "and its tail");
    json_free(j);
    stream_free(s);
    buf_deinit(&b);
}

static void check_empty_record(void)
{
    struct fixture f;
    struct buf b = BUF_INIT;
    fixture_init(&f);
    struct stream *s = open_stream(f.out, 7, STREAM_RECORD);
    ok(take(s, &b) == STREAM_WAIT && b.len == 0, "a record of no events waits");
    output_close(f.out, true);
    ok(take(s, &b) == STREAM_END, "and ends with the group");
    is_str(buf_cstr(&b), "{\"events\":[],\"cell\":\"the tail\"}\n", "as a whole object");
    stream_free(s);
    output_unsubscribe(f.all);
    buf_deinit(&b);
}

/* stream_read with `size` bytes of room gives what stream_next gives. */
static bool reads_same(struct output *o, enum stream_format format, size_t size)
{
    struct buf whole = BUF_INIT, pieces = BUF_INIT;
    struct stream *s = open_stream(o, 1, format);
    take(s, &whole);
    stream_free(s);
    s = open_stream(o, 1, format);
    ssize_t n;
    for (;;) {
        char *piece = util_malloc(size); /* of its own, for the sanitizer */
        if ((n = stream_read(s, piece, size)) > 0)
            buf_add(&pieces, piece, (size_t)n);
        free(piece);
        if (n <= 0 || n > (ssize_t)size)
            break;
    }
    bool same = n == -1 && stream_read(s, (char[1]){0}, 1) == -1 && pieces.len == whole.len &&
                memcmp(pieces.data, whole.data, whole.len) == 0;
    stream_free(s);
    buf_deinit(&whole);
    buf_deinit(&pieces);
    return same;
}

static void check_formats(void)
{
    struct fixture f;
    struct buf journal = BUF_INIT;
    const char *line;
    size_t len;
    struct output_mark m;
    fixture_init(&f);
    say(f.out, 1, 0, 1, 1, "a\n\xc3\xa4");
    add_json(f.out, 1, "\"type\":\"error\",\"ename\":\"E\",\"evalue\":\"v\"");
    add_json(f.out, -1,
             "\"type\":\"done\",\"status\":\"error\",\"ranks\":{\"0\":\"ok\",\"1\":\"error\"}");
    commit(f.out);
    while (output_next(f.all, &line, &len, &m) == OUTPUT_LINE)
        buf_add(&journal, line, len);
    check_ndjson(f.out, buf_cstr(&journal));
    check_sse(f.out, buf_cstr(&journal));
    check_record(f.out);
    for (enum stream_format format = STREAM_NDJSON; format <= STREAM_RECORD; format++) {
        bool same = true;
        for (size_t size = 1; size < 40; size++)
            same = same && reads_same(f.out, format, size);
        ok(same && reads_same(f.out, format, 100000), "%s in pieces of any size",
           stream_media_type(format));
    }
    buf_deinit(&journal);
    is_str(plain(&f), "[0] a\n[1] E: v\n[0] \xc3\xa4\n-- error: [0] ok [1] error\n", "plain text");
}

static void check_waiting(void)
{
    struct fixture f;
    char piece[512];
    fixture_init(&f);
    struct stream *s = open_stream(f.out, OUTPUT_NO_CELL, STREAM_NDJSON);
    ok(stream_read(s, piece, sizeof(piece)) == 0, "nothing yet: wait");
    wakes = 0;
    say(f.out, 1, 0, 1, 1, "x");
    commit(f.out);
    ok(wakes == 1 && stream_read(s, piece, 10) == 10, "woken, it gives a part");
    ok(stream_read(s, piece, sizeof(piece)) > 50, "and the rest");
    ok(stream_read(s, piece, sizeof(piece)) == 0, "then waits again");
    stream_free(s);
    stream_free(NULL);
    fixture_deinit(&f);
}

/* --- plain text --- */

static void check_lanes(void)
{
    struct fixture f;
    fixture_init(&f);
    say(f.out, 1, 0, 1, 1, "from ");
    say(f.out, 1, 1, 1, 1, "one\ntwo ");
    say(f.out, 1, 0, 2, 2, "error ");
    say(f.out, 1, 0, 1, 3, "zero\n\nopen");
    say(f.out, 1, 1, 1, 2, "halves\n");
    say(f.out, 1, 0, 2, 4, "text\n");
    say(f.out, 1, -1, 2, 0, "the daemon's own\n");
    is_str(plain(&f),
           "[1] one\n[0] from zero\n[0] \n[1] two halves\n[0] error text\nthe daemon's own\n"
           "[0] open\n",
           "lines of ranks and of stdout and stderr do not mix; an open one comes at the end");
    fixture_init(&f);
    say(f.out, 1, 0, 1, 1, "a");
    say(f.out, 1, 1, 1, 1, "b");
    add_json(f.out, 0, "\"type\":\"rank_done\",\"status\":\"ok\"");
    say(f.out, 1, 1, 1, 1, "c\n");
    add_json(f.out, -1, "\"type\":\"done\",\"status\":\"ok\"");
    is_str(plain(&f), "[0] a\n[1] bc\n", "a rank that is done ends its line, and no other's");
}

static void check_long_line(void)
{
    struct fixture f;
    struct buf want = BUF_INIT;
    char text[1001];
    memset(text, 'x', 1000);
    text[1000] = '\0';
    fixture_init(&f);
    for (int i = 0; i < 7; i++) {
        say(f.out, 1, 0, 1, 1, text);
        commit(f.out);
    }
    say(f.out, 1, 0, 1, 1, "\n");
    buf_adds(&want, "[0] ");
    for (int i = 0; i < 7; i++)
        buf_addf(&want, "%s%s", i == 5 ? "\n[0] " : "", text);
    buf_adds(&want, "\n");
    is_str(plain(&f), buf_cstr(&want), "a line of more than 4096 bytes is cut");
    buf_deinit(&want);
}

static void check_blocks(void)
{
    struct fixture f;
    fixture_init(&f);
    say(f.out, 1, 0, 1, 1, "open");
    add_json(f.out, 0, "\"type\":\"execute_result\",\"data\":{\"text/plain\":\"1\\n2\"}");
    add_json(f.out, 1, "\"type\":\"display_data\",\"data\":{\"text/plain\":\"shown\"}");
    add_json(f.out, 1, "\"type\":\"update_display_data\",\"data\":{\"text/plain\":\"again\"}");
    add_json(f.out, 1, "\"type\":\"display_data\",\"data\":{\"image/png\":\"abc\"}");
    add_json(f.out, 1, "\"type\":\"clear_output\",\"wait\":false");
    add_json(f.out, 1, "\"type\":\"display_data\",\"data\":{\"text/plain\":5}");
    is_str(plain(&f), "[0] open\n[0] 1\n[0] 2\n[1] shown\n", "results and displays as lines");
}

static void check_errors(void)
{
    struct fixture f;
    fixture_init(&f);
    add_json(f.out, 2,
             "\"type\":\"error\",\"ename\":\"E\",\"evalue\":\"v\",\"traceback\":[\"\\u001b[0;31mE"
             "\\u001b[0m: v\",\"line\\nnext\",7,\"\\u001b[\",\"cut\\u001b[31\",\"\"]");
    add_json(f.out, -1, "\"type\":\"error\",\"ename\":\"CellLost\",\"traceback\":[]");
    add_json(f.out, -1, "\"type\":\"error\"");
    is_str(plain(&f), "[2] E: v\n[2] line\n[2] next\n[2] cut\nCellLost: \nerror: \n",
           "tracebacks without colours, or what there is");
    fixture_init(&f);
    add_json(f.out, -1,
             "\"type\":\"done\",\"status\":\"lost\",\"ranks\":{\"0\":null,\"3\":\"lost\"}");
    add_json(f.out, -1, "\"type\":\"done\"");
    add_json(f.out, -1, "\"type\":\"done\",\"status\":\"ok\",\"ranks\":{\"0\":\"ok\"}");
    is_str(plain(&f), "-- lost: [0] ? [3] lost\n", "a bad end is told, a good one is silent");
    fixture_init(&f);
    add_json(f.out, 0, "\"type\":\"stream\",\"name\":\"stdout\",\"text\":\"a\\u0000b\\n\"");
    is_str(plain(&f), "[0] a\n", "an escaped NUL ends the text, not the stream");
}

int main(void)
{
    if (!mkdtemp(folder))
        return 1;
    is_str(stream_media_type(STREAM_NDJSON), "application/x-ndjson", "media type");
    check_formats();
    check_empty_record();
    check_waiting();
    check_lanes();
    check_long_line();
    check_blocks();
    check_errors();
    util_remove_tree(folder);
    return tap_done();
}
