/* SPDX-License-Identifier: Apache-2.0 */
/* pool.h - all groups of the daemon, and what they share. */
#ifndef DDIPD_POOL_H
#define DDIPD_POOL_H

#include <sys/queue.h>
#include <sys/types.h>
#include <uv.h>

#include "config.h"
#include "group.h"

struct hub;
struct gpu;
struct nccl;
struct templates;

struct pool {
    uv_loop_t *loop;
    const struct config *config;
    struct hub *hub;
    struct gpu *gpu;
    struct nccl *nccl;
    struct templates *templates;
    TAILQ_HEAD(, group) groups;
    size_t groups_len;
    void (*drained)(void *ctx); /* set by pool_stop */
    void *drained_ctx;
};

void pool_init(struct pool *p, uv_loop_t *loop, const struct config *config, struct hub *hub,
               struct gpu *gpu, struct nccl *nccl, struct templates *templates);

struct group *pool_find(struct pool *p, const char *name);

/* What "POST /v1/groups" says, checked and completed. */
int pool_read_spec(struct pool *p, const json *body, uid_t uid, struct group_spec *spec,
                   struct err *err) ERR_MUST_CHECK;
/* A group as that says, asked for by once->uid. NULL: *err. */
struct group *pool_create(struct pool *p, const json *body, const struct once_key *once,
                          struct err *err) ERR_MUST_CHECK;
/* As once_key_match; 1: *group was made by that request. */
int pool_find_once(struct pool *p, const struct once_key *once, struct group **group,
                   struct err *err) ERR_MUST_CHECK;

/* For group.c: a group has come or gone. */
void pool_add(struct pool *p, struct group *g);
void pool_remove(struct pool *p, struct group *g);

/* Stops every group; drained is called when none is left, perhaps within this call. */
void pool_stop(struct pool *p, void (*drained)(void *ctx), void *ctx);

#endif
