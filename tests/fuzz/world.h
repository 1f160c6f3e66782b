/* SPDX-License-Identifier: Apache-2.0 */
/*
 * world.h - a daemon without processes: pool, hub and groups are the real ones, and so is all that
 * workers are told. Only start_worker is not (the linker's --wrap, see the Makefile): it starts
 * nothing, and the target speaks for the processes through the callbacks it sees here.
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
#include "hub.h"
#include "log.h"
#include "nccl.h"
#include "pool.h"
#include "start.h"
#include "stream.h"
#include "template.h"

struct world_worker {
    char label[128]; /* "group=g rank=0" or "group=g store" */
    struct worker *worker;
    const struct worker_events *events;
    void *ctx;
};

static struct {
    uv_loop_t loop;
    char dir[64];
    struct config config;
    struct auth auth;
    struct pool pool;
    struct world_worker workers[128];
    size_t workers_len;
} world;

/* --- instead of processes --- */

int __wrap_start_worker(struct group *g, struct worker *w, int rank, struct err *err);
struct worker *__real_worker_new(struct hub *hub, const char *label,
                                 const struct worker_events *events, void *ctx, struct err *err);
struct worker *__wrap_worker_new(struct hub *hub, const char *label,
                                 const struct worker_events *events, void *ctx, struct err *err);
void __real_worker_close(struct worker *w);
void __wrap_worker_close(struct worker *w);
pid_t __wrap_worker_pid(const struct worker *w);

/* Told, but not kept: no process is to be killed for it. */
pid_t __wrap_worker_pid(const struct worker *w)
{
    (void)w;
    return getpid();
}

int __wrap_start_worker(struct group *g, struct worker *w, int rank, struct err *err)
{
    (void)g;
    (void)w;
    (void)rank;
    (void)err;
    return 0;
}

struct worker *__wrap_worker_new(struct hub *hub, const char *label,
                                 const struct worker_events *events, void *ctx, struct err *err)
{
    struct worker *w = __real_worker_new(hub, label, events, ctx, err);
    fuzz_check(w && world.workers_len < UTIL_COUNT(world.workers));
    struct world_worker *slot = &world.workers[world.workers_len++];
    *slot = (struct world_worker){.worker = w, .events = events, .ctx = ctx};
    snprintf(slot->label, sizeof(slot->label), "%s", label);
    return w;
}

void __wrap_worker_close(struct worker *w)
{
    for (size_t i = 0; w && i < world.workers_len; i++) {
        if (world.workers[i].worker == w)
            world.workers[i] = world.workers[--world.workers_len];
    }
    __real_worker_close(w);
}

/* NULL: there is no such process now. */
static inline struct world_worker *world_find(const char *label)
{
    for (size_t i = 0; i < world.workers_len; i++) {
        if (strcmp(world.workers[i].label, label) == 0)
            return &world.workers[i];
    }
    return NULL;
}

/* A frame from a process; its descriptors: none. */
static inline void world_frame(const struct world_worker *w, const struct frame *f)
{
    int fds[FRAME_MAX_FDS] = {-1, -1, -1};
    (void)w->events->on_frame(w->ctx, f, fds, false);
}

static inline void world_say(const char *label, enum frame_type type, const char *text)
{
    struct frame f = {
        .type = (uint8_t)type, .length = (uint32_t)strlen(text), .payload = (const uint8_t *)text};
    if (world_find(label))
        world_frame(world_find(label), &f);
}

/* --- life --- */

static inline void world_remove(void)
{
    util_remove_tree(world.dir);
}

/* Once per process. */
static inline void world_init(void)
{
    struct err err = ERR_INIT;
    char *argv[] = {"ddipd",           "--listen=none",   "--rank-limit=8",     "--queue-limit=6",
                    "--group-limit=3", "--body-limit=4K", "--payload-limit=8K", NULL};
    const char *memory = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp"; /* a lot faster */
    if (*world.dir)
        return;
    log_set_level(LOG_LEVEL_ERROR);
    snprintf(world.dir, sizeof(world.dir), "%s/ddipd-fuzz-XXXXXX", memory);
    fuzz_check(mkdtemp(world.dir));
    atexit(world_remove);
    setenv("HOME", "/", 1);
    setenv("RUNTIME_DIRECTORY", world.dir, 1);
    setenv("STATE_DIRECTORY", world.dir, 1);
    fuzz_check(config_load(&world.config, 7, argv, &err) == CONFIG_RUN);
    fuzz_check(auth_init(&world.auth, &world.config, &err) == 0);
    uv_loop_init(&world.loop);
    struct hub *hub = hub_new(&world.loop, world.config.runtime_dir, &err);
    fuzz_check(hub);
    pool_init(&world.pool, &world.loop, &world.config, hub, gpu_open("/none", "/none"),
              nccl_open("/none"), templates_new(hub, &world.config));
}

/* Lets timers of 0 ms and closed handles have their turn. */
static inline void world_turn(void)
{
    for (int i = 0; i < 4; i++)
        uv_run(&world.loop, UV_RUN_NOWAIT);
}

/* Makes the group "g"; its processes have not said anything yet. */
static inline struct group *world_group(int ranks)
{
    struct err err = ERR_INIT;
    char body[64];
    int n = snprintf(body, sizeof(body), "{\"name\":\"g\",\"ranks\":%d}", ranks);
    json *j = json_parse(body, (size_t)n, &err);
    struct once_key once = {.uid = getuid()};
    struct group *g = pool_create(&world.pool, j, &once, &err);
    fuzz_check(g);
    json_free(j);
    return g;
}

/* Lets the group's processes come and join, as good ones would. */
static inline void world_make_ready(struct group *g)
{
    char label[64];
    world_say("group=g store", FRAME_STATE, "{\"host\":\"127.0.0.1\",\"port\":1}");
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < g->spec.ranks; i++) {
            snprintf(label, sizeof(label), "group=g rank=%d", i);
            world_say(label, turn ? FRAME_STATE : FRAME_HELLO,
                      "{\"state\":\"joined\",\"generation\":1}");
        }
    }
    fuzz_check(g->state == GROUP_READY);
}

static inline void world_drained(void *ctx)
{
    *(bool *)ctx = true;
}

/* Stops everything and lets all processes "exit": nothing must be left. */
static inline void world_end(void)
{
    bool drained = false;
    pool_stop(&world.pool, world_drained, &drained);
    while (world.workers_len)
        worker_never(world.workers[0].worker, 0, "");
    fuzz_check(drained && world.pool.groups_len == 0);
    world.pool.drained = NULL;
    world_turn();
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
    fuzz_check(json_integer(json_get(j, "seq"), &number) && (uint64_t)number == seq);
    fuzz_check(m->seq == seq && strcmp(json_string(json_get(j, "group")), "g") == 0);
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
