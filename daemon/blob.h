/* SPDX-License-Identifier: Apache-2.0 */
/* blob.h - a namespace value on its way to ranks: filled from a body, sealed, passed by descriptor.
 */
#ifndef DDIPD_BLOB_H
#define DDIPD_BLOB_H

#include <stddef.h>
#include <stdint.h>

#include "err.h"
#include "util.h"

struct blob {
    int fd; /* a memory file, or -1 */
    uint64_t size;
};

#define BLOB_INIT                                                                                  \
    {                                                                                              \
        .fd = -1                                                                                   \
    }

/* Appends; the file is made by the first call. limit: bytes it may have in all. */
int blob_write(struct blob *b, const void *data, size_t len, uint64_t limit,
               struct err *err) ERR_MUST_CHECK;
/* No more bytes: nobody can change it any more. An empty blob gets its file here. Returns the
 * descriptor, which is the caller's then. */
int blob_seal(struct blob *b, struct err *err) ERR_MUST_CHECK;
/* Reads a blob back, at most max bytes. */
int blob_read(const struct blob *b, uint64_t max, struct buf *out, struct err *err) ERR_MUST_CHECK;
void blob_deinit(struct blob *b);

#endif
