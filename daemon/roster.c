/* SPDX-License-Identifier: Apache-2.0 */
/* roster.c - what of a group outlives the daemon, besides its events: who its processes are. */
#include "roster.h"

#include <stdlib.h>

#include "cell.h"
#include "gpu.h"
#include "log.h"
#include "pool.h"
#include "recall.h"
#include "start.h"

static void roster_write_process(struct jw *w, const char *key, const struct worker *worker)
{
    if (!worker) {
        jw_null(w, key);
        return;
    }
    jw_object(w, key);
    jw_int(w, "pid", worker_pid(worker));
    jw_int(w, "started", (int64_t)worker_started(worker));
    jw_string(w, "secret", worker_secret(worker));
    jw_end_object(w);
}

int roster_read_process(const json *j, struct worker_past *past)
{
    struct err err = ERR_INIT;
    int64_t pid = 0, started = 0;
    *past = (struct worker_past){.secret = json_string(json_get(j, "secret"))};
    if (!json_is_object(j) || !past->secret ||
        json_get_int(j, "pid", 2, 1 << 30, &pid, &err) != 1 ||
        json_get_int(j, "started", 1, INT64_MAX, &started, &err) != 1)
        return 0;
    past->pid = (pid_t)pid;
    past->started = (uint64_t)started;
    return 1;
}

/* The body of the request that would make the same group. */
static void roster_write_request(struct jw *w, const struct group *g)
{
    const struct group_spec *s = &g->spec;
    jw_object(w, "request");
    jw_string(w, "name", s->name);
    if (s->gpus) {
        jw_array(w, "gpus");
        for (int i = 0; i < s->ranks; i++)
            jw_string(w, NULL, gpu_at(g->pool->gpu, (size_t)s->gpus[i])->uuid);
        jw_end_array(w);
    } else {
        jw_int(w, "ranks", s->ranks);
    }
    jw_string(w, "backend", s->backend);
    jw_string(w, "app", s->app);
    jw_string(w, "python", s->python);
    jw_string(w, "cwd", s->cwd);
    if (s->env)
        jw_json(w, "env", s->env);
    jw_double(w, "grace_s", s->grace_s);
    jw_end_object(w);
}

int roster_write(struct group *g, struct err *err)
{
    struct buf out = BUF_INIT;
    struct jw w = JW_INIT(&out);
    jw_object(&w, NULL);
    jw_int(&w, "format", ROSTER_FORMAT);
    jw_int(&w, "protocol", START_PROTOCOL);
    jw_double(&w, "created", g->created);
    jw_int(&w, "uid", g->spec.uid);
    once_key_write(&g->spec.once, &w);
    jw_int(&w, "generation", g->generation);
    roster_write_request(&w, g);
    roster_write_process(&w, "store", g->store);
    jw_string(&w, "store_host", g->store_host);
    jw_int(&w, "store_port", g->store_port);
    jw_array(&w, "ranks");
    for (int i = 0; i < g->spec.ranks; i++)
        roster_write_process(&w, NULL, g->ranks[i].worker);
    jw_end_array(&w);
    jw_end_object(&w);
    buf_addc(&out, '\n');
    char *path = util_printf("%s/" ROSTER_FILE, g->dir);
    int rc = util_write_file(path, 0600, out.data, out.len, err);
    free(path);
    buf_deinit(&out);
    return rc;
}

void roster_save(struct group *g)
{
    struct err err = ERR_INIT;
    bool failing = roster_write(g, &err) < 0;
    if (failing && !g->roster_failing)
        log_error("group=%s: %s; until that works, a later daemon does not know all its processes",
                  g->spec.name, err.msg);
    g->roster_failing = failing;
    if (failing)
        group_write_later(g);
}

static void roster_head(void *ctx, struct jw *w)
{
    const struct group *g = ctx;
    const struct cell *c;
    jw_string(w, "state", group_state_text(g));
    jw_string(w, "reason", g->reason.msg);
    jw_int(w, "generation", g->generation);
    jw_bool(w, "was_ready", g->was_ready);
    jw_bool(w, "aborted", g->aborted);
    jw_int(w, "last_cell", g->last_cell);
    jw_array(w, "cells");
    TAILQ_FOREACH(c, &g->cells, link)
    {
        if (c->finished <= 0)
            recall_write(c, w);
    }
    jw_end_array(w);
    jw_array(w, "once");
    once_write(g->once, w);
    jw_end_array(w);
}

static uint64_t roster_cell_last(void *ctx, uint32_t number)
{
    const struct cell *c = cell_find(ctx, number);
    return !c ? 0 : c->finished > 0 ? c->last_seq : UINT64_MAX;
}

const struct output_owner roster_owner = {.head = roster_head, .cell_last = roster_cell_last};
