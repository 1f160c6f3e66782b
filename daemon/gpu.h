/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu.h - the GPUs of this machine: which there are, how busy they are, which ones a user means.
 *
 * Offered are the devices that CUDA shows to a process with the daemon's environment (so its
 * CUDA_VISIBLE_DEVICES narrows the choice) and that NVML knows too; index, UUID and order are
 * NVML's, the ones nvidia-smi prints. Without NVML the index counts what CUDA shows in PCI order,
 * and use, utilisation and processes are unknown. A MIG instance appears as its whole GPU.
 * No CUDA context and no CUDA library is ever in this process, so memory figures are the users'.
 */
#ifndef DDIPD_GPU_H
#define DDIPD_GPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"
#include "json.h"

#define GPU_PROCESSES_MAX 64

struct gpu;

struct gpu_process {
    int pid;             /* in the host's pid namespace */
    int64_t memory_used; /* bytes, or -1 */
};

struct gpu_device {
    int index;
    char uuid[64];   /* "GPU-..." */
    char bus_id[24]; /* "00000000:3B:00.0" */
    char name[128];
    int64_t memory_total;
    int64_t memory_used; /* bytes, or -1 */
    int utilisation;     /* percent, or -1 */
    /* Compute processes; the first GPU_PROCESSES_MAX of process_total are listed. */
    size_t process_count, process_total;
    struct gpu_process processes[GPU_PROCESSES_MAX];
};

/*
 * Never fails and never returns NULL: without devices, gpu_reason says why. May take seconds (see
 * probe.h) and forks: call it at start. A name may be a path; NULL or "" means the usual names.
 */
struct gpu *gpu_open(const char *cudart_library, const char *nvml_library);
void gpu_close(struct gpu *g); /* NULL is allowed */

bool gpu_available(const struct gpu *g);
const char *gpu_reason(const struct gpu *g);          /* NULL when available */
const char *gpu_nvml_reason(const struct gpu *g);     /* NULL when NVML answers */
const char *gpu_driver_version(const struct gpu *g);  /* "580.95.05" from NVML, or "" */
const char *gpu_cuda_version(const struct gpu *g);    /* what the driver supports, "13.0", or "" */
const char *gpu_runtime_version(const struct gpu *g); /* of libcudart, "13.0", or "" */

size_t gpu_count(const struct gpu *g);
/* at < gpu_count, in the order of index. The result lives as long as g; refresh rewrites it. */
const struct gpu_device *gpu_at(const struct gpu *g, size_t at);

/* Reads memory, utilisation and processes again: a few calls into the driver per device. */
void gpu_refresh(struct gpu *g);

/*
 * What "gpus" in a request means: "all", or an array of indices and UUIDs (or a UUID's beginning,
 * at least 8 digits of it) in any order, which is kept. places[0 .. *count) are arguments for
 * gpu_at. ERR_INVALID: no GPUs, an empty or malformed list, an unknown, ambiguous or doubly named
 * device, or more than max.
 */
int gpu_resolve(const struct gpu *g, const json *selection, size_t *places, size_t max,
                size_t *count, struct err *err) ERR_MUST_CHECK;

#endif
