/* SPDX-License-Identifier: Apache-2.0 */
/* once.c - what clients asked for under an Idempotency-Key, so that asking again does nothing new.
 */
#include "once.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

struct once_entry {
    TAILQ_ENTRY(once_entry) link;
    struct once_key key;
    uint32_t cell;
};

struct once {
    TAILQ_HEAD(, once_entry) entries; /* newest last */
    size_t len;
};

/* --- one key --- */

uint64_t once_hash(uint64_t hash, const void *data, size_t len)
{
    for (size_t i = 0; i < len; i++)
        hash = (hash ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
    return hash;
}

int once_key_check(const struct once_key *key, struct err *err)
{
    size_t len = key->key ? strlen(key->key) : 1;
    bool printable = true;
    for (const char *s = key->key; s && *s; s++)
        printable &= *s >= ' ' && *s <= '~';
    if (len >= 1 && len <= ONCE_KEY_MAX && printable)
        return 0;
    err_set(err, ERR_INVALID, "the Idempotency-Key must be 1 to %d printable ASCII characters",
            ONCE_KEY_MAX);
    return err_hint(err, "a random UUID will do");
}

int once_key_match(const struct once_key *was, const struct once_key *is, struct err *err)
{
    if (!was->key || !is->key || was->uid != is->uid || strcmp(was->key, is->key) != 0)
        return 0;
    if (was->hash == is->hash)
        return 1;
    err_set(err, ERR_CONFLICT, "the Idempotency-Key \"%s\" was used for another request", is->key);
    return err_hint(err, "use a fresh key for every new request");
}

struct once_key once_key_copy(const struct once_key *key)
{
    struct once_key copy = *key;
    copy.key = key->key ? util_strdup(key->key) : NULL;
    return copy;
}

void once_key_deinit(struct once_key *key)
{
    free((char *)key->key);
    key->key = NULL;
}

void once_key_write(const struct once_key *key, struct jw *w)
{
    char hash[17]; /* as text: JSON's numbers are exact up to 2^53 only */
    if (!key->key)
        return;
    snprintf(hash, sizeof(hash), "%016" PRIx64, key->hash);
    jw_string(w, "idempotency_key", key->key);
    jw_string(w, "request_hash", hash);
}

struct once_key once_key_read(const json *j)
{
    struct once_key key = {.key = json_string(json_get(j, "idempotency_key"))};
    const char *hash = json_string(json_get(j, "request_hash"));
    struct err err = ERR_INIT;
    int64_t uid;
    if (!hash || !json_integer(json_get(j, "uid"), &uid) || once_key_check(&key, &err) < 0)
        return (struct once_key){0};
    key.uid = (uid_t)uid;
    key.hash = strtoull(hash, NULL, 16);
    return key;
}

/* --- those of a group's cells --- */

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
    once_key_deinit(&e->key);
    free(e);
}

void once_free(struct once *o)
{
    struct once_entry *e;
    while (o && (e = TAILQ_FIRST(&o->entries)) != NULL)
        once_drop(o, e);
    free(o);
}

int once_find(const struct once *o, const struct once_key *key, uint32_t *cell, struct err *err)
{
    const struct once_entry *e;
    TAILQ_FOREACH(e, &o->entries, link)
    {
        int match = once_key_match(&e->key, key, err);
        if (match == 1)
            *cell = e->cell;
        if (match != 0)
            return match;
    }
    return 0;
}

void once_add(struct once *o, const struct once_key *key, uint32_t cell)
{
    if (!key->key)
        return;
    struct once_entry *e = util_calloc(1, sizeof(*e));
    e->key = once_key_copy(key);
    e->cell = cell;
    TAILQ_INSERT_TAIL(&o->entries, e, link);
    if (++o->len > ONCE_MAX)
        once_drop(o, TAILQ_FIRST(&o->entries));
}

void once_write(const struct once *o, struct jw *w)
{
    const struct once_entry *e;
    TAILQ_FOREACH(e, &o->entries, link)
    {
        jw_object(w, NULL);
        jw_int(w, "cell", e->cell);
        jw_int(w, "uid", e->key.uid);
        once_key_write(&e->key, w);
        jw_end_object(w);
    }
}

void once_read(struct once *o, const json *j)
{
    struct once_key key = once_key_read(j);
    int64_t cell;
    if (json_integer(json_get(j, "cell"), &cell))
        once_add(o, &key, (uint32_t)cell);
}
