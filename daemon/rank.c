/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rank.c - one rank of a group: its process comes, talks and goes.
 *
 * What a rank sends is checked like anything from outside: a user's code runs there, and an event
 * goes into the journal as the rank wrote it.
 */
#include "rank.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "cell.h"
#include "hub.h"
#include "log.h"
#include "pool.h"
#include "request.h"
#include "start.h"

static const struct worker_events rank_events;

const char *rank_state_name(enum rank_state state)
{
    static const char *const names[] = {
        [RANK_STARTING] = "starting", [RANK_PRESENT] = "present", [RANK_JOINING] = "joining",
        [RANK_IDLE] = "idle",         [RANK_BUSY] = "busy",       [RANK_DEAD] = "dead"};
    return names[state];
}

bool rank_alive(const struct rank *r)
{
    return r->worker && r->state != RANK_DEAD;
}

int rank_start(struct rank *r, struct err *err)
{
    char label[128];
    snprintf(label, sizeof(label), "group=%s rank=%d", r->group->spec.name, r->index);
    r->state = RANK_STARTING;
    r->leaving = r->respawn = r->killed = false;
    r->memory_bytes = -1;
    r->worker = worker_new(r->group->pool->hub, label, &rank_events, r, err);
    if (!r->worker)
        return -1;
    if (start_worker(r->group, r->worker, r->index, err) == 0)
        return 0;
    worker_close(r->worker);
    r->worker = NULL;
    r->state = RANK_DEAD;
    return -1;
}

void rank_leave(struct rank *r, bool respawn)
{
    if (!rank_alive(r))
        return;
    r->leaving = true;
    r->respawn = respawn;
    if (r->state == RANK_BUSY)
        worker_send(r->worker, FRAME_INTERRUPT, r->cell, 0, NULL, 0, -1);
    if (worker_connected(r->worker))
        worker_send(r->worker, FRAME_EXIT, 0, 0, NULL, 0, -1);
    else
        worker_kill(r->worker, SIGKILL, "told to leave before it had reported");
}

/* --- what a rank says --- */

/* `done` is a cell's last event: what comes later, from a thread say, belongs to no cell. */
static struct output_origin rank_origin(const struct rank *r, uint32_t cell, uint64_t number)
{
    return (struct output_origin){cell_for_output(r->group, cell), r->index, number};
}

static void rank_note(struct rank *r, uint32_t cell, const char *text)
{
    struct output_origin from = rank_origin(r, cell, 0);
    output_stream(r->group->output, from, 2, text, strlen(text));
}

static bool rank_reserved(const char *key)
{
    static const char *const keys[] = {"seq", "group", "cell", "rank", "time", "rank_seq"};
    for (size_t i = 0; i < UTIL_COUNT(keys); i++) {
        if (strcmp(key, keys[i]) == 0)
            return true;
    }
    return false;
}

/* An event is one JSON object on one line, "type" first, one of the types a rank may send. */
static const char *rank_event_fault(const struct frame *f)
{
    static const char *const types[] = {"display_data", "update_display_data", "clear_output",
                                        "execute_result", "error"};
    static const char start[] = "{\"type\":\""; /* output.c finds the type there without parsing */
    const char *text = (const char *)f->payload;
    if (f->length < sizeof(start) || memcmp(text, start, sizeof(start) - 1) != 0)
        return "no type at its start";
    if (text[f->length - 1] != '}')
        return "something after its end";
    for (uint32_t i = 0; i < f->length; i++) {
        if ((unsigned char)text[i] < 0x20)
            return "a control character";
    }
    struct err err = ERR_INIT;
    json *j = json_parse_cut(text, f->length, &err);
    const json *first = json_is_object(j) ? json_first(j) : NULL;
    const char *type = first ? json_string(first) : NULL;
    const char *fault = "no known type";
    for (size_t i = 0; type && i < UTIL_COUNT(types); i++) {
        size_t n = strlen(types[i]);
        if (strcmp(type, types[i]) == 0 && strncmp(text + sizeof(start) - 1, type, n) == 0 &&
            text[sizeof(start) - 1 + n] == '"') /* spelled without escapes */
            fault = NULL;
    }
    for (const json *c = first; c && !fault; c = json_next(c)) {
        if (rank_reserved(json_key(c)) || (c != first && strcmp(json_key(c), "type") == 0))
            fault = "a member that is not its own";
    }
    json_free(j);
    return fault;
}

static void rank_event(struct rank *r, const struct frame *f)
{
    static const char released[] = "\"released\":true}";
    const char *fault = rank_event_fault(f);
    /* its connection to another rank has ended: if that one is dead, the death comes first */
    if (!fault && f->length > sizeof(released) &&
        memcmp(f->payload + f->length - sizeof(released) + 1, released, sizeof(released) - 1) == 0)
        hub_reap(r->group->pool->hub);
    if (!fault) {
        struct output_origin from = rank_origin(r, f->cell, f->number);
        output_add(r->group->output, from, (const char *)f->payload + 1, f->length - 2);
        return;
    }
    log_warn("group=%s rank=%d: malformed event: %s", r->group->spec.name, r->index, fault);
    rank_note(r, f->cell, "[ddipd: an event of this rank was malformed and is not shown]\n");
}

