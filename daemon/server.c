/* SPDX-License-Identifier: Apache-2.0 */
/*
 * server.c - the daemon from start to stop: what is opened in which order, signals, systemd.
 *
 * Two ways to stop. SIGINT and POST /v1/shutdown stop everything: groups first, the daemon when the
 * last process is gone. SIGTERM stops the daemon alone: ranks keep computing without it.
 */
#include "server.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

#include "adopt.h"
#include "api.h"
#include "auth.h"
#include "gpu.h"
#include "http.h"
#include "hub.h"
#include "listener.h"
#include "log.h"
#include "nccl.h"
#include "pool.h"
#include "systemd.h"
#include "template.h"
#include "ws.h"

#define SERVER_LAST_TURNS 200 /* of the loop, for closing handles */

struct server {
    struct config *config;
    int argc;
    char **argv;
    uv_loop_t loop;
    int lock_fd;
    struct hub *hub;
    struct gpu *gpu;
    struct nccl *nccl;
    struct templates *templates;
    struct pool pool;
    struct auth auth;
    struct api api;
    struct http *http;
    struct ws *ws;
    struct listener *listener;
    uv_signal_t signals[3];
    uv_timer_t watchdog;
    bool stopping, keep_ranks;
};

/* --- the runtime folder --- */

/* The folder must be ours and closed to others: it may lie in /tmp, where anyone can be first. */
static int server_check_dir(const char *path, struct err *err)
{
    struct stat st;
    if (util_mkdirs(path, 0700, err) < 0)
        return -1;
    if (lstat(path, &st) < 0)
        return err_errno(err, ERR_IO, errno, "%s", path);
    if (!S_ISDIR(st.st_mode) || st.st_uid != getuid() || (st.st_mode & 077)) {
        err_set(err, ERR_FORBIDDEN, "%s must be a folder of user %u with mode 0700", path,
                (unsigned)getuid());
        return err_hint(err, "chmod 700 it, or name another one");
    }
    return 0;
}

/* Holds runtime_dir/ddipd.pid locked for as long as this process lives. */
static int server_lock(struct server *s, struct err *err)
{
    char *path = util_printf("%s/ddipd.pid", s->config->runtime_dir), text[32] = "";
    s->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    int rc = 0;
    if (s->lock_fd < 0) {
        rc = err_errno(err, ERR_IO, errno, "cannot open %s", path);
    } else if (flock(s->lock_fd, LOCK_EX | LOCK_NB) < 0) {
        if (pread(s->lock_fd, text, sizeof(text) - 1, 0) < 0)
            text[0] = '\0';
        text[strcspn(text, "\n")] = '\0';
        rc = err_set(err, ERR_CONFLICT, "another ddipd (pid %s) runs in %s", text,
                     s->config->runtime_dir);
        err_hint(err, "use that one, stop it, or give --runtime-dir and --state-dir of its own");
    } else {
        int n = snprintf(text, sizeof(text), "%d\n", (int)getpid());
        if (ftruncate(s->lock_fd, 0) < 0 || pwrite(s->lock_fd, text, (size_t)n, 0) != n)
            rc = err_errno(err, ERR_IO, errno, "cannot write %s", path);
    }
    free(path);
    return rc;
}

static int server_write_url(struct server *s, struct err *err)
{
    char *path = util_printf("%s/url", s->config->runtime_dir);
    const char *url = listener_url(s->listener);
    int rc = 0;
    if (url)
        rc = util_write_file(path, 0600, url, strlen(url), err);
    else
        unlink(path);
    free(path);
    return rc;
}

static void server_clean_dir(struct server *s)
{
    if (!s->auth.token[0])
        return; /* we did not get as far as writing them: they are another daemon's */
    static const char *const files[] = {"url", "token"};
    for (size_t i = 0; i < UTIL_COUNT(files); i++) {
        char *path = util_printf("%s/%s", s->config->runtime_dir, files[i]);
        unlink(path);
        free(path);
    }
}

/* --- signals and systemd --- */

static void server_on_drained(void *ctx)
{
    struct server *s = ctx;
    uv_stop(&s->loop);
}

static void server_stop(struct server *s, bool keep_ranks, const char *why)
{
    if (s->stopping)
        return;
    s->stopping = true;
    s->keep_ranks = keep_ranks;
    log_info("stopping %s: %s", keep_ranks ? "the daemon alone" : "everything", why);
    systemd_notify("STOPPING=1\nSTATUS=Stopping");
    if (keep_ranks)
        uv_stop(&s->loop);
    else
        pool_stop(&s->pool, server_on_drained, s);
}

static void server_shutdown(void *ctx)
{
    server_stop(ctx, false, "asked to by a client");
}

