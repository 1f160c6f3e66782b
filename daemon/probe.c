/* SPDX-License-Identifier: Apache-2.0 */
/*
 * probe.c - which devices CUDA offers to a process with this environment.
 *
 * The child fills one struct probe and writes it to a pipe. cudaGetDeviceCount leaves the count
 * alone when it fails, and of cudaDeviceProp only the first members (name, uuid, luid, memory) lie
 * where this build's header says in every runtime from 10 on.
 */
#include "probe.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "util.h"

void probe_bus_id(const char *text, char *out, size_t size)
{
    unsigned domain, bus, device;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &device) == 3)
        snprintf(out, size, "%08X:%02X:%02X.0", domain, bus, device);
    else
        snprintf(out, size, "%s", text);
}

#ifdef HAVE_CUDART
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "dl.h"

#ifndef PROBE_TIMEOUT_S
#define PROBE_TIMEOUT_S 60
#endif

static const char *const probe_names[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0",
                                          "libcudart.so", "/usr/local/cuda/lib64/libcudart.so"};

struct probe_cudart {
    __typeof__(cudaGetDeviceCount) *count;
    __typeof__(cudaDriverGetVersion) *driver;
    __typeof__(cudaRuntimeGetVersion) *runtime;
    __typeof__(cudaDeviceGetPCIBusId) *bus_id;
    __typeof__(cudaGetDeviceProperties) *properties, *properties_v2;
    __typeof__(cudaGetErrorString) *error_string;
};

#define CUDART(slot, name, required) DL_SYMBOL(struct probe_cudart, slot, name, required)

static const struct dl_symbol probe_cudart_symbols[] = {
    CUDART(count, "cudaGetDeviceCount", true),
    CUDART(driver, "cudaDriverGetVersion", true),
    CUDART(runtime, "cudaRuntimeGetVersion", true),
    CUDART(bus_id, "cudaDeviceGetPCIBusId", true),
    CUDART(properties, "cudaGetDeviceProperties", true),
    CUDART(properties_v2, "cudaGetDeviceProperties_v2", false), /* in 12.x beside the old one */
    CUDART(error_string, "cudaGetErrorString", true),
};

struct probe_cuda {
    __typeof__(cuInit) *init;
    __typeof__(cuDriverGetVersion) *driver;
    __typeof__(cuDeviceGetCount) *count;
    __typeof__(cuDeviceGet) *get;
    __typeof__(cuDeviceGetUuid) *uuid;
    __typeof__(cuDeviceGetPCIBusId) *bus_id;
    __typeof__(cuDeviceGetName) *name;
    __typeof__(cuDeviceTotalMem) *memory;
};

#define CUDA(slot, name) DL_SYMBOL(struct probe_cuda, slot, name, true)

static const struct dl_symbol probe_cuda_symbols[] = {
    CUDA(init, "cuInit"),
    CUDA(driver, "cuDriverGetVersion"),
    CUDA(count, "cuDeviceGetCount"),
    CUDA(get, "cuDeviceGet"),
    CUDA(uuid, "cuDeviceGetUuid"),
    CUDA(bus_id, "cuDeviceGetPCIBusId"),
    CUDA(name, "cuDeviceGetName"),
    CUDA(memory, "cuDeviceTotalMem_v2"),
};

static void probe_uuid(struct probe_device *d, const void *bytes)
{
    const unsigned char *b = bytes;
    size_t n = (size_t)snprintf(d->uuid, sizeof(d->uuid), "GPU");
    for (size_t i = 0; i < 16; i++) {
        bool dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
        n += (size_t)snprintf(d->uuid + n, sizeof(d->uuid) - n, dash ? "-%02x" : "%02x", b[i]);
    }
}

/* Says why the runtime's answer is no, in words a user can act on. */
static void probe_refused(struct probe *p, int error, const char *text)
{
    char version[16];
    snprintf(version, sizeof(version), "%d.%d", p->runtime / 1000, p->runtime % 1000 / 10);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (error == cudaErrorInsufficientDriver && p->driver == 0)
        snprintf(p->reason, sizeof(p->reason),
                 "the CUDA driver is not installed or too old for this CUDA runtime (%s): "
                 "error %d (%s)",
                 version, error, text);
    else if (error == cudaErrorInsufficientDriver)
        snprintf(p->reason, sizeof(p->reason),
                 "the CUDA driver supports CUDA %d.%d and is too old for this CUDA runtime (%s): "
                 "error %d (%s)",
                 p->driver / 1000, p->driver % 1000 / 10, version, error, text);
    else if (error == cudaSuccess || error == cudaErrorNoDevice)
        snprintf(p->reason, sizeof(p->reason), "no NVIDIA GPU is visible%s%.200s%s",
                 visible ? " (CUDA_VISIBLE_DEVICES is \"" : "", visible ? visible : "",
                 visible ? "\")" : "");
    else
        snprintf(p->reason, sizeof(p->reason), "CUDA cannot be used: error %d (%s)", error, text);
}

/* Asks the runtime about one device; -1: it cannot be used. */
static int probe_cudart_device(const struct probe_cudart *api, int at, struct probe_device *d)
{
    union {
        struct cudaDeviceProp p;
        char room[8192]; /* another runtime's struct may be longer than the one we know */
    } properties;
    char bus_id[64];
    memset(&properties, 0, sizeof(properties));
    if ((api->properties_v2 ? api->properties_v2 : api->properties)(&properties.p, at) ||
        api->bus_id(bus_id, sizeof(bus_id), at))
        return -1;
    probe_uuid(d, &properties.p.uuid);
    probe_bus_id(bus_id, d->bus_id, sizeof(d->bus_id));
    snprintf(d->name, sizeof(d->name), "%.120s", properties.p.name);
    d->memory_total = (int64_t)properties.p.totalGlobalMem;
    return 0;
}

