/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal.c - a group's events on disk: append whole lines, read back from any position.
 *
 * write(2) into the page cache is enough: it survives the death of this process, which is the
 * promise; it does not survive a power cut, which is not. A short write (full disk) is cut back, so
 * a file only ever grows by whole appends; a process killed inside write leaves a torn line, which
 * the next journal_open cuts.
 */
#include "journal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "log.h"

#define JOURNAL_FILES 8 /* the limit is kept in steps of an eighth */
#define JOURNAL_FILE_MIN (64 * 1024)
#define JOURNAL_FILES_MAX 4096 /* found in a folder: more is not ours */
#define JOURNAL_NAME "%020llu.ndjson"
#define JOURNAL_TAIL (64 * 1024)

struct journal_file {
    uint64_t start, len;
    int fd;
};

struct journal {
    char *dir;
    uint64_t limit, file_max;
    struct journal_file *files; /* oldest first; the last one grows */
    size_t len, cap;
    void (*fill)(void *ctx, struct buf *out);
    void *ctx;
};

static char *journal_path(const struct journal *j, uint64_t start)
{
    return util_printf("%s/" JOURNAL_NAME, j->dir, (unsigned long long)start);
}

static struct journal_file *journal_add_file(struct journal *j, uint64_t start, int flags,
                                             struct err *err)
{
    char *path = journal_path(j, start);
    struct stat st;
    int fd = open(path, O_RDWR | O_CLOEXEC | flags, 0600);
    if (fd < 0 || fstat(fd, &st) < 0) {
        err_errno(err, ERR_IO, errno, "cannot open the journal %s", path);
        if (fd >= 0)
            close(fd);
        free(path);
        return NULL;
    }
    free(path);
    if (j->len == j->cap) {
        j->cap = j->cap ? 2 * j->cap : JOURNAL_FILES + 2;
        j->files = util_realloc(j->files, j->cap * sizeof(*j->files));
    }
    j->files[j->len] = (struct journal_file){start, (uint64_t)st.st_size, fd};
    return &j->files[j->len++];
}

static struct journal_file *journal_last(const struct journal *j)
{
    return &j->files[j->len - 1];
}

/* --- what an earlier daemon left --- */

