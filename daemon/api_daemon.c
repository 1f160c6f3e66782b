/* SPDX-License-Identifier: Apache-2.0 */
/* api_daemon.c - questions about the daemon itself: health, info, GPUs, shutdown. */
#include "api_daemon.h"

#include <unistd.h>

#include "api.h"
#include "frame.h"
#include "gpu.h"
#include "nccl.h"
#include "record.h"

#ifndef DDIPD_VERSION
#define DDIPD_VERSION "0.0.0"
#endif

void api_daemon_health(struct api_call *call)
{
    buf_adds(&call->out, "ok\n");
    api_answer(call, 200, "text/plain; charset=utf-8");
}

void api_daemon_ready(struct api_call *call)
{
    const struct pool *p = call->api->pool;
    const struct group *g;
    struct err err = ERR_INIT;
    if (p->drained)
        err_set(&err, ERR_UNAVAILABLE, "the daemon is shutting down");
    TAILQ_FOREACH(g, &p->groups, link) /* no names: no token was asked for */
    {
        if (!err.code && output_failing(g->output))
            err_set(&err, ERR_UNAVAILABLE, "a group's journal cannot be written; the log says why");
    }
    if (err.code)
        api_problem(call, &err, NULL);
    else
        api_daemon_health(call);
}

static void api_daemon_cuda(struct jw *w, const struct gpu *gpu)
{
    jw_object(w, "cuda");
    jw_bool(w, "available", gpu_available(gpu));
    jw_string(w, "reason", gpu_reason(gpu));
    jw_int(w, "devices", (int64_t)gpu_count(gpu));
    jw_string(w, "driver_version", gpu_driver_version(gpu));
    jw_string(w, "cuda_version", gpu_cuda_version(gpu));
    jw_string(w, "runtime_version", gpu_runtime_version(gpu));
    jw_string(w, "nvml_reason", gpu_nvml_reason(gpu));
    jw_end_object(w);
}

static void api_daemon_nccl(struct jw *w, struct nccl *nccl)
{
    jw_object(w, "nccl");
    jw_bool(w, "available", nccl_available(nccl));
    jw_string(w, "version", nccl_available(nccl) ? nccl_version(nccl) : NULL);
    jw_string(w, "reason", nccl_reason(nccl));
    jw_end_object(w);
}

void api_daemon_info(struct api_call *call)
{
    struct jw w = api_json(call);
    jw_object(&w, NULL);
    jw_string(&w, "name", "ddipd");
    jw_string(&w, "version", DDIPD_VERSION);
    jw_int(&w, "protocol", FRAME_VERSION);
    jw_int(&w, "pid", getpid());
    jw_int(&w, "uid", getuid());
    jw_double(&w, "uptime_s", util_now() - call->api->started);
    jw_string(&w, "url", call->api->url);
    jw_string(&w, "socket", call->api->config->socket);
    api_daemon_cuda(&w, call->api->pool->gpu);
    api_daemon_nccl(&w, call->api->pool->nccl);
    jw_end_object(&w);
    api_answer_json(call, 200);
}

void api_daemon_gpus(struct api_call *call)
{
    struct gpu *gpu = call->api->pool->gpu;
    struct jw w = api_json(call);
    gpu_refresh(gpu);
    jw_object(&w, NULL);
    jw_string(&w, "reason", gpu_reason(gpu));
    jw_array(&w, "gpus");
    for (size_t i = 0; i < gpu_count(gpu); i++)
        record_gpu(&w, call->api->pool, gpu_at(gpu, i));
    jw_end_array(&w);
    jw_end_object(&w);
    api_answer_json(call, 200);
}

void api_daemon_shutdown(struct api_call *call)
{
    struct jw w = api_json(call);
    jw_object(&w, NULL);
    jw_string(&w, "state", "stopping");
    jw_end_object(&w);
    api_answer_json(call, 202);
    call->api->shutdown(call->api->shutdown_ctx);
}

void api_daemon_upgrade(struct api_call *call)
{
    struct err err = ERR_INIT;
    err_set(&err, ERR_UPGRADE, "/v1/ws speaks WebSocket, as the first request of a connection");
    err_hint(&err, "open a new connection and send the upgrade request on it");
    call->close = true;
    api_problem(call, &err, NULL);
}
