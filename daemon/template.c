/* SPDX-License-Identifier: Apache-2.0 */
/*
 * template.c - warm processes that ranks are forked from, one per interpreter and environment.
 *
 * The channel is a SOCK_SEQPACKET pair: one message, one request or answer; a request carries the
 * descriptor of the child's early output. Requests are sent one at a time, so an answer needs no
 * number. The end of the channel is the end of the template, whichever side ends it.
 */
#include "template.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "hub.h"
#include "json.h"
#include "log.h"
#include "wire.h"
#include "worker.h"

#define TEMPLATE_REAP_MS 2000
#define TEMPLATE_CANNOT 3   /* a worker's exit code for "this interpreter will not do" */
#define TEMPLATE_WORDS 4096 /* of what it printed, for the error message */

struct template_request {
    TAILQ_ENTRY(template_request) link;
    struct worker *w; /* NULL: forgotten */
    char *config;
    int out_fd;
};

TAILQ_HEAD(template_queue, template_request);

struct template
{
    TAILQ_ENTRY(template) link;
    struct templates *all;
    char *key; /* program and environment */
    pid_t pid;
    int channel, words_fd;
    uv_poll_t poll;
    uv_timer_t idle;
    int handles;
    bool ready, sent; /* sent: the first request is under way */
    struct template_queue queue;
};

struct templates {
    struct hub *hub;
    const struct config *config;
    TAILQ_HEAD(, template) list;
};

struct templates *templates_new(struct hub *hub, const struct config *config)
{
    struct templates *t = util_calloc(1, sizeof(*t));
    t->hub = hub;
    t->config = config;
    TAILQ_INIT(&t->list);
    return t;
}

static void template_request_free(struct template *t, struct template_request *r)
{
    TAILQ_REMOVE(&t->queue, r, link);
    close(r->out_fd);
    free(r->config);
    free(r);
}

static void template_closed(uv_handle_t *handle)
{
    struct template *t = handle->data;
    if (--t->handles)
        return;
    close(t->channel);
    close(t->words_fd);
    free(t->key);
    free(t);
}

/* Ends the process, if it has not ended itself; what was still to be forked fails with `why`. */
static void template_end(struct template *t, bool alive, const char *why)
{
    log_info("template pid %d: ends: %s", (int)t->pid, why);
    if (alive)
        kill(t->pid, SIGKILL);
    TAILQ_REMOVE(&t->all->list, t, link);
    uv_close((uv_handle_t *)&t->poll, template_closed);
    uv_close((uv_handle_t *)&t->idle, template_closed);
    shutdown(t->channel, SHUT_RDWR);
    struct template_request *r;
    while ((r = TAILQ_FIRST(&t->queue)) != NULL) {
        struct worker *w = r->w;
        template_request_free(t, r);
        if (w)
            worker_never(w, TEMPLATE_CANNOT, why);
    }
}

/* The loop has ended: who sees the daemon gone is to find its templates gone, too. */
static void template_reap(pid_t pid)
{
    const struct timespec nap = {.tv_nsec = 1000 * 1000};
    for (int ms = 0; ms < TEMPLATE_REAP_MS && waitpid(pid, NULL, WNOHANG) == 0; ms++)
        nanosleep(&nap, NULL);
}

void templates_close(struct templates *all)
{
    struct template *t;
    while (all && (t = TAILQ_FIRST(&all->list)) != NULL) {
        template_end(t, true, "shutdown");
        template_reap(t->pid);
    }
    free(all);
}

static void template_on_idle(uv_timer_t *timer)
{
    struct template *t = timer->data;
    if (TAILQ_EMPTY(&t->queue))
        template_end(t, true, "idle");
}

static void template_died(struct template *t)
{
    char words[TEMPLATE_WORDS + 1];
    ssize_t n = read(t->words_fd, words, TEMPLATE_WORDS);
    while (n > 0 && words[n - 1] == '\n')
        n--;
    words[n > 0 ? n : 0] = '\0';
    char *why = n > 0 ? util_strdup(words)
                      : util_printf("the Python interpreter %.*s ended without a word",
                                    (int)strcspn(t->key, "\n"), t->key);
    template_end(t, false, why);
    free(why);
}

static void template_send(struct template *t)
{
    struct template_request *r = TAILQ_FIRST(&t->queue);
    if (!t->ready || t->sent)
        return;
    if (!r) {
        uv_timer_start(&t->idle, template_on_idle, t->all->config->template_idle_s * 1000, 0);
        return;
    }
    t->sent = wire_write(t->channel, r->config, strlen(r->config), &r->out_fd, 1) > 0;
    if (!t->sent)
        template_died(t);
}

