/* SPDX-License-Identifier: Apache-2.0 */
/* test_output.c - output.c: numbers, merging, and cursors into the journal. */
#include <stdlib.h>

#include "output_fixture.h"

/* --- lines --- */

static void check_line(void)
{
    struct fixture f;
    const char *line = "";
    size_t len = 0;
    struct output_mark m;
    char want[] = "{\"seq\":1,\"group\":\"g\",\"cell\":3,\"rank\":2,\"type\":\"x\",\"time\":";
    fixture_init(&f);
    ok(output_next(f.all, &line, &len, &m) == OUTPUT_WAIT, "nothing to read yet");
    ok(output_add(f.out, (struct output_origin){3, 2, 12, 0}, "\"type\":\"x\"", 10) == 1,
       "number 1");
    ok(output_next(f.all, &line, &len, &m) == OUTPUT_WAIT && f.wakes == 0, "not before a commit");
    ok(commit(f.out) && f.wakes == 1, "a commit wakes");
    ok(commit(f.out) && f.wakes == 1, "a commit of nothing does not");
    ok(output_next(f.all, &line, &len, &m) == OUTPUT_LINE, "then it is there");
    ok(strncmp(line, want, strlen(want)) == 0, "common members come first, in order");
    ok(len > 20 && memcmp(line + len - 16, ",\"rank_seq\":12}\n", 16) == 0,
       "the rank's number last");
    add(f.out, OUTPUT_NO_CELL, OUTPUT_NO_RANK, "y");
    ok(commit(f.out) && output_last_seq(f.out) == 2, "number 2");
    ok(output_next(f.all, &line, &len, &m) == OUTPUT_LINE &&
           strstr(line, "\"cell\":null,\"rank\":null,") && !memmem(line, len, "rank_seq", 8),
       "of no cell, no rank, without a number of a rank");
    fixture_deinit(&f);
}

static void check_merging(void)
{
    struct fixture f;
    fixture_init(&f);
    say(f.out, 1, 0, 1, 1, "a");
    say(f.out, 1, 0, 1, 2, "b");
    say(f.out, 1, 1, 1, 3, "other rank");
    say(f.out, 1, 1, 2, 4, "other stream");
    say(f.out, 2, 1, 2, 5, "other cell");
    say(f.out, 2, 1, 2, 0, "from the pipe");
    say(f.out, 2, 1, 2, 0, "+");
    say(f.out, 2, 1, 2, 6, "from the rank");
    add(f.out, 2, 1, "x");
    say(f.out, 2, 1, 2, 7, "after x");
    commit(f.out);
    say(f.out, 2, 1, 2, 8, "after the commit");
    say(f.out, 2, 1, 2, 9, "");
    commit(f.out);
    is_str(events(f.all),
           "1:1:0:stream:stdout:ab 2:1:1:stream:stdout:other rank 3:1:1:stream:stderr:other stream "
           "4:2:1:stream:stderr:other cell 5:2:1:stream:stderr:from the pipe+ "
           "6:2:1:stream:stderr:from the rank 7:2:1:x 8:2:1:stream:stderr:after x "
           "9:2:1:stream:stderr:after the commit",
           "text of one origin is merged until something else comes");
    say(f.out, 1, 0, 1, 20, "a\xff");
    say(f.out, 1, 0, 1, 21, "b");
    commit(f.out);
    json *j = next_event(f.all);
    int64_t number = 0;
    ok(json_integer(json_get(j, "rank_seq"), &number) && number == 21, "the newest number counts");
    is_str(json_string(json_get(j, "text")),
           "a\xef\xbf\xbd"
           "b",
           "bad UTF-8 is repaired");
    json_free(j);
    fixture_deinit(&f);
}

static void check_merge_bound(void)
{
    struct fixture f;
    json *j;
    size_t total = 0, longest = 0, count = 0;
    fixture_init(&f);
    for (int i = 0; i < 30000; i++)
        say(f.out, 1, 0, 1, 1, "0123456789");
    commit(f.out);
    while ((j = next_event(f.all)) != NULL) {
        size_t n = strlen(json_string(json_get(j, "text")));
        total += n;
        longest = n > longest ? n : longest;
        count++;
        json_free(j);
    }
    ok(total == 300000, "300 kB of merged text are all there");
    ok(longest <= 64 * 1024 && count == 5, "in events of at most 64 KiB");
    fixture_deinit(&f);
}

/* --- cursors --- */

