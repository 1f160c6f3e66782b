/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adopt.c - groups of an earlier daemon: found on disk, joined to their living processes.
 *
 * First the journal is read, which says what is known; then the ranks connect and tell the rest. A
 * group shows as "starting" until each of its ranks has connected or is known to be dead: before
 * that nobody can say what its cell needs.
 */
#include "adopt.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <unistd.h>

#include "cell.h"
#include "log.h"
#include "rank.h"
#include "recall.h"
#include "release.h"
#include "roster.h"
#include "start.h"
#include "store.h"

#define ADOPT_MAX (16u * 1024 * 1024) /* of one group.json: "env" is the user's */
#define ADOPT_MS 30000                /* until a rank that does not connect is given up */

struct adopt_found {
    TAILQ_ENTRY(adopt_found) link;
    char *dir;
    json *roster;
};

TAILQ_HEAD(adopt_list, adopt_found);

/* --- what is there --- */

static int adopt_check_version(const struct adopt_found *f, struct err *err)
{
    int64_t format = 0, protocol = 0;
    (void)json_integer(json_get(f->roster, "format"), &format);
    (void)json_integer(json_get(f->roster, "protocol"), &protocol);
    if (format == ROSTER_FORMAT && protocol == START_PROTOCOL)
        return 0;
    err_set(err, ERR_CONFLICT,
            "%s is of another version of ddipd (format %lld, protocol %lld; this one knows %d and "
            "%d)",
            f->dir, (long long)format, (long long)protocol, ROSTER_FORMAT, START_PROTOCOL);
    return err_hint(err, "its ranks were left alone: start that version to go on with them, or "
                         "give --state-dir and --runtime-dir another place");
}

static void adopt_find_one(struct adopt_list *list, char *dir)
{
    struct err err = ERR_INIT;
    struct buf text = BUF_INIT;
    char *path = util_printf("%s/" ROSTER_FILE, dir);
    json *roster = util_read_file(path, ADOPT_MAX, &text, &err) == 0
                       ? json_parse((const char *)text.data, text.len, &err)
                       : NULL;
    if (roster) {
        struct adopt_found *f = util_calloc(1, sizeof(*f));
        f->dir = dir;
        f->roster = roster;
        TAILQ_INSERT_TAIL(list, f, link);
    } else {
        log_warn("%s is left alone: %s", path, err.msg);
        free(dir);
    }
    buf_deinit(&text);
    free(path);
}

static void adopt_find(struct pool *p, struct adopt_list *list)
{
    char *path = util_printf("%s/groups", p->config->state_dir);
    DIR *dir = opendir(path);
    const struct dirent *e;
    while (dir && (e = readdir(dir)) != NULL) {
        if (e->d_name[0] != '.')
            adopt_find_one(list, util_printf("%s/%s", path, e->d_name));
    }
    if (dir)
        closedir(dir);
    free(path);
}

/* --- the journal --- */

/* What an event of the group and a journal's head both say: state (under `key`), generation and
 * reason. */
static bool adopt_state(struct group *g, const char *key, const json *j)
{
    struct err err = ERR_INIT;
    int64_t generation = g->generation;
    if (!group_state_parse(json_string(json_get(j, key)), &g->state))
        return false;
    (void)!json_get_int(j, "generation", 1, UINT32_MAX, &generation, &err);
    const char *reason = json_string(json_get(j, "reason"));
    g->generation = (uint32_t)generation;
    g->was_ready |= g->state == GROUP_READY;
    g->reason = (struct err)ERR_INIT;
    if (reason && g->state != GROUP_READY)
        err_set(&g->reason, ERR_UNAVAILABLE, "%s", reason);
    return true;
}

static void adopt_group_status(struct group *g, const json *event)
{
    if (adopt_state(g, "execution_state", event) && g->state == GROUP_READY)
        g->aborted = false;
}

