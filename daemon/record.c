/* SPDX-License-Identifier: Apache-2.0 */
/* record.c - groups, cells and GPUs as the JSON objects the API shows (proto/openapi.yaml). */
#include "record.h"

#include <stdio.h>
#include <string.h>

#include "rank.h"

static void record_time(struct jw *w, const char *key, double t)
{
    if (t > 0)
        jw_double(w, key, t);
    else
        jw_null(w, key);
}

static void record_rank(struct jw *w, const struct group *g, const struct rank *r)
{
    jw_object(w, NULL);
    jw_int(w, "rank", r->index);
    if (r->worker && worker_pid(r->worker))
        jw_int(w, "pid", worker_pid(r->worker));
    else
        jw_null(w, "pid");
    if (r->gpu >= 0) {
        const struct gpu_device *d = gpu_at(g->pool->gpu, (size_t)r->gpu);
        jw_object(w, "gpu");
        jw_int(w, "index", d->index);
        jw_string(w, "uuid", d->uuid);
        jw_string(w, "name", d->name);
        jw_end_object(w);
    } else {
        jw_null(w, "gpu");
    }
    jw_string(w, "state", rank_state_name(r->state));
    if (r->memory_bytes >= 0)
        jw_int(w, "memory_bytes", r->memory_bytes);
    else
        jw_null(w, "memory_bytes");
    jw_end_object(w);
}

void record_group(struct jw *w, const struct group *g)
{
    jw_object(w, NULL);
    jw_string(w, "name", g->spec.name);
    jw_string(w, "state", group_state_name(g));
    jw_string(w, "reason", g->reason.msg[0] ? g->reason.msg : NULL);
    jw_int(w, "generation", g->generation);
    jw_string(w, "backend", g->spec.backend);
    jw_int(w, "world_size", g->spec.ranks);
    jw_string(w, "app", g->spec.app);
    jw_string(w, "python", g->spec.python);
    jw_string(w, "cwd", g->spec.cwd);
    jw_double(w, "grace_s", g->spec.grace_s);
    jw_int(w, "uid", g->spec.uid);
    jw_double(w, "created", g->created);
    jw_array(w, "ranks");
    for (int i = 0; i < g->spec.ranks; i++)
        record_rank(w, g, &g->ranks[i]);
    jw_end_array(w);
    const struct cell *running = cell_running(g);
    if (running)
        jw_int(w, "running", running->number);
    else
        jw_null(w, "running");
    jw_int(w, "queue", (int64_t)g->queue_len);
    jw_int(w, "last_seq", (int64_t)output_last_seq(g->output));
    jw_end_object(w);
}

void record_cell(struct jw *w, const struct cell *c)
{
    jw_object(w, NULL);
    jw_string(w, "group", c->group->spec.name);
    jw_int(w, "cell", c->number);
    jw_string(w, "state", cell_state_name(c));
    jw_string(w, "status", cell_status_name(c->status));
    jw_int(w, "position", (int64_t)job_ahead(c->group, &c->job));
    jw_string(w, "code", c->code);
    jw_int(w, "uid", c->uid);
    jw_object(w, "ranks");
    for (int i = 0; i < c->group->spec.ranks; i++) {
        char key[16];
        snprintf(key, sizeof(key), "%d", i);
        if (!c->ranks[i].takes_part)
            continue;
        jw_object(w, key);
        jw_string(w, "status", cell_status_name(c->ranks[i].status));
        record_time(w, "duration_s", c->ranks[i].duration_s);
        jw_end_object(w);
    }
    jw_end_object(w);
    record_time(w, "created", c->created);
    record_time(w, "started", c->started);
    record_time(w, "finished", c->finished);
    jw_int(w, "first_seq", (int64_t)c->first_seq);
    jw_end_object(w);
}

void record_accepted(struct jw *w, const struct cell *c)
{
    jw_object(w, NULL);
    jw_string(w, "group", c->group->spec.name);
    jw_int(w, "cell", c->number);
    jw_int(w, "first_seq", (int64_t)c->first_seq);
    jw_int(w, "position", (int64_t)job_ahead(c->group, &c->job));
    jw_end_object(w);
}

/* The group that holds a GPU, if one does. */
static const char *record_holder(const struct pool *p, const struct gpu_device *d)
{
    const struct group *g;
    TAILQ_FOREACH(g, &p->groups, link)
    {
        for (int i = 0; i < g->spec.ranks; i++) {
            if (g->ranks[i].gpu >= 0 && gpu_at(p->gpu, (size_t)g->ranks[i].gpu) == d)
                return g->spec.name;
        }
    }
    return NULL;
}

static void record_amount(struct jw *w, const char *key, int64_t value)
{
    if (value >= 0)
        jw_int(w, key, value);
    else
        jw_null(w, key);
}

void record_gpu(struct jw *w, const struct pool *p, const struct gpu_device *d)
{
    jw_object(w, NULL);
    jw_int(w, "index", d->index);
    jw_string(w, "uuid", d->uuid);
    jw_string(w, "name", d->name);
    jw_string(w, "bus_id", d->bus_id);
    record_amount(w, "memory_total_bytes", d->memory_total);
    record_amount(w, "memory_used_bytes", d->memory_used);
    record_amount(w, "utilisation_percent", d->utilisation);
    jw_array(w, "processes");
    for (size_t i = 0; i < d->process_count; i++) {
        jw_object(w, NULL);
        jw_int(w, "pid", d->processes[i].pid);
        record_amount(w, "memory_used_bytes", d->processes[i].memory_used);
        jw_end_object(w);
    }
    jw_end_array(w);
    jw_string(w, "group", record_holder(p, d));
    jw_end_object(w);
}