/* -1: no such library. Otherwise p says whether there are devices, and why not. */
static int probe_ask_cudart(const char *library, struct probe *p)
{
    struct probe_cudart api;
    char why[sizeof(p->reason) - 64];
    if (!dl_open(library, probe_cudart_symbols, UTIL_COUNT(probe_cudart_symbols), &api, why,
                 sizeof(why))) {
        snprintf(p->reason, sizeof(p->reason), "libcudart not found: %s", why);
        return -1;
    }
    int count = 0;
    api.driver(&p->driver);
    api.runtime(&p->runtime);
    cudaError_t error = api.count(&count);
    for (int i = 0; !error && i < count && p->count < PROBE_DEVICES_MAX; i++)
        if (probe_cudart_device(&api, i, &p->devices[p->count]) == 0)
            p->count++;
    p->available = p->count > 0;
    if (!p->available)
        probe_refused(p, error, api.error_string(error));
    return 0;
}

static int probe_cuda_device(const struct probe_cuda *api, int at, struct probe_device *d)
{
    CUdevice device;
    CUuuid uuid;
    size_t memory;
    char bus_id[64];
    if (api->get(&device, at) || api->uuid(&uuid, device) || api->memory(&memory, device) ||
        api->bus_id(bus_id, sizeof(bus_id), device) || api->name(d->name, sizeof(d->name), device))
        return -1;
    probe_uuid(d, &uuid);
    probe_bus_id(bus_id, d->bus_id, sizeof(d->bus_id));
    d->memory_total = (int64_t)memory;
    return 0;
}

static void probe_ask_cuda(const char *library, struct probe *p)
{
    struct probe_cuda api;
    char why[256];
    int count = 0;
    if (!dl_open(library, probe_cuda_symbols, UTIL_COUNT(probe_cuda_symbols), &api, why,
                 sizeof(why)) ||
        api.init(0) || api.count(&count))
        return;
    api.driver(&p->driver);
    for (int i = 0; i < count && p->count < PROBE_DEVICES_MAX; i++)
        if (probe_cuda_device(&api, i, &p->devices[p->count]) == 0)
            p->count++;
    p->available = p->count > 0;
}

/* The first library with devices answers; failing all, the first that was found says why. */
static void probe_ask(const char *library, struct probe *out)
{
    if (library && *library) {
        probe_ask_cudart(library, out);
        return;
    }
    struct probe p;
    bool found = false;
    for (size_t i = 0; i < UTIL_COUNT(probe_names); i++) {
        memset(&p, 0, sizeof(p));
        bool absent = probe_ask_cudart(probe_names[i], &p) < 0;
        if (p.available || (!found && !absent) || i == 0)
            *out = p;
        if (p.available)
            return;
        found = found || !absent;
    }
    memset(&p, 0, sizeof(p));
    probe_ask_cuda("libcuda.so.1", &p);
    if (p.available)
        *out = p;
}

static _Noreturn void probe_child(const char *library, int fd, struct probe *p)
{
    probe_ask(library, p);
    for (size_t done = 0; done < sizeof(*p);) {
        ssize_t n = write(fd, (char *)p + done, sizeof(*p) - done);
        if (n < 0 && errno != EINTR)
            break;
        done += n > 0 ? (size_t)n : 0;
    }
    _exit(0); /* the parent's atexit handlers and stdio buffers are not ours */
}

/* 1: *to is filled; 0: the child closed its end before that; -1: it did not answer in time. */
static int probe_read(int fd, void *to, size_t size)
{
    uint64_t deadline = util_monotonic_ns() + PROBE_TIMEOUT_S * UINT64_C(1000000000);
    for (size_t have = 0; have < size;) {
        uint64_t now = util_monotonic_ns();
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        int rc = now < deadline ? poll(&ready, 1, (int)((deadline - now) / 1000000 + 1)) : 0;
        if (rc < 0 && errno == EINTR)
            continue;
        if (rc <= 0)
            return -1;
        ssize_t n = read(fd, (char *)to + have, size - have);
        if (n <= 0)
            return 0;
        have += (size_t)n;
    }
    return 1;
}

/* The child's answer, or what became of it. */
static void probe_collect(int fd, pid_t pid, struct probe *p)
{
    int status = 0, rc = probe_read(fd, p, sizeof(*p));
    if (rc < 0) {
        /* Not waited for: a process stuck in the driver does not even die of SIGKILL. */
        kill(pid, SIGKILL);
        *p = (struct probe){0};
        snprintf(p->reason, sizeof(p->reason), "the CUDA driver did not answer within %d s",
                 PROBE_TIMEOUT_S);
        return;
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    if (rc == 1)
        return;
    *p = (struct probe){0};
    snprintf(p->reason, sizeof(p->reason),
             "the CUDA library ended the process it was tried in (%s %d)",
             WIFSIGNALED(status) ? "signal" : "exit code",
             WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}

void probe_run(const char *library, struct probe *out)
{
    int fds[2];
    *out = (struct probe){0};
    if (pipe2(fds, O_CLOEXEC) < 0) {
        snprintf(out->reason, sizeof(out->reason), "cannot make a pipe: %s", strerror(errno));
        return;
    }
    pid_t pid = fork();
    if (pid == 0)
        probe_child(library, fds[1], out);
    close(fds[1]);
    if (pid < 0)
        snprintf(out->reason, sizeof(out->reason), "cannot start a process: %s", strerror(errno));
    else
        probe_collect(fds[0], pid, out);
    close(fds[0]);
}

#else

void probe_run(const char *library, struct probe *out)
{
    (void)library;
    *out = (struct probe){0};
    snprintf(out->reason, sizeof(out->reason), "this ddipd was built without CUDA headers");
}

#endif
