/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blob.c - a namespace value on its way to ranks: filled from a body, sealed, passed by descriptor.
 *
 * write(2) into a memfd, not a mapping: fresh pages through a mapping cost a fault each, several
 * times the copy. Ranks map the file privately, so one copy serves all of them.
 */
#include "blob.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

static int blob_make(struct blob *b, struct err *err)
{
    if (b->fd < 0)
        b->fd = memfd_create("ddip-push", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    return b->fd < 0 ? err_errno(err, ERR_IO, errno, "memfd_create") : 0;
}

int blob_write(struct blob *b, const void *data, size_t len, uint64_t limit, struct err *err)
{
    if (len > limit || b->size > limit - len) {
        err_set(err, ERR_TOO_LARGE, "the value is larger than %llu bytes",
                (unsigned long long)limit);
        return err_hint(err, "the setting payload_limit says how large one may be");
    }
    if (blob_make(b, err) < 0)
        return -1;
    size_t done = 0;
    while (done < len) {
        ssize_t n = write(b->fd, (const char *)data + done, len - done);
        if (n < 0 && errno != EINTR)
            return err_errno(err, ERR_UNAVAILABLE, errno, "no memory for the value");
        done += n > 0 ? (size_t)n : 0;
    }
    b->size += len;
    return 0;
}

int blob_seal(struct blob *b, struct err *err)
{
    if (blob_make(b, err) < 0)
        return -1;
    if (fcntl(b->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL) < 0)
        return err_errno(err, ERR_IO, errno, "cannot seal the value");
    int fd = b->fd;
    b->fd = -1;
    return fd;
}

int blob_read(const struct blob *b, uint64_t max, struct buf *out, struct err *err)
{
    if (b->size > max)
        return err_set(err, ERR_TOO_LARGE, "the body is larger than %llu bytes",
                       (unsigned long long)max);
    if (b->fd < 0)
        return 0;
    ssize_t n = pread(b->fd, buf_room(out, (size_t)b->size), (size_t)b->size, 0);
    if (n != (ssize_t)b->size)
        return err_errno(err, ERR_IO, errno, "cannot read the body back");
    out->len += (size_t)n;
    return 0;
}

void blob_deinit(struct blob *b)
{
    if (b->fd >= 0)
        close(b->fd);
    *b = (struct blob)BLOB_INIT;
}
