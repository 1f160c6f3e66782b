/* SPDX-License-Identifier: Apache-2.0 */
/* test_output_end.c - output.c: what remains when a group ends, and a full disk. */
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "log.h"
#include "output_fixture.h"

/* --- the end --- */

static void check_close(void)
{
    struct fixture f;
    fixture_init(&f);
    say(f.out, 1, 0, 1, 1, "not committed");
    output_close(f.out, true);
    ok(f.wakes == 2 && access(f.dir, F_OK) < 0, "closing commits, wakes and removes the files");
    is_str(events(f.all), "1:1:0:stream:stdout:not committed",
           "a reader still gets what was there");
    ok(status(f.all) == OUTPUT_END && status(f.all) == OUTPUT_END, "then the end");
    output_unsubscribe(f.all);
    fixture_init(&f);
    output_unsubscribe(f.all);
    add(f.out, 1, 0, "x");
    output_close(f.out, false);
    char path[160];
    struct stat st;
    snprintf(path, sizeof(path), "%s/journal/%020d.ndjson", f.dir, 0);
    ok(stat(path, &st) == 0 && st.st_size > 50 && (st.st_mode & 0777) == 0600,
       "files that are to stay are for the owner alone");
    struct err err = ERR_INIT;
    ok(!output_open("/dev/null/x", "g", 1 << 20, &err) && strstr(err.msg, "/dev/null"),
       "nowhere to write");
    output_close(NULL, true);
    output_unsubscribe(NULL);
}

/* --- a full disk --- */

static void limit_files(rlim_t bytes)
{
    struct rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = bytes == RLIM_INFINITY ? limit.rlim_max : bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
}

static off_t journal_size(const struct fixture *f)
{
    char path[160];
    struct stat st;
    snprintf(path, sizeof(path), "%s/journal/%020d.ndjson", f->dir, 0);
    return stat(path, &st) == 0 ? st.st_size : -1;
}

/* Reads everything; the numbers must go up by one from `from`. */
static uint64_t contiguous(struct output_sub *s, uint64_t from)
{
    json *j;
    while ((j = next_event(s)) != NULL) {
        int64_t seq = 0;
        bool good = json_integer(json_get(j, "seq"), &seq) && (uint64_t)seq == from;
        json_free(j);
        if (!good)
            return 0;
        from++;
    }
    return from;
}

static void check_full_disk(void)
{
    struct fixture f;
    struct err err = ERR_INIT;
    fixture_init(&f);
    for (int i = 0; i < 2000; i++)
        add(f.out, 1, 0, "x");
    ok(commit(f.out) && contiguous(f.all, 1) == 2001, "2000 events go well");
    off_t size = journal_size(&f);
    limit_files((rlim_t)size + 1000);
    for (int i = 0; i < 1000; i++)
        add(f.out, 1, 0, "x");
    f.wakes = 0;
    ok(output_commit(f.out, &err) < 0 && err.code == ERR_IO, "the next 1000 do not fit");
    ok(strstr(err.msg, "cannot append to the journal") && strstr(err.msg, "File too large"),
       "and the error says where and why");
    ok(journal_size(&f) == size, "the part that did is cut off again");
    ok(f.wakes == 0 && status(f.all) == OUTPUT_WAIT, "nobody is woken, nothing is to be read");
    say(f.out, 1, 0, 1, 1, "meanwhile");
    ok(!commit(f.out) && journal_size(&f) == size, "it still fails, with more to write");
    int wakes = 0;
    struct output_sub *late = output_subscribe(f.out, OUTPUT_NO_CELL, 0, on_wake, &wakes);
    ok(contiguous(late, 1) == 2001, "a late reader gets whole lines");
    limit_files(RLIM_INFINITY);
    add(f.out, 1, OUTPUT_NO_RANK, "done");
    ok(commit(f.out) && f.wakes == 1, "when there is room again it goes on");
    ok(contiguous(f.all, 2001) == 3003 && contiguous(late, 2001) == 3003,
       "nothing is lost, no number missing");
    ok(seek_errors(f.out, 0, 1, &(uint64_t){0}) == 0, "and every event is found");
    output_unsubscribe(late);
    fixture_deinit(&f);
}

static void check_retract(void)
{
    struct fixture f;
    fixture_init(&f);
    for (int i = 0; i < 1500; i++)
        add(f.out, 1, 0, "x");
    ok(commit(f.out), "1500 events go well");
    limit_files((rlim_t)journal_size(&f));
    for (int i = 0; i < 1500; i++)
        add(f.out, 2, OUTPUT_NO_RANK, "x");
    ok(!commit(f.out) && output_failing(f.out), "what follows does not fit");
    output_retract(f.out, 1500);
    ok(!output_failing(f.out) && commit(f.out) && output_last_seq(f.out) == 1500,
       "taken back, nothing waits any more");
    limit_files(RLIM_INFINITY);
    for (int i = 0; i < 1500; i++)
        add(f.out, 3, OUTPUT_NO_RANK, i < 1499 ? "x" : "done");
    ok(commit(f.out) && contiguous(f.all, 1) == 3001, "its numbers are given again");
    ok(seek_errors(f.out, 0, 1, &(uint64_t){0}) == 0, "and every event is found");
    fixture_deinit(&f);
}

int main(void)
{
    signal(SIGXFSZ, SIG_IGN);
    log_set_level(LOG_LEVEL_ERROR);
    if (!mkdtemp(folder))
        return 1;
    check_close();
    check_full_disk();
    check_retract();
    util_remove_tree(folder);
    return tap_done();
}
