/* SPDX-License-Identifier: Apache-2.0 */
/*
 * once.h - what a client asked for under an Idempotency-Key, so that asking again does nothing new.
 *
 * A key belongs to a user and a scope (the groups, or one group's cells). It is remembered as long
 * as its group lives, the last ONCE_MAX of them.
 */
#ifndef DDIPD_ONCE_H
#define DDIPD_ONCE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "cell.h"
#include "err.h"
#include "pool.h"

#define ONCE_MAX 1024
#define ONCE_HASH_INIT 0xcbf29ce484222325u

struct once;

struct once_key {
    uid_t uid;
    const char *key; /* NULL: the client gave none, nothing is remembered */
    const char *scope;
    uint64_t hash; /* of what was asked */
};

struct once *once_new(void);
void once_free(struct once *o);

/* FNV-1a, to be continued with another call. */
uint64_t once_hash(uint64_t hash, const void *data, size_t len);

/* 0: not seen; 1: *group, and *cell where a cell was made, are what was made then; -1: the key was
 * used for something else, or the cell's record is no longer kept. */
int once_find(struct once *o, struct pool *pool, const struct once_key *key, struct group **group,
              struct cell **cell, struct err *err) ERR_MUST_CHECK;
/* cell 0: the group itself was made. */
void once_add(struct once *o, const struct once_key *key, const struct group *group, uint32_t cell);

#endif