static void server_reload(struct server *s)
{
    struct err err = ERR_INIT;
    struct timespec now;
    enum log_level level;
    clock_gettime(CLOCK_MONOTONIC, &now);
    systemd_notify("RELOADING=1\nMONOTONIC_USEC=%llu", (unsigned long long)now.tv_sec * 1000000u +
                                                           (unsigned long long)now.tv_nsec / 1000u);
    if (config_reload(s->config, s->argc, s->argv, &err) < 0)
        log_error("reload: %s; the settings stay as they were", err.msg);
    else
        log_info("reload: done");
    if (log_level_parse(s->config->log_level, &level) == 0)
        log_set_level(level);
    systemd_notify("READY=1");
}

static void server_on_signal(uv_signal_t *handle, int signum)
{
    struct server *s = handle->data;
    if (signum == SIGHUP)
        server_reload(s);
    else
        server_stop(s, signum == SIGTERM, strsignal(signum));
}

static void server_on_watchdog(uv_timer_t *timer)
{
    (void)timer;
    systemd_notify("WATCHDOG=1");
}

static void server_start_signals(struct server *s)
{
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* RLIMIT_FSIZE is like a full disk: write says so */
    for (size_t i = 0; i < UTIL_COUNT(numbers); i++) {
        uv_signal_init(&s->loop, &s->signals[i]);
        s->signals[i].data = s;
        uv_signal_start(&s->signals[i], server_on_signal, numbers[i]);
    }
    uint64_t ms = systemd_watchdog_ms();
    uv_timer_init(&s->loop, &s->watchdog);
    s->watchdog.data = s;
    if (ms)
        uv_timer_start(&s->watchdog, server_on_watchdog, 0, ms);
}

/* --- start and stop --- */

static int server_start(struct server *s, struct err *err)
{
    if (server_check_dir(s->config->runtime_dir, err) < 0 ||
        server_check_dir(s->config->state_dir, err) < 0 || server_lock(s, err) < 0)
        return -1;
    s->gpu = gpu_open(s->config->cudart_library, s->config->nvml_library);
    s->nccl = nccl_open(s->config->nccl_library);
    server_start_signals(s);
    if (auth_init(&s->auth, s->config, err) < 0)
        return -1;
    s->hub = hub_new(&s->loop, s->config->runtime_dir, err);
    if (!s->hub)
        return -1;
    s->templates = templates_new(s->hub, s->config);
    pool_init(&s->pool, &s->loop, s->config, s->hub, s->gpu, s->nccl, s->templates);
    s->api = (struct api){.pool = &s->pool,
                          .auth = &s->auth,
                          .config = s->config,
                          .started = util_now(),
                          .shutdown = server_shutdown,
                          .shutdown_ctx = s};
    if (adopt_all(&s->pool, err) < 0)
        return -1;
    s->http = http_new(&s->loop, &s->api, err);
    s->ws = s->http ? ws_new(&s->loop, &s->api, err) : NULL;
    s->listener = s->ws ? listener_new(&s->loop, s->config, s->http, s->ws, err) : NULL;
    if (!s->listener || server_write_url(s, err) < 0)
        return -1;
    s->api.url = listener_url(s->listener);
    return 0;
}

static void server_close_handles(struct server *s)
{
    for (size_t i = 0; i < UTIL_COUNT(s->signals); i++) {
        if (s->signals[i].data)
            uv_close((uv_handle_t *)&s->signals[i], NULL);
    }
    if (s->watchdog.data)
        uv_close((uv_handle_t *)&s->watchdog, NULL);
}

/* In the reverse order of the start. */
static void server_end(struct server *s)
{
    listener_close(s->listener);
    http_close(s->http);
    ws_close(s->ws);
    if (s->templates)
        templates_close(s->templates);
    hub_close(s->hub);
    server_close_handles(s);
    for (int i = 0; i < SERVER_LAST_TURNS && uv_run(&s->loop, UV_RUN_NOWAIT); i++)
        ;
    ws_free(s->ws);
    if (uv_loop_close(&s->loop) != 0)
        log_error("some handles were not closed");
    nccl_close(s->nccl);
    gpu_close(s->gpu);
    server_clean_dir(s);
}

int server_run(struct config *config, int argc, char **argv)
{
    struct server s = {.config = config, .argc = argc, .argv = argv, .lock_fd = -1};
    struct err err = ERR_INIT;
    enum log_level level;
    umask(0077);
    if (log_level_parse(config->log_level, &level) == 0)
        log_set_level(level);
    uv_loop_init(&s.loop);
    if (server_start(&s, &err) < 0) {
        log_error("cannot start: %s%s%s", err.msg, err.hint[0] ? "; " : "", err.hint);
        server_end(&s);
        return 1;
    }
    log_info("ready on %s%s%s", config->socket, s.api.url ? " and " : "",
             s.api.url ? s.api.url : "");
    systemd_notify("READY=1\nSTATUS=Serving on %s", s.api.url ? s.api.url : config->socket);
    uv_run(&s.loop, UV_RUN_DEFAULT);
    log_info("stopped");
    if (s.keep_ranks)
        _exit(0); /* closing would end the ranks: the kernel lets go of everything else */
    server_end(&s);
    return 0;
}
