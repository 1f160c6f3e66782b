/* SPDX-License-Identifier: Apache-2.0 */
/* pool.c - all groups of the daemon, and what they share. Here a request to create one is judged.
 */
#include "pool.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu.h"
#include "log.h"
#include "nccl.h"

#define POOL_GRACE_S 5.0
#define POOL_APP_MAX 200 /* characters */

void pool_init(struct pool *p, uv_loop_t *loop, const struct config *config, struct hub *hub,
               struct gpu *gpu, struct nccl *nccl, struct templates *templates)
{
    *p = (struct pool){.loop = loop,
                       .config = config,
                       .hub = hub,
                       .gpu = gpu,
                       .nccl = nccl,
                       .templates = templates};
    TAILQ_INIT(&p->groups);
}

struct group *pool_find(struct pool *p, const char *name)
{
    struct group *g;
    TAILQ_FOREACH(g, &p->groups, link)
    {
        if (strcmp(g->spec.name, name) == 0)
            return g;
    }
    return NULL;
}

void pool_add(struct pool *p, struct group *g)
{
    TAILQ_INSERT_TAIL(&p->groups, g, link);
    p->groups_len++;
}

static void pool_tell_drained(struct pool *p)
{
    if (p->drained && TAILQ_EMPTY(&p->groups))
        p->drained(p->drained_ctx);
}

void pool_remove(struct pool *p, struct group *g)
{
    TAILQ_REMOVE(&p->groups, g, link);
    p->groups_len--;
    pool_tell_drained(p);
}

void pool_stop(struct pool *p, void (*drained)(void *ctx), void *ctx)
{
    struct group *g, *next;
    for (g = TAILQ_FIRST(&p->groups); g; g = next) {
        next = TAILQ_NEXT(g, link);
        group_stop(g, "the daemon is shutting down");
    }
    p->drained = drained;
    p->drained_ctx = ctx;
    pool_tell_drained(p);
}

/* --- judging a request --- */

static int pool_take_name(struct pool *p, const json *body, struct group_spec *spec,
                          struct err *err)
{
    const char *name = "default";
    if (json_get_string(body, "name", &name, err) < 0)
        return -1;
    if (!util_is_slug(name))
        return err_set(err, ERR_INVALID,
                       "\"name\" must be 1 to 64 letters, digits, '_', '.' or '-', starting with a "
                       "letter or digit, not \"%.80s\"",
                       name);
    if (pool_find(p, name)) {
        err_set(err, ERR_CONFLICT, "the group %s exists already", name);
        return err_hint(err, "use it, choose another \"name\", or DELETE /v1/groups/%s", name);
    }
    spec->name = util_strdup(name);
    return 0;
}

static int pool_take_gpus(struct pool *p, const json *gpus, struct group_spec *spec,
                          struct err *err)
{
    size_t places[256], count, max = p->config->rank_limit < 256 ? p->config->rank_limit : 256;
    if (gpu_resolve(p->gpu, gpus, places, max, &count, err) < 0)
        return -1;
    if (!nccl_available(p->nccl)) {
        err_set(err, ERR_INVALID, "GPU ranks need NCCL: %s", nccl_reason(p->nccl));
        return err_hint(err, "name the library with the setting nccl_library, or use \"ranks\"");
    }
    spec->ranks = (int)count;
    spec->gpus = util_calloc(count, sizeof(*spec->gpus));
    for (size_t i = 0; i < count; i++)
        spec->gpus[i] = (int)places[i];
    return 0;
}

static int pool_take_ranks(struct pool *p, const json *body, struct group_spec *spec,
                           struct err *err)
{
    const json *gpus = json_get(body, "gpus");
    int64_t ranks = 0;
    int found = json_get_int(body, "ranks", 1, (int64_t)p->config->rank_limit, &ranks, err);
    if (found < 0)
        return -1;
    if (gpus && found)
        return err_set(err, ERR_INVALID, "give \"ranks\" (CPU) or \"gpus\", not both");
    if (gpus)
        return pool_take_gpus(p, gpus, spec, err);
    if (!found) {
        err_set(err, ERR_INVALID, "give \"ranks\": N or \"gpus\": \"all\" or a list");
        return err_hint(err, "{\"ranks\": 2} makes two CPU ranks");
    }
    spec->ranks = (int)ranks;
    return 0;
}

