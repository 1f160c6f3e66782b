/* SPDX-License-Identifier: Apache-2.0 */
/*
 * start.c - the processes of a group: what each is told, and how it comes to life.
 *
 * CPU ranks are forked from a warm template. GPU ranks get a fresh interpreter: a template that had
 * touched CUDA, through any library a user's start-up imports, could not be forked.
 */
#include "start.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "config.h"
#include "gpu.h"
#include "hub.h"
#include "kin.h"
#include "launch.h"
#include "nccl.h"
#include "pool.h"
#include "rank.h"
#include "template.h"

/* The worker's exit code for "this interpreter or folder will not do"; it has said why. */
#define START_CANNOT 3
#define START_NONCE 8 /* bytes */

struct start_env {
    char **list;
    size_t len;
};

static void start_env_add(struct start_env *e, const char *name, const char *value)
{
    e->list = util_realloc(e->list, (e->len + 1) * sizeof(*e->list));
    e->list[e->len++] = util_printf("%s=%s", name, value);
}

static void start_env_deinit(struct start_env *e)
{
    for (size_t i = 0; i < e->len; i++)
        free(e->list[i]);
    free(e->list);
}

static bool start_env_said(const struct group *g, const char *name)
{
    return getenv(name) || (g->spec.env && json_get(g->spec.env, name));
}

/* LOCAL_RANK is the index of the rank's device: the group's GPUs are visible, in the user's order.
 */
static void start_env_gpus(struct start_env *e, const struct group *g)
{
    struct buf list = BUF_INIT;
    for (int i = 0; i < g->spec.ranks; i++)
        buf_addf(&list, "%s%s", i ? "," : "", gpu_at(g->pool->gpu, (size_t)g->spec.gpus[i])->uuid);
    start_env_add(e, "CUDA_VISIBLE_DEVICES", buf_cstr(&list));
    buf_deinit(&list);
}

/* Its reports go where the daemon's go. Python's own allocations look like leaks, and a fault of
 * the user's code is to end the rank by its signal, as it does without a sanitizer. */
static void start_env_sanitizer(struct start_env *e)
{
    const char *said = getenv("ASAN_OPTIONS");
    struct buf options = BUF_INIT;
    buf_addf(&options, "%s:detect_leaks=0:handle_segv=0", said ? said : "");
    start_env_add(e, "ASAN_OPTIONS", buf_cstr(&options));
    buf_deinit(&options);
}

static void start_environment(struct start_env *e, const struct group *g)
{
    start_env_add(e, KIN_VARIABLE, KIN_BLANK);
    /* torchrun's choice as well: N ranks with N threads each fight for the same cores */
    if (!start_env_said(g, "OMP_NUM_THREADS"))
        start_env_add(e, "OMP_NUM_THREADS", "1");
    /* ranks are on one host; gloo would look up the host's name, which may not resolve */
    if (!start_env_said(g, "GLOO_SOCKET_IFNAME"))
        start_env_add(e, "GLOO_SOCKET_IFNAME", "lo");
    /* a sanitizer's runtime must be the first library of the process that loads our library */
    const char *preload = getenv("DDIP_WORKER_PRELOAD");
    if (preload && *preload) {
        start_env_add(e, "LD_PRELOAD", preload);
        start_env_sanitizer(e);
    }
    if (g->spec.gpus && !start_env_said(g, "TORCH_NCCL_ASYNC_ERROR_HANDLING"))
        start_env_add(e, "TORCH_NCCL_ASYNC_ERROR_HANDLING",
                      "0"); /* torch's would end the process */
    if (g->spec.gpus)
        start_env_gpus(e, g);
    else if (!(g->spec.env && json_get(g->spec.env, "CUDA_VISIBLE_DEVICES")))
        start_env_add(e, "CUDA_VISIBLE_DEVICES", ""); /* CPU ranks hold no GPU, so they see none */
    for (const json *j = json_first(g->spec.env); j; j = json_next(j))
        start_env_add(e, json_key(j), json_string(j));
}