static int journal_compare(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* The starts of the files in the folder, in order. */
static size_t journal_scan(const struct journal *j, uint64_t *starts, size_t max)
{
    size_t n = 0;
    struct dirent *e;
    DIR *dir = opendir(j->dir);
    while (dir && n < max && (e = readdir(dir)) != NULL) {
        char digits[21] = "";
        if (strlen(e->d_name) != 27 || strcmp(e->d_name + 20, ".ndjson") != 0)
            continue;
        memcpy(digits, e->d_name, 20);
        if (util_parse_u64(digits, 0, UINT64_MAX, &starts[n]) == 0)
            n++;
    }
    if (dir)
        closedir(dir);
    qsort(starts, n, sizeof(*starts), journal_compare);
    return n;
}

/* Cuts the newest file after its last whole line. */
static int journal_cut_torn(struct journal *j, struct err *err)
{
    struct journal_file *f = journal_last(j);
    char *tail = util_malloc(JOURNAL_TAIL);
    uint64_t keep = f->len;
    while (keep) {
        size_t n = keep < JOURNAL_TAIL ? (size_t)keep : JOURNAL_TAIL;
        if (pread(f->fd, tail, n, (off_t)(keep - n)) != (ssize_t)n)
            break;
        const char *nl = memrchr(tail, '\n', n);
        if (nl) {
            keep -= n - (size_t)(nl - tail) - 1;
            break;
        }
        keep -= n;
    }
    free(tail);
    if (keep == f->len)
        return 0;
    log_warn("journal %s: cutting %llu bytes of a line that was not finished", j->dir,
             (unsigned long long)(f->len - keep));
    if (ftruncate(f->fd, (off_t)keep) < 0)
        return err_errno(err, ERR_IO, errno, "cannot cut the journal in %s", j->dir);
    f->len = keep;
    if (!keep && j->len > 1) { /* it had not even got its head: the next append makes it anew */
        char *path = journal_path(j, f->start);
        unlink(path);
        free(path);
        close(f->fd);
        j->len--;
    }
    return 0;
}

static int journal_open_files(struct journal *j, struct err *err)
{
    uint64_t *starts = util_calloc(JOURNAL_FILES_MAX, sizeof(*starts));
    size_t n = journal_scan(j, starts, JOURNAL_FILES_MAX);
    int rc = 0;
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = journal_add_file(j, starts[i], 0, err) ? 0 : -1;
    free(starts);
    if (rc == 0 && j->len)
        return journal_cut_torn(j, err);
    return rc == 0 && journal_add_file(j, 0, O_CREAT | O_EXCL, err) ? 0 : -1;
}

struct journal *journal_open(const char *dir, uint64_t limit, struct err *err)
{
    if (util_mkdirs(dir, 0700, err) < 0)
        return NULL;
    struct journal *j = util_calloc(1, sizeof(*j));
    j->dir = util_strdup(dir);
    j->limit = limit;
    j->file_max =
        limit / JOURNAL_FILES > JOURNAL_FILE_MIN ? limit / JOURNAL_FILES : JOURNAL_FILE_MIN;
    if (journal_open_files(j, err) == 0)
        return j;
    journal_close(j);
    return NULL;
}

void journal_close(struct journal *j)
{
    if (!j)
        return;
    for (size_t i = 0; i < j->len; i++)
        close(j->files[i].fd);
    free(j->files);
    free(j->dir);
    free(j);
}

void journal_set_head(struct journal *j, void (*fill)(void *ctx, struct buf *out), void *ctx)
{
    j->fill = fill;
    j->ctx = ctx;
}

/* --- append --- */

static void journal_drop_oldest(struct journal *j)
{
    char *path = journal_path(j, j->files[0].start);
    if (unlink(path) < 0)
        log_warn("cannot remove %s: %s", path, strerror(errno));
    free(path);
    close(j->files[0].fd);
    memmove(j->files, j->files + 1, --j->len * sizeof(*j->files));
}

static int journal_write(const struct journal *j, struct journal_file *f, const void *data,
                         size_t len, struct err *err)
{
    size_t done = 0;
    while (done < len) {
        ssize_t n = pwrite(f->fd, (const char *)data + done, len - done, (off_t)(f->len + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            int why = n < 0 ? errno : ENOSPC;
            if (ftruncate(f->fd, (off_t)f->len) < 0)
                log_error("journal %s: cannot cut back: %s", j->dir, strerror(errno));
            return err_errno(err, ERR_IO, why, "cannot append to the journal in %s", j->dir);
        }
        done += (size_t)n;
    }
    f->len += len;
    return 0;
}

/* A new file, with its head. On failure things are as before, and the next append tries again. */
static int journal_turn(struct journal *j, struct err *err)
{
    struct buf head = BUF_INIT;
    struct journal_file *f = journal_add_file(j, journal_end(j), O_CREAT | O_TRUNC, err);
    if (!f)
        return -1;
    if (j->fill)
        j->fill(j->ctx, &head);
    int rc = journal_write(j, f, head.data, head.len, err);
    buf_deinit(&head);
    if (rc < 0) {
        char *path = journal_path(j, f->start);
        unlink(path);
        free(path);
        close(f->fd);
        j->len--;
    }
    return rc;
}

int journal_append(struct journal *j, const void *data, size_t len, uint64_t *pos, struct err *err)
{
    if (journal_last(j)->len >= j->file_max && journal_turn(j, err) < 0)
        return -1;
    *pos = journal_end(j);
    if (journal_write(j, journal_last(j), data, len, err) < 0)
        return -1;
    while (j->len > 1 && journal_end(j) - journal_start(j) > j->limit)
        journal_drop_oldest(j);
    return 0;
}

uint64_t journal_start(const struct journal *j)
{
    return j->files[0].start;
}

uint64_t journal_end(const struct journal *j)
{
    return journal_last(j)->start + journal_last(j)->len;
}

/* --- read --- */

static const struct journal_file *journal_find(const struct journal *j, uint64_t pos)
{
    for (size_t i = j->len; i-- > 0;) {
        if (pos >= j->files[i].start)
            return pos < j->files[i].start + j->files[i].len ? &j->files[i] : NULL;
    }
    return NULL;
}

ssize_t journal_read(struct journal *j, uint64_t pos, void *out, size_t cap, struct err *err)
{
    const struct journal_file *f = journal_find(j, pos);
    ssize_t n;
    if (!f)
        return 0;
    if (cap > f->start + f->len - pos)
        cap = (size_t)(f->start + f->len - pos);
    do {
        n = pread(f->fd, out, cap, (off_t)(pos - f->start));
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return err_errno(err, ERR_IO, errno, "cannot read the journal in %s", j->dir);
    return n;
}