static int pool_take_backend(const json *body, struct group_spec *spec, struct err *err)
{
    const char *own = spec->gpus ? "nccl" : "gloo", *backend = own;
    if (json_get_string(body, "backend", &backend, err) < 0)
        return -1;
    if (strcmp(backend, own) != 0 && !(spec->gpus && strcmp(backend, "gloo") == 0))
        return err_set(err, ERR_INVALID, "\"backend\" must be %s, not \"%.40s\"",
                       spec->gpus ? "nccl or gloo for GPU ranks" : "gloo for CPU ranks", backend);
    spec->backend = util_strdup(backend);
    return 0;
}

/* Python's dotted names, of the ASCII letters. Which apps there are is the ranks' to say. */
static bool pool_is_module(const char *s)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_";
    if (strlen(s) > POOL_APP_MAX)
        return false;
    for (;;) {
        size_t n = strspn(s, letters);
        if (n == 0 || (*s >= '0' && *s <= '9'))
            return false;
        if (s[n] == '\0')
            return true;
        if (s[n] != '.')
            return false;
        s += n + 1;
    }
}

static int pool_take_app(const json *body, struct group_spec *spec, struct err *err)
{
    const char *app = "torch";
    if (json_get_string(body, "app", &app, err) < 0)
        return -1;
    if (!pool_is_module(app)) {
        err_set(err, ERR_INVALID, "\"app\" must name an app or a module, not \"%.80s\"", app);
        return err_hint(err, "such as torch, fastai_v2, or package.module of your own");
    }
    spec->app = util_strdup(app);
    return 0;
}

static int pool_take_env(const json *body, struct group_spec *spec, struct err *err)
{
    const json *env = json_get(body, "env");
    if (!env)
        return 0;
    if (!json_is_object(env))
        return err_set(err, ERR_INVALID, "\"env\" must be an object of strings");
    for (const json *j = json_first(env); j; j = json_next(j)) {
        if (!json_string(j) || !*json_key(j) || strchr(json_key(j), '='))
            return err_set(err, ERR_INVALID,
                           "\"env\": \"%.80s\" must be a name and its value a string", json_key(j));
    }
    spec->env = json_copy(env);
    return 0;
}

static int pool_take_process(struct pool *p, const json *body, struct group_spec *spec,
                             struct err *err)
{
    const char *python = p->config->python, *cwd = getenv("HOME");
    if (!cwd || *cwd != '/')
        cwd = "/";
    if (json_get_string(body, "python", &python, err) < 0 ||
        json_get_string(body, "cwd", &cwd, err) < 0)
        return -1;
    if (*cwd != '/')
        return err_set(err, ERR_INVALID, "\"cwd\" must be an absolute path, not \"%.200s\"", cwd);
    if (!*python)
        return err_set(err, ERR_INVALID, "\"python\" is empty");
    spec->python = util_strdup(python);
    spec->cwd = util_strdup(cwd);
    spec->grace_s = POOL_GRACE_S;
    if (json_get_double(body, "grace_s", 0.1, 3600, &spec->grace_s, err) < 0)
        return -1;
    return pool_take_env(body, spec, err);
}

int pool_read_spec(struct pool *p, const json *body, uid_t uid, struct group_spec *spec,
                   struct err *err)
{
    *spec = (struct group_spec){.uid = uid};
    if (!json_is_object(body))
        err_set(err, ERR_INVALID, "the body must be a JSON object");
    else if (pool_take_name(p, body, spec, err) == 0 && pool_take_ranks(p, body, spec, err) == 0 &&
             pool_take_backend(body, spec, err) == 0 && pool_take_app(body, spec, err) == 0 &&
             pool_take_process(p, body, spec, err) == 0)
        return 0;
    group_spec_deinit(spec);
    return -1;
}

struct group *pool_create(struct pool *p, const json *body, const struct once_key *once,
                          struct err *err)
{
    struct group_spec spec;
    if (p->drained) {
        err_set(err, ERR_UNAVAILABLE, "the daemon is shutting down");
    } else if (p->groups_len >= p->config->group_limit) {
        err_set(err, ERR_UNAVAILABLE, "there are %zu groups already", p->groups_len);
        err_hint(err, "delete one, or raise group_limit");
    } else if (pool_read_spec(p, body, once->uid, &spec, err) == 0) {
        spec.once = once_key_copy(once);
        return group_new(p, &spec, err);
    }
    return NULL;
}

int pool_find_once(struct pool *p, const struct once_key *once, struct group **group,
                   struct err *err)
{
    struct group *g;
    TAILQ_FOREACH(g, &p->groups, link)
    {
        int match = once_key_match(&g->spec.once, once, err);
        if (match == 1)
            *group = g;
        if (match != 0)
            return match;
    }
    return 0;
}