static void check_cells(void)
{
    struct fixture f;
    int wakes = 0;
    fixture_init(&f);
    struct output_sub *two = output_subscribe(f.out, 2, 0, on_wake, &wakes);
    add(f.out, 1, 0, "x");
    add(f.out, 2, 0, "x");
    add(f.out, 1, OUTPUT_NO_RANK, "done");
    add(f.out, OUTPUT_NO_CELL, OUTPUT_NO_RANK, "done");
    add(f.out, 2, 1, "done_or_not");
    commit(f.out);
    is_str(events(two), "2:2:0:x 5:2:1:done_or_not", "a cell's events, and no others");
    ok(status(two) == OUTPUT_WAIT, "it waits: the done were not its own");
    add(f.out, 2, OUTPUT_NO_RANK, "done");
    add(f.out, 2, 0, "late");
    commit(f.out);
    is_str(events(two), "6:2:-1:done", "its done is the last");
    ok(status(two) == OUTPUT_END, "and then it ends");
    struct output_sub *late = output_subscribe(f.out, 1, 1, on_wake, &wakes);
    is_str(events(late), "3:1:-1:done", "a late reader starts after what it has");
    output_unsubscribe(late);
    late = output_subscribe(f.out, 1, 3, on_wake, &wakes);
    ok(status(late) == OUTPUT_WAIT, "one that has the done already gets nothing more");
    output_unsubscribe(late);
    output_unsubscribe(two);
    is_str(events(f.all),
           "1:1:0:x 2:2:0:x 3:1:-1:done 4:0:-1:done 5:2:1:done_or_not 6:2:-1:done "
           "7:2:0:late",
           "the reader of all cells gets everything");
    ok(status(f.all) == OUTPUT_WAIT, "and has no end");
    fixture_deinit(&f);
}

static void check_seek(void)
{
    struct fixture f;
    uint64_t most = 0;
    fixture_init(&f);
    for (int i = 0; i < 100000; i++) {
        add(f.out, (uint32_t)i % 7 + 1, 0, "x");
        if (i % 1000 == 999)
            commit(f.out);
    }
    ok(output_last_seq(f.out) == 100000, "100000 events, some 9 MB");
    ok(seek_errors(f.out, 0, 97, &most) == 0, "a reader starts at any of them");
    ok(seek_errors(f.out, 0, output_last_seq(f.out), &most) == 0,
       "at the first, and after the last");
    ok(most <= 256 * 1024, "without reading all that came before (%d bytes at most)", (int)most);
    char *big = util_malloc(400001);
    memset(big, 'y', 400000);
    big[400000] = '\0';
    for (int i = 0; i < 5; i++) {
        struct buf members = BUF_INIT;
        buf_addf(&members, "\"type\":\"big\",\"text\":\"%s\"", big);
        output_add(f.out, (struct output_origin){1, 0, 0, 0}, (char *)members.data, members.len);
        add(f.out, 1, 0, "small");
        buf_deinit(&members);
    }
    free(big);
    ok(commit(f.out) && seek_errors(f.out, 99900, 1, &(uint64_t){0}) == 0,
       "also between huge events");
    fixture_deinit(&f);
}

/* Three readers of different speed; all get the same bytes. */
static void check_speeds(void)
{
    struct fixture f;
    struct buf text[3] = {BUF_INIT, BUF_INIT, BUF_INIT};
    struct output_sub *s[3];
    int wakes[3] = {0};
    const char *line;
    size_t len;
    struct output_mark m;
    fixture_init(&f);
    s[0] = output_subscribe(f.out, OUTPUT_NO_CELL, 0, on_wake, &wakes[0]);
    s[1] = output_subscribe(f.out, OUTPUT_NO_CELL, 0, on_wake, &wakes[1]);
    for (int i = 0; i < 3000; i++) {
        add(f.out, 1, i % 4, "x");
        commit(f.out);
        for (int k = 0; k < 2; k++) {
            int turns = k == 0 ? 3 : i % 3 == 0;
            while (turns-- && output_next(s[k], &line, &len, &m) == OUTPUT_LINE)
                buf_add(&text[k], line, len);
        }
    }
    s[2] = output_subscribe(f.out, OUTPUT_NO_CELL, 0, on_wake, &wakes[2]);
    for (int k = 0; k < 3; k++) {
        while (output_next(s[k], &line, &len, &m) == OUTPUT_LINE)
            buf_add(&text[k], line, len);
        output_unsubscribe(s[k]);
    }
    ok(text[0].len > 3000 * 60, "3000 events are read one by one");
    ok(text[1].len == text[0].len && memcmp(text[1].data, text[0].data, text[0].len) == 0,
       "a slow reader gets the same");
    ok(text[2].len == text[0].len && memcmp(text[2].data, text[0].data, text[0].len) == 0,
       "and so does a late one");
    ok(wakes[0] == 3000 && wakes[1] == 3000 && wakes[2] == 0, "each was woken by each commit");
    for (int k = 0; k < 3; k++)
        buf_deinit(&text[k]);
    fixture_deinit(&f);
}

int main(void)
{
    if (!mkdtemp(folder))
        return 1;
    check_line();
    check_merging();
    check_merge_bound();
    check_cells();
    check_seek();
    check_speeds();
    util_remove_tree(folder);
    return tap_done();
}
