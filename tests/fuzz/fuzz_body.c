/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_body.c - requests: method and path or op, query, headers, body, of a caller who may all, to
 * a daemon with one group of three ranks.
 *
 * An input is text: "METHOD /path?key=value&..." or "op NAME", lines "a:ACCEPT", "t:CONTENT-TYPE",
 * "p:PREFER", "l:LAST-EVENT-ID", "i:IDEMPOTENCY-KEY", an empty line, and the body or the message.
 */
#include "api.h"

#include "once.h"
#include "rank.h"
#include "world.h"

static struct api api;
static bool shutting_down;

static void on_shutdown(void *ctx)
{
    (void)ctx;
    shutting_down = true;
}

static void on_ready(void *ctx)
{
    (void)ctx;
}

/* --- ranks that say nothing and go when told --- */

static void on_frame(void *ctx, const struct frame *f, int fds[FRAME_MAX_FDS])
{
    (void)ctx;
    (void)f;
    (void)fds;
}

static void on_output(void *ctx, int fd, const char *text, size_t len)
{
    (void)ctx;
    (void)fd;
    (void)text;
    (void)len;
}

static void on_batch(void *ctx)
{
    (void)ctx;
}

static void on_exit_of_rank(void *ctx, int status, const char *last_words)
{
    struct rank *r = ctx;
    (void)status;
    (void)last_words;
    worker_close(r->worker);
    r->worker = NULL;
    r->state = RANK_DEAD;
    group_rank_gone(r->group, r, NULL);
}

static const struct worker_events silent = {
    .on_frame = on_frame, .on_output = on_output, .on_batch = on_batch, .on_exit = on_exit_of_rank};

static void on_exit_of_store(void *ctx, int status, const char *last_words)
{
    (void)ctx;
    (void)status;
    (void)last_words;
}

static const struct worker_events silent_store = {.on_frame = on_frame,
                                                  .on_output = on_output,
                                                  .on_batch = on_batch,
                                                  .on_exit = on_exit_of_store};

/* --- from text to a call --- */

static void read_query(struct api_call *call, char *query)
{
    char *pair;
    while ((pair = strsep(&query, "&")) != NULL && call->query_len + 2 <= UTIL_COUNT(call->query)) {
        char *value = strchr(pair, '=');
        if (value)
            *value++ = '\0';
        call->query[call->query_len++] = util_strdup(pair);
        call->query[call->query_len++] = util_strdup(value ? value : "");
    }
}

static void read_header(struct api_call *call, const char *line)
{
    struct api_headers *h = &call->headers;
    char **slots[] = {&h->accept, &h->content_type, &h->prefer, &h->last_event_id,
                      &h->idempotency_key};
    static const char letters[] = "atpli";
    const char *which = line[0] && line[1] == ':' ? strchr(letters, line[0]) : NULL;
    if (!which)
        return;
    char **slot = slots[which - letters];
    free(*slot);
    *slot = util_strdup(line + 2);
}

/* The line without its end; *text moves behind it. */
static char *next_line(char **text)
{
    return *text ? strsep(text, "\n") : NULL;
}

/* False: nothing that a transport would pass on. */
static bool read_request(struct api_call *call, char *first)
{
    char *rest = first, *word = strsep(&rest, " ");
    if (!rest)
        return false;
    if (strcmp(word, "op") == 0) {
        call->op = rest;
        return true;
    }
    call->method = word;
    call->path = util_strdup(strsep(&rest, "?"));
    read_query(call, rest);
    return true;
}

/* --- what must hold --- */

static void check_answer(const struct api_call *call)
{
    struct err err = ERR_INIT;
    if (call->state != API_ANSWERED)
        return;
    fuzz_check(call->status >= 200 && call->status < 600 && call->content_type);
    bool problem = strcmp(call->content_type, "application/problem+json") == 0;
    fuzz_check(problem == (call->status >= 400));
    if (!problem && (strcmp(call->content_type, "application/json") != 0 || call->stream))
        return;
    json *j = json_parse((const char *)call->out.data, call->out.len, &err);
    fuzz_check(json_is_object(j));
    fuzz_check(!problem ||
               (json_string(json_get(j, "detail")) && *json_string(json_get(j, "detail"))));
    json_free(j);
}

/* A cell that nobody takes part in would never end. */
static void check_cells(const struct group *g)
{
    const struct cell *c;
    TAILQ_FOREACH(c, &g->cells, link)
    {
        bool any = false;
        for (int i = 0; i < g->spec.ranks; i++)
            any |= c->ranks[i].takes_part;
        fuzz_check(any);
    }
}

static void handle(struct api_call *call, const char *body, size_t len)
{
    struct auth_claims claims = {.host = "h"};
    struct err err = ERR_INIT;
    if (call->op) {
        call->message = json_parse(body, len, &err);
        if (!json_is_object(call->message))
            return;
    }
    if (api_open(call, &claims) < 0)
        return;
    if (!call->op && (api_body_add(call, body, len / 2) < 0 ||
                      api_body_add(call, body + len / 2, len - len / 2) < 0))
        return;
    api_handle(call);
    fuzz_check(call->state != API_OPEN);
}

static void begin(void)
{
    struct err err = ERR_INIT;
    struct cell_spec spec = {.code = "pass", .code_len = 4, .store_history = -1};
    world_init();
    api = (struct api){.pool = &world.pool,
                       .auth = &world.auth,
                       .config = &world.config,
                       .once = once_new(),
                       .started = util_now(),
                       .shutdown = on_shutdown};
    struct group *g = world_group(3, &silent, true);
    g->store = worker_new(g->pool->hub, "store", &silent_store, g, &err); /* none is started anew */
    g->store_port = 1;
    for (int i = 0; i < 2; i++)
        fuzz_check(cell_new(g, &spec, &err));
    world_turn();
}

static void end(void)
{
    worker_close(world.group->store);
    world.group->store = NULL;
    world_end();
    once_free(api.once);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct auth_peer peer = {.local = true, .uid = getuid()};
    struct api_call call;
    begin();
    api_call_init(&call, &api, peer);
    call.wake = call.ready = on_ready;
    char *text = util_strndup((const char *)data, size), *rest = text, *line = next_line(&rest);
    size_t length = strlen(text);
    if (line && read_request(&call, line)) {
        while ((line = next_line(&rest)) != NULL && *line)
            read_header(&call, line);
        size_t from = rest ? (size_t)(rest - text) : length;
        uint8_t *body = fuzz_copy(data + from, size - from); /* may hold NULs */
        handle(&call, (const char *)body, size - from);
        world_turn();
        check_answer(&call);
        check_cells(world.group);
        if (call.stream)
            world_read(call.stream);
        free(body);
    }
    world_check_events(world.group->output);
    bool late = size % 2; /* the asker goes before the group, or after */
    if (!late)
        api_close(&call);
    end();
    if (late)
        api_close(&call);
    free(text);
    return 0;
}
