/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rank.c - one rank of a group: its process comes, talks and goes.
 *
 * What a rank sends is checked like anything from outside: a user's code runs there, and an event
 * goes into the journal as the rank wrote it.
 */
#include "rank.h"

#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include "cell.h"
#include "config.h"
#include "hub.h"
#include "log.h"
#include "pool.h"
#include "request.h"
#include "roster.h"
#include "stacks.h"
#include "start.h"

#define RANK_CAUSE_NS (200ull * 1000 * 1000)       /* how long a consequence waits for its cause, */
#define RANK_FORMAT_NS (2ull * 1000 * 1000 * 1000) /* ... and if that is being formatted */
#define RANK_FATAL "Fatal Python error: "
#define RANK_CRASH_MAX (32u * 1024)

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

static void rank_label(const struct rank *r, char *label, size_t cap)
{
    snprintf(label, cap, "group=%s rank=%d", r->group->spec.name, r->index);
}

/* A process that counts its events from 1 begins; the journal has to know. */
static void rank_begin(struct rank *r)
{
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    jw_string(&w, "type", "status");
    jw_string(&w, "execution_state", "starting");
    group_event(r->group, OUTPUT_NO_CELL, r->index, &members);
    buf_deinit(&members);
    output_rank_anew(r->group->output, r->index);
    r->state = RANK_STARTING;
    r->leaving = r->respawn = r->killed = r->untold = false;
    r->released_ns = r->old_frames = 0;
    r->memory_bytes = -1;
    buf_reset(&r->crash);
    oom_deinit(&r->oom);
}

