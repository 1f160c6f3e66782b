/* SPDX-License-Identifier: Apache-2.0 */
/* test_journal.c - journal.c: append, read, further files, the limit, and what a crash leaves. */
#include "journal.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "log.h"
#include "tap.h"

#define LIMIT (1u << 20)
#define STEP 1000 /* bytes of an append */

static char folder[] = "/tmp/ddipd-test-journal-XXXXXX";

static struct journal *open_at(const char *name, uint64_t limit)
{
    struct err err = ERR_INIT;
    char path[160];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    struct journal *j = journal_open(path, limit, &err);
    if (!j)
        printf("# %s\n", err.msg);
    return j;
}

static bool append(struct journal *j, const char *text)
{
    struct err err = ERR_INIT;
    uint64_t pos = 0;
    return journal_append(j, text, strlen(text), &pos, &err) == 0 &&
           pos + strlen(text) == journal_end(j);
}

static const char *text_at(struct journal *j, uint64_t pos, size_t cap)
{
    static char text[256];
    struct err err = ERR_INIT;
    ssize_t n = journal_read(j, pos, text, cap < 255 ? cap : 255, &err);
    text[n > 0 ? n : 0] = '\0';
    return text;
}

static void check_append(void)
{
    struct journal *j = open_at("append", LIMIT);
    ok(j && journal_end(j) == 0 && !*text_at(j, 0, 16), "a new journal is empty");
    ok(append(j, "one\n") && append(j, "two\n") && append(j, ""), "append");
    ok(journal_start(j) == 0 && journal_end(j) == 8, "the end moves, the start does not");
    is_str(text_at(j, 0, 16), "one\ntwo\n", "read all");
    is_str(text_at(j, 2, 3), "e\nt", "read a part");
    ok(!*text_at(j, 8, 16) && !*text_at(j, 99, 16), "nothing at the end and after it");
    journal_close(j);
    j = open_at("append", LIMIT);
    is_str(text_at(j, 0, 16), "one\ntwo\n", "opened again it is all there");
    ok(append(j, "three\n"), "and goes on");
    is_str(text_at(j, 0, 20), "one\ntwo\nthree\n", "behind what was there");
    journal_close(j);
    journal_close(NULL);
    struct err err = ERR_INIT;
    ok(!journal_open("/dev/null/x", LIMIT, &err) && err.code == ERR_IO &&
           strstr(err.msg, "/dev/null"),
       "nowhere to write: the error says where");
}

static void write_raw(const char *name, const char *file, const char *text, int flags)
{
    char path[160];
    snprintf(path, sizeof(path), "%s/%s/%s", folder, name, file);
    int fd = open(path, O_WRONLY | O_CREAT | flags, 0600);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
        abort();
    close(fd);
}

static void check_torn(void)
{
    static const char first[] = "00000000000000000000.ndjson";
    struct journal *j = open_at("torn", LIMIT);
    append(j, "whole\n");
    journal_close(j);
    write_raw("torn", first, "half a li", O_APPEND);
    write_raw("torn", "notes.txt", "not ours\n", 0);
    j = open_at("torn", LIMIT);
    ok(journal_end(j) == 6, "a line that was not finished is cut");
    append(j, "next\n");
    is_str(text_at(j, 0, 32), "whole\nnext\n", "what follows comes after the last whole one");
    journal_close(j);
    write_raw("torn", "00000000000000000011.ndjson", "{\"head", 0);
    j = open_at("torn", LIMIT);
    ok(journal_end(j) == 11, "a file without a whole line is as if it had never been begun");
    journal_close(j);
    char path[160];
    snprintf(path, sizeof(path), "%s/torn/00000000000000000011.ndjson", folder);
    ok(access(path, F_OK) < 0, "and is removed");
    char *big = util_malloc(200001);
    memset(big, 'x', 200000);
    big[200000] = '\0';
    write_raw("torn", first, big, O_APPEND);
    j = open_at("torn", LIMIT);
    ok(journal_end(j) == 11, "also one of 200 kB");
    journal_close(j);
    free(big);
}

static void put_head(void *ctx, struct buf *out)
{
    ++*(int *)ctx;
    buf_adds(out, "head\n");
}

static void check_limit(void)
{
    char line[STEP + 1];
    int heads = 0, files = 0;
    uint64_t most = 0;
    bool all = true;
    struct journal *j = open_at("limit", LIMIT);
    journal_set_head(j, put_head, &heads);
    for (int i = 0; i < 4000; i++) {
        snprintf(line, sizeof(line), "%*d\n", STEP - 1, i);
        all &= append(j, line);
        uint64_t size = journal_end(j) - journal_start(j);
        most = size > most ? size : most;
    }
    ok(all && journal_end(j) > 4000u * STEP, "4 MB are taken");
    ok(most <= LIMIT + STEP, "and never more kept than the limit (%d bytes)", (int)most);
    ok(journal_end(j) - journal_start(j) > LIMIT / 2, "nor much less");
    ok(heads > 20, "every further file has a head");
    is_str(text_at(j, journal_start(j), 5), "head\n", "the oldest that is kept starts with it");
    ok(!*text_at(j, journal_start(j) - 1, 5), "before it there is nothing");
    uint64_t start = journal_start(j), end = journal_end(j);
    int numbers = 0, last = -1;
    for (uint64_t pos = start; pos < end;) {
        const char *text = text_at(j, pos, 5);
        if (strcmp(text, "head\n") == 0) {
            pos += 5;
            files++;
            continue;
        }
        char number[32] = "";
        snprintf(number, sizeof(number), "%s", text_at(j, pos + STEP - 11, 10));
        int n = atoi(number);
        numbers += last < 0 || n == last + 1;
        last = n;
        pos += STEP;
    }
    ok(last == 3999 && numbers > 400 && files >= 7, "lines go on over files without a hole");
    journal_close(j);
    j = open_at("limit", LIMIT);
    ok(journal_start(j) == start && journal_end(j) == end, "opened again: the same positions");
    journal_close(j);
}

int main(void)
{
    log_set_level(LOG_LEVEL_ERROR);
    if (!mkdtemp(folder))
        return 1;
    check_append();
    check_torn();
    check_limit();
    util_remove_tree(folder);
    return tap_done();
}
