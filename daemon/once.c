/* SPDX-License-Identifier: Apache-2.0 */
/* once.c - what a client asked for under an Idempotency-Key, so that asking again does nothing new.
 */
#include "once.h"

#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

struct once_entry {
    TAILQ_ENTRY(once_entry) link;
    uid_t uid;
    char *key, *scope, *group;
    double group_created; /* a later group of the same name is another */
    uint32_t cell;
    uint64_t hash;
};

struct once {
    TAILQ_HEAD(, once_entry) entries; /* newest last */
    size_t len;
};

struct once *once_new(void)
{
    struct once *o = util_calloc(1, sizeof(*o));
    TAILQ_INIT(&o->entries);
    return o;
}

static void once_drop(struct once *o, struct once_entry *e)
{
    TAILQ_REMOVE(&o->entries, e, link);
    o->len--;
    free(e->key);
    free(e->scope);
    free(e->group);
    free(e);
}

void once_free(struct once *o)
{
    struct once_entry *e;
    while (o && (e = TAILQ_FIRST(&o->entries)) != NULL)
        once_drop(o, e);
    free(o);
}

uint64_t once_hash(uint64_t hash, const void *data, size_t len)
{
    for (size_t i = 0; i < len; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
    return hash;
}

int once_find(struct once *o, struct pool *pool, const struct once_key *key, struct group **group,
              struct cell **cell, struct err *err)
{
    struct once_entry *e;
    if (!key->key)
        return 0;
    TAILQ_FOREACH(e, &o->entries, link)
    {
        if (e->uid == key->uid && strcmp(e->key, key->key) == 0 &&
            strcmp(e->scope, key->scope) == 0)
            break;
    }
    if (!e)
        return 0;
    *group = pool_find(pool, e->group);
    if (!*group || (*group)->created != e->group_created) {
        once_drop(o, e);
        *group = NULL;
        return 0;
    }
    if (e->hash != key->hash) {
        *group = NULL;
        err_set(err, ERR_CONFLICT, "the Idempotency-Key \"%.80s\" was used for another request",
                key->key);
        return err_hint(err, "use a fresh key for every new request");
    }
    if (e->cell && !(*cell = cell_find(*group, e->cell)))
        return err_set(err, ERR_GONE,
                       "the request was done as cell %u, whose record is not kept "
                       "any more",
                       e->cell);
    return 1;
}

void once_add(struct once *o, const struct once_key *key, const struct group *group, uint32_t cell)
{
    if (!key->key)
        return;
    struct once_entry *e = util_calloc(1, sizeof(*e));
    *e = (struct once_entry){.uid = key->uid,
                             .key = util_strdup(key->key),
                             .scope = util_strdup(key->scope),
                             .group = util_strdup(group->spec.name),
                             .group_created = group->created,
                             .cell = cell,
                             .hash = key->hash};
    TAILQ_INSERT_TAIL(&o->entries, e, link);
    if (++o->len > ONCE_MAX)
        once_drop(o, TAILQ_FIRST(&o->entries));
}
