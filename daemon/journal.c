/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal.c - a group's events on disk: append whole lines, read back from any position.
 *
 * write(2) into the page cache is enough: it survives the death of this process, which is the
 * promise; it does not survive a power cut, which is not. A short write (full disk) is cut back, so
 * the file only ever grows by whole appends.
 */
#include "journal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "log.h"
#include "util.h"

struct journal {
    int fd;
    uint64_t end;
    char *path;
};

struct journal *journal_open(const char *path, struct err *err)
{
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) {
        err_errno(err, ERR_IO, errno, "cannot create the journal %s", path);
        return NULL;
    }
    struct journal *j = util_calloc(1, sizeof(*j));
    j->fd = fd;
    j->path = util_strdup(path);
    return j;
}

void journal_close(struct journal *j)
{
    if (!j)
        return;
    close(j->fd);
    free(j->path);
    free(j);
}

int journal_append(struct journal *j, const void *data, size_t len, struct err *err)
{
    size_t done = 0;
    while (done < len) {
        ssize_t n = pwrite(j->fd, (const char *)data + done, len - done, (off_t)(j->end + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            int why = n < 0 ? errno : ENOSPC;
            if (ftruncate(j->fd, (off_t)j->end) < 0)
                log_error("journal %s: cannot cut back: %s", j->path, strerror(errno));
            return err_errno(err, ERR_IO, why, "cannot append to the journal %s", j->path);
        }
        done += (size_t)n;
    }
    j->end += len;
    return 0;
}

uint64_t journal_end(const struct journal *j)
{
    return j->end;
}

ssize_t journal_read(struct journal *j, uint64_t pos, void *out, size_t cap, struct err *err)
{
    if (pos >= j->end)
        return 0;
    if (cap > j->end - pos)
        cap = (size_t)(j->end - pos);
    ssize_t n;
    do {
        n = pread(j->fd, out, cap, (off_t)pos);
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return err_errno(err, ERR_IO, errno, "cannot read the journal %s", j->path);
    return n;
}