static void template_forked(struct template *t, pid_t pid)
{
    struct template_request *r = TAILQ_FIRST(&t->queue);
    struct worker *w = r->w;
    template_request_free(t, r);
    t->sent = false;
    if (w)
        worker_set_pid(w, pid);
    else
        kill(pid, SIGKILL);
}

static void template_on_channel(uv_poll_t *poll, int status, int events)
{
    struct template *t = poll->data;
    char text[512];
    (void)events;
    ssize_t n = status < 0 ? 0 : recv(t->channel, text, sizeof(text), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        template_died(t);
        return;
    }
    struct err err = ERR_INIT;
    json *j = json_parse(text, (size_t)n, &err);
    int64_t pid = 0;
    if (json_is_object(j) && json_get(j, "ready"))
        t->ready = true;
    else if (t->sent && json_is_object(j) && json_integer(json_get(j, "pid"), &pid) && pid > 1)
        template_forked(t, (pid_t)pid);
    else
        log_warn("template pid %d: unexpected message", (int)t->pid);
    json_free(j);
    template_send(t);
}

static char *template_key(const struct launch_spec *spec)
{
    struct buf key = BUF_INIT;
    buf_adds(&key, spec->program);
    for (size_t i = 0; i < spec->env_len; i++)
        buf_addf(&key, "\n%s", spec->env[i]);
    return buf_take(&key);
}

/* Starts the interpreter; fds[0] is our end of the channel, words[0] of what it prints. */
static pid_t template_launch(const struct launch_spec *spec, int fds[2], int words[2],
                             struct err *err)
{
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
        return err_errno(err, ERR_IO, errno, "socketpair");
    if (pipe2(words, O_CLOEXEC | O_NONBLOCK) < 0) {
        close(fds[0]);
        close(fds[1]);
        return err_errno(err, ERR_IO, errno, "pipe");
    }
    struct launch_spec own = *spec;
    own.stdin_fd = fds[1];
    own.out_fd = words[1];
    own.cwd = "/";
    pid_t pid = launch_process(&own, err);
    close(fds[1]);
    close(words[1]);
    if (pid < 0) {
        close(fds[0]);
        close(words[0]);
    }
    return pid;
}

static struct template *template_start(struct templates *all, const struct launch_spec *spec,
                                       char *key, struct err *err)
{
    int fds[2], words[2];
    pid_t pid = template_launch(spec, fds, words, err);
    if (pid < 0) {
        free(key);
        return NULL;
    }
    struct template *t = util_calloc(1, sizeof(*t));
    t->all = all;
    t->key = key;
    t->pid = pid;
    t->channel = fds[0];
    t->words_fd = words[0];
    t->handles = 2;
    t->poll.data = t->idle.data = t;
    TAILQ_INIT(&t->queue);
    uv_poll_init(hub_loop(all->hub), &t->poll, t->channel);
    uv_poll_start(&t->poll, UV_READABLE, template_on_channel);
    uv_timer_init(hub_loop(all->hub), &t->idle);
    TAILQ_INSERT_TAIL(&all->list, t, link);
    log_info("template pid %d: started with %s", (int)pid, spec->program);
    return t;
}

int templates_fork(struct templates *all, const struct launch_spec *spec, const char *config,
                   struct worker *w, struct err *err)
{
    char *key = template_key(spec);
    struct template *t;
    TAILQ_FOREACH(t, &all->list, link)
    {
        if (strcmp(t->key, key) == 0)
            break;
    }
    if (t)
        free(key);
    else if ((t = template_start(all, spec, key, err)) == NULL)
        return -1;
    struct template_request *r = util_calloc(1, sizeof(*r));
    r->w = w;
    r->config = util_strdup(config);
    r->out_fd = dup(spec->out_fd);
    uv_timer_stop(&t->idle);
    TAILQ_INSERT_TAIL(&t->queue, r, link);
    template_send(t);
    return 0;
}

bool templates_forget(struct templates *all, struct worker *w)
{
    struct template *t;
    struct template_request *r;
    bool found = false;
    TAILQ_FOREACH(t, &all->list, link)
    {
        TAILQ_FOREACH(r, &t->queue, link)
        {
            if (r->w == w) {
                r->w = NULL;
                found = true;
            }
        }
    }
    return found;
}
