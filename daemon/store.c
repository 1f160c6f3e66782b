/* SPDX-License-Identifier: Apache-2.0 */
/*
 * store.c - a group's rendezvous: torch's TCPStore in a process of its own.
 *
 * It outlives any rank, and a generation works on without it: only the next one needs it again.
 */
#include "store.h"

#include <stdio.h>
#include <string.h>

#include "log.h"
#include "pool.h"
#include "roster.h"
#include "start.h"

static const struct worker_events store_events;

static void store_label(const struct group *g, char *label, size_t cap)
{
    snprintf(label, cap, "group=%s store", g->spec.name);
}

int store_start(struct group *g, struct err *err)
{
    char label[128];
    store_label(g, label, sizeof(label));
    g->store_port = 0;
    g->store = worker_new(g->pool->hub, label, &store_events, g, err);
    return g->store ? start_worker(g, g->store, START_STORE, err) : -1;
}

void store_adopt(struct group *g, const struct worker_past *past, const char *host, int port)
{
    char label[128];
    struct err err = ERR_INIT;
    store_label(g, label, sizeof(label));
    g->store = worker_adopt(g->pool->hub, label, &store_events, g, past, &err);
    if (!g->store)
        log_warn("%s: %s", label, err.msg);
    snprintf(g->store_host, sizeof(g->store_host), "%s", host);
    g->store_port = g->store ? port : 0;
}

static bool store_on_frame(void *ctx, const struct frame *f, int fds[FRAME_MAX_FDS], bool may_wait)
{
    struct group *g = ctx;
    (void)fds;
    (void)may_wait;
    if (f->type != FRAME_STATE)
        return true;
    struct err err = ERR_INIT;
    json *j = json_parse((const char *)f->payload, f->length, &err);
    const char *host = json_string(j ? json_get(j, "host") : NULL);
    int64_t port = 0;
    if (host && json_get_int(j, "port", 1, 65535, &port, &err) == 1) {
        snprintf(g->store_host, sizeof(g->store_host), "%s", host);
        g->store_port = (int)port;
        roster_save(g);
        group_rank_present(g);
    }
    json_free(j);
    return true;
}

static void store_on_output(void *ctx, int fd, const char *text, size_t len, uint64_t end)
{
    struct group *g = ctx;
    (void)fd;
    (void)end;
    log_info("group=%s store: %.*s", g->spec.name, (int)(len < 500 ? len : 500), text);
}

static void store_on_lost_text(void *ctx, int fd, uint64_t bytes)
{
    (void)ctx; /* it was for the log */
    (void)fd;
    (void)bytes;
}

static bool store_on_batch(void *ctx)
{
    (void)ctx; /* nothing of the store goes into the journal */
    return true;
}

static void store_on_exit(void *ctx, int status, const char *last_words)
{
    struct group *g = ctx;
    bool worked = g->store_port != 0;
    worker_close(g->store);
    g->store = NULL;
    g->store_port = 0;
    struct err err = ERR_INIT;
    if (g->adopting) {
        log_warn("group=%s: the store process is gone", g->spec.name);
    } else if (g->state == GROUP_STARTING) {
        start_describe_exit("the group's store", status, "", last_words, &err);
        if (!worked || store_start(g, &err) < 0)
            group_start_failed(g, &err);
    } else if (g->state == GROUP_READY) {
        /* the present generation works on; the next one starts another store */
        log_warn("group=%s: the store process ended (status %d)", g->spec.name, status);
    }
    group_finish_stop(g);
}

static void store_on_pid(void *ctx)
{
    group_rank_present(ctx);
}

static const struct worker_events store_events = {
    .on_pid = store_on_pid,
    .on_frame = store_on_frame,
    .on_output = store_on_output,
    .on_lost_text = store_on_lost_text,
    .on_batch = store_on_batch,
    .on_exit = store_on_exit,
};