static void rank_gap(struct rank *r, const struct frame *f, const json *content)
{
    int64_t events = 0, bytes = 0;
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    (void)json_integer(json_get(content, "dropped_events"), &events);
    (void)json_integer(json_get(content, "dropped_bytes"), &bytes);
    jw_string(&w, "type", "gap");
    jw_int(&w, "dropped_events", events);
    jw_int(&w, "dropped_bytes", bytes);
    struct output_origin from = rank_origin(r, f->cell, f->number);
    output_add(r->group->output, from, (const char *)members.data, members.len);
    buf_deinit(&members);
}

static void rank_joined(struct rank *r, const char *state, const json *content)
{
    int64_t generation = 0;
    (void)json_integer(json_get(content, "generation"), &generation);
    if (r->state != RANK_JOINING || generation != r->group->generation)
        return; /* about a generation that is over */
    if (strcmp(state, "joined") == 0) {
        r->state = RANK_IDLE;
        group_rank_joined(r->group);
        return;
    }
    const char *ename = json_string(json_get(content, "ename"));
    const char *evalue = json_string(json_get(content, "evalue"));
    struct err err = ERR_INIT;
    err_set(&err, ERR_UNAVAILABLE, "rank %d could not join the process group: %s: %s", r->index,
            ename ? ename : "unknown error", evalue ? evalue : "");
    err.rank = r->index;
    r->state = RANK_PRESENT;
    group_start_failed(r->group, &err);
}

static void rank_state(struct rank *r, uint32_t cell, const json *content)
{
    const char *state = json_string(json_get(content, "state"));
    if (state && strcmp(state, "raising") == 0)
        cell_rank_raising(r->group, r, cell);
    else if (state)
        rank_joined(r, state, content);
}

static void rank_done(struct rank *r, uint32_t cell, const json *content)
{
    int64_t rss;
    if (json_integer(json_get(json_get(content, "memory"), "rss_bytes"), &rss))
        r->memory_bytes = rss;
    if (r->state == RANK_BUSY && r->cell == cell)
        r->state = RANK_IDLE;
    cell_rank_done(r->group, r, cell, content);
    group_rank_present(r->group); /* a restart may have waited for it */
}

static void rank_json(struct rank *r, const struct frame *f, int fds[FRAME_MAX_FDS])
{
    struct err err = ERR_INIT;
    json *content = json_parse_cut((const char *)f->payload, f->length, &err);
    if (!json_is_object(content)) {
        log_warn("group=%s rank=%d: frame %u is no JSON object: %s", r->group->spec.name, r->index,
                 f->type, err.msg);
        json_free(content);
        return;
    }
    switch (f->type) {
    case FRAME_DONE:
        rank_done(r, f->cell, content);
        break;
    case FRAME_STATE:
        rank_state(r, f->cell, content);
        break;
    case FRAME_GAP:
        rank_gap(r, f, content);
        break;
    case FRAME_REPLY:
        request_on_reply(r->group, r, f->arg, content, fds[0]);
        fds[0] = -1;
        return; /* content is the request's now */
    default:
        log_warn("group=%s rank=%d: unknown frame %u", r->group->spec.name, r->index, f->type);
    }
    json_free(content);
}

static void rank_on_frame(void *ctx, const struct frame *f, int fds[FRAME_MAX_FDS])
{
    struct rank *r = ctx;
    switch (f->type) {
    case FRAME_HELLO:
        if (r->state == RANK_STARTING) {
            r->state = RANK_PRESENT;
            group_rank_present(r->group);
        }
        break;
    case FRAME_STREAM:
        output_stream(r->group->output, rank_origin(r, f->cell, f->number), f->arg == 2 ? 2 : 1,
                      (const char *)f->payload, f->length);
        break;
    case FRAME_EVENT:
        rank_event(r, f);
        break;
    default:
        rank_json(r, f, fds);
    }
}

static void rank_on_output(void *ctx, int fd, const char *text, size_t len)
{
    struct rank *r = ctx;
    output_stream(r->group->output, rank_origin(r, r->cell, 0), fd, text, len);
}

static void rank_on_batch(void *ctx)
{
    struct rank *r = ctx;
    if (group_commit(r->group) == 0)
        worker_ack(r->worker);
}

/* --- how a rank goes --- */

static void rank_on_exit(void *ctx, int status, const char *last_words)
{
    struct rank *r = ctx;
    struct err why = ERR_INIT;
    char who[32];
    snprintf(who, sizeof(who), "rank %d", r->index);
    start_describe_exit(who, status, last_words, &why);
    why.rank = r->index;
    bool expected = r->leaving;
    bool respawn = r->respawn && r->group->state == GROUP_STARTING;
    worker_close(r->worker);
    r->worker = NULL;
    r->state = RANK_DEAD;
    if (respawn && rank_start(r, &why) == 0)
        return;
    group_rank_gone(r->group, r, expected && !respawn ? NULL : &why);
}

static const struct worker_events rank_events = {
    .on_frame = rank_on_frame,
    .on_output = rank_on_output,
    .on_batch = rank_on_batch,
    .on_exit = rank_on_exit,
};
