/* SPDX-License-Identifier: Apache-2.0 */
/*
 * journal.h - a group's events on disk: append whole lines, read back from any position.
 *
 * The journal is the one store of events: subscribers read from it, also when they are up to date
 * (the page cache answers). A position is a byte offset that stays valid for the journal's life.
 */
#ifndef DDIPD_JOURNAL_H
#define DDIPD_JOURNAL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "err.h"

struct journal;

/* Creates the file (0600); its folder must be there. NULL: *err says why. */
struct journal *journal_open(const char *path, struct err *err) ERR_MUST_CHECK;
void journal_close(struct journal *j);

/* Appends all of it or nothing. */
int journal_append(struct journal *j, const void *data, size_t len, struct err *err) ERR_MUST_CHECK;
uint64_t journal_end(const struct journal *j);

/* Reads up to cap bytes at pos. 0: pos is the end. */
ssize_t journal_read(struct journal *j, uint64_t pos, void *out, size_t cap,
                     struct err *err) ERR_MUST_CHECK;

#endif