static void start_config(struct buf *out, const struct group *g, const struct worker *w, int rank)
{
    const struct config *c = g->pool->config;
    const char *role = rank == START_STORE ? "store" : "rank";
    struct jw j = JW_INIT(out);
    jw_object(&j, NULL);
    jw_string(&j, "role", role);
    char *library = util_printf("%s/libddipworker.so", c->worker_dir);
    jw_string(&j, "library", library);
    free(library);
    jw_string(&j, "socket", hub_socket_path(g->pool->hub));
    jw_int(&j, "orphan_timeout_s", (int64_t)c->orphan_timeout_s);
    jw_string(&j, "cwd", g->spec.cwd);
    jw_object(&j, "hello");
    jw_string(&j, "secret", worker_secret(w));
    jw_int(&j, "protocol", START_PROTOCOL);
    jw_string(&j, "role", role);
    jw_string(&j, "group", g->spec.name);
    jw_int(&j, "rank", rank);
    jw_end_object(&j);
    if (rank != START_STORE) {
        jw_int(&j, "rank", rank);
        jw_int(&j, "world_size", g->spec.ranks);
        jw_string(&j, "backend", g->spec.backend);
        jw_string(&j, "app", g->spec.app);
        if (g->spec.gpus)
            jw_int(&j, "gpu_index", rank);
        else
            jw_null(&j, "gpu_index");
    }
    jw_end_object(&j);
}

/* A fresh interpreter, its configuration in a memory file on fd 0. */
static int start_exec(struct launch_spec *spec, struct worker *w, const struct buf *config,
                      struct err *err)
{
    spec->stdin_fd = launch_memfd("ddip-config", config->data, config->len, err);
    if (spec->stdin_fd < 0)
        return -1;
    pid_t pid = launch_process(spec, err);
    close(spec->stdin_fd);
    if (pid < 0)
        return -1;
    worker_set_pid(w, pid);
    return 0;
}

static void start_cannot(struct err *err, int len, const char *words)
{
    err_set(err, ERR_INVALID, "%.*s", len, words);
    err_hint(err, "\"python\" names the interpreter; it needs IPython, cloudpickle and torch");
}

void start_describe_exit(const char *who, int status, const char *more, const char *last_words,
                         struct err *err)
{
    int words = (int)strlen(last_words);
    while (words && last_words[words - 1] == '\n')
        words--;
    const char *colon = words ? ": " : "";
    if (status == WORKER_STATUS_UNKNOWN) {
        err_set(err, ERR_UNAVAILABLE, "%s ended%s; how is not known, an earlier daemon started it",
                who, more);
    } else if (WIFEXITED(status) && WEXITSTATUS(status) == START_CANNOT && words) {
        start_cannot(err, words, last_words);
    } else if (WIFSIGNALED(status)) {
        const char *name = sigabbrev_np(WTERMSIG(status));
        err_set(err, ERR_UNAVAILABLE, "%s was killed by signal %d (%s%s)%s%s%.*s", who,
                WTERMSIG(status), name ? "SIG" : "", name ? name : strsignal(WTERMSIG(status)),
                more, colon, words, last_words);
    } else {
        err_set(err, ERR_UNAVAILABLE, "%s ended with exit code %d%s%s%.*s", who,
                WEXITSTATUS(status), more, colon, words, last_words);
    }
}

int start_worker(struct group *g, struct worker *w, int rank, struct err *err)
{
    struct start_env env = {0};
    struct buf config = BUF_INIT;
    char *entry = util_printf("%s/ddip_worker", g->pool->config->worker_dir);
    const char *argv[] = {g->spec.python, entry, NULL};
    struct launch_spec spec = {.program = g->spec.python, .argv = argv, .cwd = g->spec.cwd};
    start_environment(&env, g);
    spec.env = (const char *const *)env.list;
    spec.env_len = env.len;
    start_config(&config, g, w, rank);
    spec.out_fd = worker_early_output(w, err);
    int rc = spec.out_fd < 0 ? -1 : 0;
    if (rc == 0 && !g->spec.gpus)
        rc = templates_fork(g->pool->templates, &spec, buf_cstr(&config), w, err);
    else if (rc == 0)
        rc = start_exec(&spec, w, &config, err);
    if (spec.out_fd >= 0)
        close(spec.out_fd);
    buf_deinit(&config);
    start_env_deinit(&env);
    free(entry);
    return rc;
}

int start_join_body(struct group *g, struct buf *out, struct err *err)
{
    char id[NCCL_ID_HEX], nonce[2 * START_NONCE + 1];
    if (util_random_hex(nonce, START_NONCE, err) < 0)
        return -1;
    if (g->spec.gpus && nccl_unique_id(g->pool->nccl, id, err) < 0)
        return -1;
    struct jw j = JW_INIT(out);
    jw_object(&j, NULL);
    jw_int(&j, "generation", g->generation);
    jw_string(&j, "nonce", nonce);
    jw_string(&j, "host", g->store_host);
    jw_int(&j, "port", g->store_port);
    jw_int(&j, "timeout_s", (int64_t)g->pool->config->start_timeout_s);
    jw_string(&j, "nccl_id", g->spec.gpus ? id : NULL);
    jw_end_object(&j);
    return 0;
}