int rank_start(struct rank *r, struct err *err)
{
    char label[128];
    rank_label(r, label, sizeof(label));
    rank_begin(r);
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

void rank_adopt(struct rank *r, struct worker_past *past)
{
    char label[128];
    struct err err = ERR_INIT;
    struct output_rank at = output_rank(r->group->output, r->index);
    rank_label(r, label, sizeof(label));
    past->seen = at.rank_seq;
    past->pipe_end[0] = at.pipe_end[0];
    past->pipe_end[1] = at.pipe_end[1];
    r->worker = worker_adopt(r->group->pool->hub, label, &rank_events, r, past, &err);
    r->state = r->worker ? RANK_STARTING : RANK_DEAD;
    r->old_frames = UINT64_MAX; /* until HELLO says how many there are */
    if (!r->worker)
        log_warn("%s: %s", label, err.msg);
}

void rank_close(struct rank *r)
{
    worker_close(r->worker);
    oom_deinit(&r->oom);
    buf_deinit(&r->crash);
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
        worker_kill(r->worker, "told to leave before it had reported");
}

void rank_abort(struct rank *r)
{
    if (rank_alive(r))
        worker_send(r->worker, FRAME_ABORT, 0, 0, NULL, 0, -1);
}

/* --- what a rank says --- */

/* `done` is a cell's last event: what comes later, from a thread say, belongs to no cell. */
static struct output_origin rank_origin(const struct rank *r, uint32_t cell, uint64_t number)
{
    return (struct output_origin){cell_for_output(r->group, cell), r->index, number, 0};
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

static bool rank_is_error(const struct frame *f)
{
    static const char start[] = "{\"type\":\"error\"";
    size_t n = sizeof(start) - 1;
    return f->length > n && memcmp(f->payload, start, n) == 0;
}

static void rank_event(struct rank *r, const struct frame *f)
{
    const char *fault = rank_event_fault(f);
    if (!fault) {
        struct output_origin from = rank_origin(r, f->cell, f->number);
        output_add(r->group->output, from, (const char *)f->payload + 1, f->length - 2);
        r->untold &= !rank_is_error(f);
        return;
    }
    log_warn("group=%s rank=%d: malformed event: %s", r->group->spec.name, r->index, fault);
    rank_note(r, f->cell, "[ddipd: an event of this rank was malformed and is not shown]\n");
}

static void rank_add_gap(struct rank *r, struct output_origin from, int64_t events, int64_t bytes)
{
    struct buf members = BUF_INIT;
    struct jw w = JW_INIT(&members);
    jw_string(&w, "type", "gap");
    jw_int(&w, "dropped_events", events);
    jw_int(&w, "dropped_bytes", bytes);
    output_add(r->group->output, from, (const char *)members.data, members.len);
    buf_deinit(&members);
}

static void rank_gap(struct rank *r, const struct frame *f, const json *content)
{
    int64_t events = 0, bytes = 0, out = 0, err = 0;
    (void)json_integer(json_get(content, "dropped_events"), &events);
    (void)json_integer(json_get(content, "dropped_bytes"), &bytes);
    (void)json_integer(json_get(content, "out"), &out);
    (void)json_integer(json_get(content, "err"), &err);
    rank_add_gap(r, rank_origin(r, f->cell, f->number), events, bytes);
    worker_skip(r->worker, (uint64_t[2]){(uint64_t)out, (uint64_t)err});
}

/* What a death for lack of memory will be told by. (At HELLO a template may not have told the pid.)
 */
static void rank_watch_memory(struct rank *r)
{
    oom_watch(&r->oom, r->group->pool->config->cgroup_dir, worker_pid(r->worker));
}

/* Why a rank did not join: an app that will not do is the asker's to mend, all else is not. */
static void rank_join_error(const struct rank *r, const json *content, struct err *err)
{
    const char *detail = json_string(json_get(content, "detail"));
    const char *hint = json_string(json_get(content, "hint"));
    const char *ename = json_string(json_get(content, "ename"));
    const char *evalue = json_string(json_get(content, "evalue"));
    if (detail)
        err_set(err, ERR_INVALID, "%s", detail);
    else
        err_set(err, ERR_UNAVAILABLE, "rank %d could not join the process group: %s: %s", r->index,
                ename ? ename : "unknown error", evalue ? evalue : "");
    if (hint)
        err_hint(err, "%s", hint);
}

static void rank_joined(struct rank *r, const char *state, const json *content)
{
    int64_t generation = 0;
    (void)json_integer(json_get(content, "generation"), &generation);
    if (r->state != RANK_JOINING || generation != r->group->generation)
        return; /* about a generation that is over */
    if (strcmp(state, "joined") == 0) {
        r->state = RANK_IDLE;
        rank_watch_memory(r);
        group_rank_joined(r->group);
        return;
    }
    struct err err = ERR_INIT;
    rank_join_error(r, content, &err);
    err.rank = r->index;
    r->state = RANK_PRESENT;
    group_start_failed(r->group, &err);
}

static void rank_raising(struct rank *r, uint32_t cell, const json *content)
{
    struct err err = ERR_INIT;
    bool lost_peers = false;
    if (json_get_bool(content, "lost_peers", &lost_peers, &err) < 0)
        log_warn("group=%s rank=%d: %s", r->group->spec.name, r->index, err.msg);
    cell_rank_raising(r->group, r, cell, lost_peers);
}

static void rank_state(struct rank *r, uint32_t cell, const json *content)
{
    const char *state = json_string(json_get(content, "state"));
    if (state && strcmp(state, "raising") == 0)
        rank_raising(r, cell, content);
    else if (state)
        rank_joined(r, state, content);
}

static void rank_done(struct rank *r, uint32_t cell, uint64_t number, const json *content)
{
    int64_t rss;
    if (json_integer(json_get(json_get(content, "memory"), "rss_bytes"), &rss))
        r->memory_bytes = rss;
    if (r->state == RANK_BUSY && r->cell == cell)
        r->state = RANK_IDLE;
    r->untold = false;
    cell_rank_done(r->group, r, cell, number, content);
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
        rank_done(r, f->cell, f->number, content);
        break;
    case FRAME_STATE:
        rank_state(r, f->cell, content);
        break;
    case FRAME_GAP:
        rank_gap(r, f, content);
        break;
    case FRAME_REPLY:
        if (f->number <= r->old_frames)
            break; /* to what an earlier daemon asked: its numbers are not ours */
        request_on_reply(r->group, r, f->arg, content, fds[0]);
        fds[0] = -1;
        return; /* content is the request's now */
    default:
        log_warn("group=%s rank=%d: unknown frame %u", r->group->spec.name, r->index, f->type);
    }
    json_free(content);
}

/* What a rank that was stopped says: it was released, or interrupted. */
static bool rank_was_stopped(const struct frame *f)
{
    static const char released[] = "\"released\":true}";
    static const char interrupted[] = "{\"type\":\"error\",\"ename\":\"KeyboardInterrupt\"";
    size_t n = sizeof(released) - 1, m = sizeof(interrupted) - 1;
    const char *text = (const char *)f->payload;
    return f->type == FRAME_EVENT &&
           ((f->length > n && memcmp(text + f->length - n, released, n) == 0) ||
            (f->length > m && memcmp(text, interrupted, m) == 0));
}

static bool rank_other_is_untold(const struct rank *r)
{
    for (int i = 0; i < r->group->spec.ranks; i++) {
        const struct rank *other = &r->group->ranks[i];
        if (other != r && rank_alive(other) && other->untold)
            return true;
    }
    return false;
}

/* A stopped rank's error is a consequence of something that is to be told first: for a moment we
 * wait to hear of another rank's exception or death. */
static bool rank_cause_may_come(struct rank *r, const struct frame *f)
{
    if (!rank_was_stopped(f))
        return false;
    hub_reap(r->group->pool->hub);
    bool untold = rank_other_is_untold(r);
    if (!untold && cell_cause_known(r->group, f->cell))
        return false;
    uint64_t now = util_monotonic_ns();
    if (!r->released_ns)
        r->released_ns = now;
    return now - r->released_ns < (untold ? RANK_FORMAT_NS : RANK_CAUSE_NS);
}

static bool rank_on_frame(void *ctx, const struct frame *f, int fds[FRAME_MAX_FDS], bool may_wait)
{
    struct rank *r = ctx;
    if (may_wait && rank_cause_may_come(r, f))
        return false;
    r->released_ns = 0;
    switch (f->type) {
    case FRAME_HELLO:
        if (r->old_frames == UINT64_MAX)
            r->old_frames = f->number;
        if (r->state == RANK_STARTING) {
            r->state = RANK_PRESENT;
            r->cell = f->cell;
            roster_save(r->group);
            rank_watch_memory(r);
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
    case FRAME_TRACE:
        if (f->number > r->old_frames)
            stacks_on_trace(r->group, r, f->arg, (const char *)f->payload, f->length);
        break;
    default:
        rank_json(r, f, fds);
    }
    return true;
}

/* Keeps what faulthandler says of a crash, if this is it. */
static void rank_note_crash(struct rank *r, const char *text, size_t len)
{
    const char *fatal = r->crash.len ? text : memmem(text, len, RANK_FATAL, strlen(RANK_FATAL));
    size_t more = fatal ? (size_t)(text + len - fatal) : 0;
    size_t room = RANK_CRASH_MAX - r->crash.len;
    if (fatal)
        buf_add(&r->crash, fatal, more < room ? more : room);
}

static void rank_on_output(void *ctx, int fd, const char *text, size_t len, uint64_t end)
{
    struct rank *r = ctx;
    struct output_origin from = rank_origin(r, r->cell, 0);
    from.pipe_end = end;
    output_stream(r->group->output, from, fd, text, len);
    if (fd == 2)
        rank_note_crash(r, text, len);
}

static void rank_on_lost_text(void *ctx, int fd, uint64_t bytes)
{
    struct rank *r = ctx;
    log_warn("group=%s rank=%d: %llu bytes of fd %d are lost", r->group->spec.name, r->index,
             (unsigned long long)bytes, fd);
    rank_add_gap(r, rank_origin(r, r->cell, 0), 0, (int64_t)bytes);
}

static bool rank_on_batch(void *ctx)
{
    struct rank *r = ctx;
    return group_commit(r->group) == 0;
}

/* --- how a rank goes --- */

/* "at Cell In[3], line 2: ...", from what faulthandler wrote of the thread that crashed. */
static void rank_crash_place(struct rank *r, struct buf *out)
{
    const char *at = strstr(buf_cstr(&r->crash), "Current thread 0x");
    struct trace_text rest = {at, at ? strlen(at) : 0};
    struct trace_line l;
    struct stacks_place place;
    enum trace_kind kind;
    while ((kind = trace_next(&rest, &l)) != TRACE_END && l.text.len) {
        if (kind != TRACE_FRAME || !l.execution)
            continue;
        stacks_place_line(r->group, &l, &place);
        buf_addf(out, " at %s", place.where);
        if (place.source.len)
            buf_addf(out, ": %.*s", (int)place.source.len, place.source.at);
        return;
    }
}

/* What more there is to say of the end of a rank than its status. */
static void rank_describe_exit(struct rank *r, int status, struct buf *out)
{
    int64_t kills = oom_count(&r->oom);
    bool unknown = status == WORKER_STATUS_UNKNOWN;
    bool killed = unknown || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    if (!unknown && WIFEXITED(status))
        buf_addf(out, " (code called os._exit, or exit in C)");
    else if (killed && r->killed)
        buf_adds(out, " by ddipd: it was stuck after the process group was aborted");
    else if (killed && r->oom.before >= 0 && kills > r->oom.before)
        buf_addf(out,
                 ": out of memory, for the kernel's count of such kills in its cgroup went from "
                 "%lld to %lld",
                 (long long)r->oom.before, (long long)kills);
    else if (r->crash.len)
        rank_crash_place(r, out);
}

static void rank_on_exit(void *ctx, int status, const char *last_words)
{
    struct rank *r = ctx;
    struct err why = ERR_INIT;
    char who[32];
    snprintf(who, sizeof(who), "rank %d", r->index);
    struct buf more = BUF_INIT;
    rank_describe_exit(r, status, &more);
    start_describe_exit(who, status, more.len ? buf_cstr(&more) : "", last_words, &why);
    buf_deinit(&more);
    why.rank = r->index;
    bool expected = r->leaving;
    bool respawn = (r->respawn || r->killed) && r->group->state == GROUP_STARTING;
    worker_close(r->worker);
    r->worker = NULL;
    r->state = RANK_DEAD;
    stacks_rank_lost(r->group, r);
    if (respawn && rank_start(r, &why) == 0)
        return;
    group_rank_gone(r->group, r, expected && !respawn ? NULL : &why);
}

static void rank_on_pid(void *ctx)
{
    struct rank *r = ctx;
    group_rank_present(r->group);
}

static const struct worker_events rank_events = {
    .on_pid = rank_on_pid,
    .on_frame = rank_on_frame,
    .on_output = rank_on_output,
    .on_lost_text = rank_on_lost_text,
    .on_batch = rank_on_batch,
    .on_exit = rank_on_exit,
};
