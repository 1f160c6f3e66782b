/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal.h - a group's events on disk: append whole lines, read back from any position.
 *
 * The journal is the one store of events: subscribers read from it, also when they are up to date
 * (the page cache answers). It is a row of files, each named after the position of its first byte;
 * a position counts bytes since the group's first event and stays valid. When the files hold more
 * than the limit, the oldest goes: journal_start says from where on events are still there.
 */
#ifndef DDIPD_JOURNAL_H
#define DDIPD_JOURNAL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "err.h"
#include "util.h"

struct journal;

/*
 * Opens the journal in the folder dir, which is made if it is not there; what an unfinished append
 * left behind the last whole line is cut off. limit: bytes kept. NULL: *err says why.
 */
struct journal *journal_open(const char *dir, uint64_t limit, struct err *err) ERR_MUST_CHECK;
void journal_close(struct journal *j);

/* What every further file starts with: whole lines, written by fill. */
void journal_set_head(struct journal *j, void (*fill)(void *ctx, struct buf *out), void *ctx);

/* Appends whole lines: all of them or nothing, in one file. *pos: where they start. */
int journal_append(struct journal *j, const void *data, size_t len, uint64_t *pos,
                   struct err *err) ERR_MUST_CHECK;

/* The positions of the first byte that is kept, and after the last. */
uint64_t journal_start(const struct journal *j);
uint64_t journal_end(const struct journal *j);

/* Reads up to cap bytes at pos. 0: pos is the end, or no longer kept. */
ssize_t journal_read(struct journal *j, uint64_t pos, void *out, size_t cap,
                     struct err *err) ERR_MUST_CHECK;

#endif