static void adopt_on_head(void *ctx, const json *state)
{
    struct group *g = ctx;
    struct err err = ERR_INIT;
    int64_t last = 0;
    (void)!json_get_bool(state, "was_ready", &g->was_ready, &err);
    (void)!json_get_bool(state, "aborted", &g->aborted, &err);
    (void)!json_get_int(state, "last_cell", 0, UINT32_MAX, &last, &err);
    (void)adopt_state(g, "state", state);
    g->last_cell = (uint32_t)last;
    for (const json *j = json_first(json_get(state, "cells")); j; j = json_next(j))
        recall_read(g, j);
    for (const json *j = json_first(json_get(state, "once")); j; j = json_next(j))
        once_read(g->once, j);
}

static void adopt_on_event(void *ctx, const struct output_mark *m, const char *line, size_t len)
{
    static const char *const telling[] = {"status", "execute_input", "rank_done", "done"};
    struct group *g = ctx;
    bool tells = false;
    for (size_t i = 0; i < UTIL_COUNT(telling); i++)
        tells |= strcmp(m->type, telling[i]) == 0;
    if (m->cell > g->last_cell)
        g->last_cell = m->cell;
    if (!tells)
        return;
    struct err err = ERR_INIT;
    json *j = json_parse_cut(line, len, &err);
    if (!j)
        log_warn("group=%s: event %llu cannot be read: %s", g->spec.name,
                 (unsigned long long)m->seq, err.msg);
    else if (m->cell != OUTPUT_NO_CELL)
        recall_event(g, m, j);
    else if (m->rank == OUTPUT_NO_RANK)
        adopt_group_status(g, j);
    json_free(j);
}

static const struct output_replay adopt_replay = {.head = adopt_on_head, .event = adopt_on_event};

/* --- the processes --- */

static void adopt_on_late(uv_timer_t *timer)
{
    struct group *g = timer->data;
    for (int i = 0; i < g->spec.ranks; i++) {
        if (g->ranks[i].worker && g->ranks[i].state == RANK_STARTING)
            worker_kill(g->ranks[i].worker, "did not come back to the new daemon");
    }
}

static void adopt_on_looked(uv_timer_t *timer)
{
    adopt_settle(timer->data);
}

static void adopt_processes(struct group *g, const json *roster)
{
    struct err err = ERR_INIT;
    struct worker_past past;
    int64_t port = 0;
    const char *host = json_string(json_get(roster, "store_host"));
    (void)!json_get_int(roster, "store_port", 0, 65535, &port, &err);
    if (host && roster_read_process(json_get(roster, "store"), &past))
        store_adopt(g, &past, host, (int)port);
    const json *j = json_first(json_get(roster, "ranks"));
    for (int i = 0; i < g->spec.ranks && j; i++, j = json_next(j)) {
        if (roster_read_process(j, &past))
            rank_adopt(&g->ranks[i], &past);
    }
}

/* The state the journal told of is kept aside while the group waits: it is "starting" meanwhile. */
static void adopt_one(struct pool *p, struct adopt_found *f)
{
    struct err err = ERR_INIT;
    struct group_spec spec;
    int64_t uid = 0, generation = 1;
    (void)json_integer(json_get(f->roster, "uid"), &uid);
    (void)json_integer(json_get(f->roster, "generation"), &generation);
    struct group *g = NULL;
    if (pool_read_spec(p, json_get(f->roster, "request"), (uid_t)uid, &spec, &err) == 0) {
        struct once_key once = once_key_read(f->roster);
        spec.once = once_key_copy(&once);
        g = group_make(p, &spec, util_strdup(f->dir), &err);
    }
    if (!g) {
        log_error("the group in %s cannot be adopted: %s", f->dir, err.msg);
        return;
    }
    (void)!json_get_double(f->roster, "created", 0, 1e12, &g->created, &err);
    if (output_replay(g->output, &adopt_replay, g, &err) < 0)
        log_error("group=%s: %s", g->spec.name, err.msg);
    if (generation > g->generation) /* it had begun, and not got as far as the journal */
        g->generation = (uint32_t)generation;
    g->found = g->state;
    g->state = GROUP_STARTING;
    g->adopting = true;
    recall_done(g);
    adopt_processes(g, f->roster);
    pool_add(p, g);
    log_info("group=%s: found, was %s in generation %u, last event %llu", g->spec.name,
             group_state_text(g), g->generation, (unsigned long long)output_last_seq(g->output));
    uv_timer_start(&g->start_timer, adopt_on_late, ADOPT_MS, 0);
    uv_timer_start(&g->stop_timer, adopt_on_looked, 0, 0); /* perhaps nobody is left to wait for */
}

