/* SPDX-License-Identifier: Apache-2.0 */
/*
 * world.h - a daemon without processes: pool, hub and a group whose ranks are workers that no
 * process has connected for. Nothing can be started: the folder of journals cannot be made.
 */
#ifndef DDIPD_WORLD_H
#define DDIPD_WORLD_H

#include <unistd.h>
#include <uv.h>

#include "auth.h"
#include "cell.h"
#include "config.h"
#include "fuzz.h"
#include "gpu.h"
#include "group.h"
#include "hub.h"
#include "log.h"
#include "nccl.h"
#include "pool.h"
#include "stream.h"

static struct {
    uv_loop_t loop;
    char dir[64];
    struct config config;
    struct auth auth;
    struct pool pool;
    struct group *group; /* NULL: gone */
} world;

static inline void world_remove(void)
{
    util_remove_tree(world.dir);
}

/* Once per process. */
static inline void world_init(void)
{
    struct err err = ERR_INIT;
    char *argv[] = {"ddipd",       "--listen",
                    "none",        "--state-dir",
                    "/dev/null/x", "--rank-limit",
                    "8",           "--queue-limit",
                    "6",           "--body-limit",
                    "4K",          "--payload-limit",
                    "8K",          NULL};
    if (*world.dir)
        return;
    log_set_level(LOG_LEVEL_ERROR);
    const char *memory = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp"; /* a lot faster */
    snprintf(world.dir, sizeof(world.dir), "%s/ddipd-fuzz-XXXXXX", memory);
    fuzz_check(mkdtemp(world.dir));
    atexit(world_remove);
    setenv("HOME", "/", 1);
    setenv("XDG_RUNTIME_DIR", world.dir, 1);
    fuzz_check(util_mkdirs(world.dir, 0700, &err) == 0);
    fuzz_check(config_load(&world.config, 13, argv, &err) == CONFIG_RUN);
    fuzz_check(util_mkdirs(world.config.runtime_dir, 0700, &err) == 0);
    fuzz_check(auth_init(&world.auth, &world.config, &err) == 0);
    uv_loop_init(&world.loop);
    struct hub *hub = hub_new(&world.loop, world.config.runtime_dir, &err);
    fuzz_check(hub);
    pool_init(&world.pool, &world.loop, &world.config, hub, gpu_open("/none", "/none"),
              nccl_open("/none"), NULL);
}

/* Lets timers of 0 ms and closed handles have their turn. */
static inline void world_turn(void)
{
    for (int i = 0; i < 4; i++)
        uv_run(&world.loop, UV_RUN_NOWAIT);
}

static inline void world_spec(struct group *g, int ranks)
{
    struct group_spec *s = &g->spec;
    s->name = util_strdup("g");
    s->app = util_strdup("torch");
    s->python = util_strdup("python3");
    s->cwd = util_strdup("/");
    s->backend = util_strdup("gloo");
    s->ranks = ranks;
    s->grace_s = 5;
    s->uid = getuid();
}

static inline void world_ranks(struct group *g, const struct worker_events *events,
                               enum rank_state state)
{
    struct err err = ERR_INIT;
    g->ranks = util_calloc((size_t)g->spec.ranks, sizeof(*g->ranks));
    for (int i = 0; i < g->spec.ranks; i++) {
        struct rank *r = &g->ranks[i];
        *r = (struct rank){.group = g, .index = i, .gpu = -1, .state = state, .memory_bytes = -1};
        r->worker = worker_new(g->pool->hub, "rank", events, r, &err);
        fuzz_check(r->worker);
    }
}

/* The group "g" in a state of one's choice; what group_new does, without starting anything. */
static inline struct group *world_group(int ranks, const struct worker_events *events, bool ready)
{
    struct err err = ERR_INIT;
    char dir[128];
    struct group *g = util_calloc(1, sizeof(*g));
    snprintf(dir, sizeof(dir), "%s/g", world.dir);
    g->pool = &world.pool;
    g->state = ready ? GROUP_READY : GROUP_STARTING;
    g->was_ready = ready;
    g->created = util_now();
    g->generation = 1;
    g->output = output_open(dir, "g", &err);
    fuzz_check(g->output);
    world_spec(g, ranks);
    world_ranks(g, events, ready ? RANK_IDLE : RANK_JOINING);
    TAILQ_INIT(&g->queue);
    TAILQ_INIT(&g->cells);
    TAILQ_INIT(&g->requests);
    TAILQ_INIT(&g->waits);
    uv_timer_t *timers[] = {&g->next_timer, &g->start_timer, &g->stop_timer};
    for (size_t i = 0; i < UTIL_COUNT(timers); i++) {
        uv_timer_init(&world.loop, timers[i]);
        timers[i]->data = g;
        g->handles++;
    }
    pool_add(&world.pool, g);
    world.group = g;
    return g;
}

/* Stops the group and lets its ranks "exit"; all of it is freed. */
static inline void world_end(void)
{
    struct group *g = world.group;
    int ranks = g->spec.ranks;
    bool last = false;
    group_stop(g, "the end");
    for (int i = 0; i < ranks && !last; i++) {
        last = world.pool.groups_len == 0;
        if (!last && g->ranks[i].worker)
            worker_never(g->ranks[i].worker, 0, "");
    }
    world_turn();
    fuzz_check(world.pool.groups_len == 0);
    world.group = NULL;
}

/* --- reading what a group says --- */

static inline void world_no_wake(void *ctx)
{
    (void)ctx;
}

/* Every line of the journal is an event: JSON, numbered without a gap, common members once each,
 * and the type that readers of the text see is the one that readers of the JSON see. */
static inline void world_check_line(const char *line, size_t len, const struct output_mark *m,
                                    uint64_t seq)
{
    static const char *const common[] = {"seq",  "group", "cell",    "rank",
                                         "type", "time",  "rank_seq"};
    struct err err = ERR_INIT;
    int64_t number = 0;
    json *j = json_parse_cut(line, len, &err);
    fuzz_check(json_is_object(j) && memchr(line, '\n', len) == line + len - 1);
    fuzz_check(json_integer(json_get(j, "seq"), &number) && (uint64_t)number == seq &&
               m->seq == seq);
    fuzz_check(strcmp(json_string(json_get(j, "group")), "g") == 0);
    fuzz_check(strcmp(json_string(json_get(j, "type")), m->type) == 0);
    for (size_t i = 0; i < UTIL_COUNT(common); i++) {
        int count = 0;
        for (const json *c = json_first(j); c; c = json_next(c))
            count += strcmp(json_key(c), common[i]) == 0;
        fuzz_check(count == 1 || (i == 6 && count == 0));
    }
    json_free(j);
}

static inline void world_check_events(struct output *o)
{
    const char *line;
    size_t len;
    struct output_mark m;
    struct err err = ERR_INIT;
    fuzz_check(output_commit(o, &err) == 0);
    struct output_sub *s = output_subscribe(o, OUTPUT_NO_CELL, 0, world_no_wake, NULL);
    uint64_t seq = 0;
    while (output_next(s, &line, &len, &m) == OUTPUT_LINE)
        world_check_line(line, len, &m, ++seq);
    fuzz_check(seq == output_last_seq(o));
    output_unsubscribe(s);
}

/* Reads a stream as far as it goes; returns whether it has ended. */
static inline bool world_read(struct stream *s)
{
    char piece[100];
    ssize_t n;
    while ((n = stream_read(s, piece, sizeof(piece))) > 0)
        fuzz_check(n <= (ssize_t)sizeof(piece));
    return n < 0;
}

#endif
