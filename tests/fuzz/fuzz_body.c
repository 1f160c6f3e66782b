/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_body.c - requests: method and path or op, query, headers, body, of a caller who may all, to
 * a daemon with one group of three ranks.
 *
 * An input is up to four requests, separated by lines "---". Each is text: "METHOD
 * /path?key=value&..." or "op NAME", lines "a:ACCEPT", "t:CONTENT-TYPE", "p:PREFER",
 * "l:LAST-EVENT-ID", "i:IDEMPOTENCY-KEY", an empty line, and the body or the message.
 */
#include "api.h"

#include "world.h"

#define REQUESTS 4

/* What a transport keeps of a request. */
struct asked {
    struct api_call call;
    char *text; /* method and op lie in it */
};

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

static struct group *begin(void)
{
    struct err err = ERR_INIT;
    struct cell_spec spec = {.code = "pass", .code_len = 4, .store_history = -1};
    world_init();
    api = (struct api){.pool = &world.pool,
                       .auth = &world.auth,
                       .config = &world.config,
                       .started = util_now(),
                       .shutdown = on_shutdown};
    struct group *g = world_group(3);
    world_make_ready(g);
    for (int i = 0; i < 2; i++)
        fuzz_check(cell_new(g, &spec, &err));
    world_turn();
    return g;
}

/* One request, from its text to its answer, or to waiting for one. */
static void request(struct asked *a, const uint8_t *data, size_t size)
{
    struct auth_peer peer = {.local = true, .uid = getuid()};
    struct api_call *call = &a->call;
    char *rest = a->text = util_strndup((const char *)data, size);
    size_t length = strlen(rest);
    char *line = next_line(&rest);
    api_call_init(call, &api, peer);
    call->wake = call->ready = on_ready;
    if (line && read_request(call, line)) {
        while ((line = next_line(&rest)) != NULL && *line)
            read_header(call, line);
        size_t from = rest ? (size_t)(rest - a->text) : length;
        uint8_t *body = fuzz_copy(data + from, size - from); /* may hold NULs */
        handle(call, (const char *)body, size - from);
        free(body);
    }
}

/* The askers go before the groups, or after. */
static void close_all(struct asked *all, int count)
{
    for (int i = 0; i < count; i++) {
        api_close(&all[i].call);
        free(all[i].text);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct asked all[REQUESTS];
    const char separator[] = "\n---\n";
    const size_t separator_len = sizeof(separator) - 1;
    struct group *g = begin();
    int count = 0;
    bool late = size % 2;
    for (size_t at = 0; at < size && count < REQUESTS;) {
        const uint8_t *end = memmem(data + at, size - at, separator, separator_len);
        size_t n = end ? (size_t)(end - data) - at : size - at;
        request(&all[count++], data + at, n);
        at += n + separator_len;
        world_turn();
    }
    for (int i = 0; i < count; i++) {
        check_answer(&all[i].call);
        if (all[i].call.stream)
            world_read(all[i].call.stream);
    }
    check_cells(g);
    world_check_events(g->output);
    if (!late)
        close_all(all, count);
    world_end();
    if (late)
        close_all(all, count);
    return 0;
}