int adopt_all(struct pool *p, struct err *err)
{
    struct adopt_list list = TAILQ_HEAD_INITIALIZER(list);
    struct adopt_found *f;
    int rc = 0;
    adopt_find(p, &list);
    TAILQ_FOREACH(f, &list, link)
    {
        if (rc == 0)
            rc = adopt_check_version(f, err);
    }
    while ((f = TAILQ_FIRST(&list)) != NULL) {
        TAILQ_REMOVE(&list, f, link);
        if (rc == 0)
            adopt_one(p, f);
        json_free(f->roster);
        free(f->dir);
        free(f);
    }
    return rc;
}

/* --- everybody is there, or known not to be --- */

static void adopt_lost_ranks(struct group *g)
{
    for (int i = 0; i < g->spec.ranks; i++) {
        struct err err = ERR_INIT;
        if (g->ranks[i].worker)
            continue;
        err_set(&err, ERR_UNAVAILABLE, "rank %d ended while no daemon was there", i);
        err.rank = i;
        group_rank_gone(g, &g->ranks[i], &err);
    }
}

static void adopt_ready(struct group *g)
{
    for (int i = 0; i < g->spec.ranks; i++) {
        if (g->ranks[i].state == RANK_PRESENT)
            g->ranks[i].state = RANK_IDLE;
    }
    group_set_state(g, GROUP_READY, "adopted by a restarted daemon");
    recall_resume(g);
    adopt_lost_ranks(g);
    if (g->state == GROUP_READY && !g->running && g->aborted)
        group_again(g, "the process group was aborted before a daemon's restart");
}

/* A restart was told of in the journal; what it does to the running cell perhaps was not. */
static void adopt_abort(struct group *g)
{
    struct cell *c = cell_running(g);
    bool working = false;
    for (int i = 0; i < g->spec.ranks; i++) {
        struct rank *r = &g->ranks[i];
        if (!c || !rank_alive(r) || !cell_rank_runs(c, i))
            continue;
        r->state = RANK_BUSY;
        working = true;
    }
    for (int i = 0; i < g->spec.ranks && !working; i++)
        rank_abort(&g->ranks[i]); /* it may be waiting in the generation that was being made */
    if (g->running)
        g->running->kind->abandon(g->running, "the group was restarted");
    release_begin(g);
}

void adopt_settle(struct group *g)
{
    struct err err = ERR_INIT;
    for (int i = 0; i < g->spec.ranks; i++) {
        if (g->ranks[i].worker && g->ranks[i].state == RANK_STARTING)
            return;
    }
    if (!g->adopting)
        return;
    g->adopting = false;
    uv_timer_stop(&g->start_timer);
    switch (g->found) {
    case GROUP_READY:
        adopt_ready(g);
        group_tell(g, false, NULL);
        break;
    case GROUP_DEGRADED:
        group_set_state(g, GROUP_DEGRADED, g->reason.msg);
        recall_resume(g);
        adopt_lost_ranks(g);
        job_abandon_waiting(g, g->reason.msg); /* cells that came while it looked like starting */
        group_tell(g, false, NULL);
        break;
    case GROUP_STARTING:
        if (g->was_ready) {
            adopt_abort(g);
            group_again(g, "the daemon was restarted");
            break;
        }
        /* fall through */
    case GROUP_FAILED:
        err_set(&err, ERR_UNAVAILABLE, "%s",
                g->reason.msg[0] ? g->reason.msg
                                 : "the daemon was restarted while the group was starting");
        group_start_failed(g, &err);
        break;
    case GROUP_STOPPING:
        group_stop(g, "it was being deleted when the daemon was restarted");
        break;
    }
    group_commit(g);
}
