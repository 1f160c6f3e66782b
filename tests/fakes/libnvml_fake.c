/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libnvml_fake.c - NVML over the made-up machine of fake_gpu.h; it ignores CUDA's order.
 *
 * FAKE_NVML_DEVICES=4     devices NVML knows; FAKE_CUDA_DEVICES, unless set
 * FAKE_NVML_FAIL=1        nvmlInit fails with error 18 (driver and library versions differ)
 * FAKE_NVML_LOST=2        every question about this device fails
 * FAKE_NVML_USED=1024     bytes of memory in use on every device, and
 * FAKE_NVML_UTILISATION=7 how busy it is; both are read at each call. -1: not supported
 * FAKE_NVML_PROCESSES=1   compute processes per device; device d's are pids 1000 * (d + 1) + i
 */
#include "fake_gpu.h"

struct fake_nvml_pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};

struct fake_nvml_memory {
    unsigned long long total, free, used;
};

struct fake_nvml_utilisation {
    unsigned gpu, memory;
};

struct fake_nvml_process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

/* A handle is the device's number plus one, so that it is not NULL. */
static int fake_device(const void *handle)
{
    return (int)(size_t)handle - 1;
}

static int fake_lost(const void *handle)
{
    return fake_device(handle) == fake_env("FAKE_NVML_LOST", -1) ? 15 : 0; /* GPU_IS_LOST */
}

FAKE(int, nvmlInit_v2, void)
{
    return fake_env("FAKE_NVML_FAIL", 0) ? 18 : 0; /* LIB_RM_VERSION_MISMATCH */
}

FAKE(int, nvmlShutdown, void)
{
    return 0;
}

FAKE(const char *, nvmlErrorString, int error)
{
    return error == 18 ? "Driver/library version mismatch" : "fake NVML error";
}

FAKE(int, nvmlSystemGetDriverVersion, char *out, unsigned size)
{
    snprintf(out, size, "580.95.05");
    return 0;
}

FAKE(int, nvmlDeviceGetCount_v2, unsigned *count)
{
    *count = (unsigned)fake_env("FAKE_NVML_DEVICES", fake_env("FAKE_CUDA_DEVICES", 4));
    return 0;
}

FAKE(int, nvmlDeviceGetHandleByIndex_v2, unsigned index, void **handle)
{
    *handle = (void *)((size_t)index + 1);
    return 0;
}

FAKE(int, nvmlDeviceGetUUID, void *handle, char *out, unsigned size)
{
    fake_uuid_text(fake_device(handle), out, size);
    return fake_lost(handle);
}

FAKE(int, nvmlDeviceGetName, void *handle, char *out, unsigned size)
{
    snprintf(out, size, "NVIDIA Fake %d", fake_device(handle));
    return fake_lost(handle);
}

FAKE(int, nvmlDeviceGetPciInfo_v3, void *handle, struct fake_nvml_pci *out)
{
    memset(out, 0, sizeof(*out));
    out->bus = (unsigned)fake_bus(fake_device(handle));
    snprintf(out->bus_id, sizeof(out->bus_id), "00000000:%02X:00.0", out->bus);
    return fake_lost(handle);
}

FAKE(int, nvmlDeviceGetMemoryInfo, void *handle, struct fake_nvml_memory *out)
{
    const char *used = getenv("FAKE_NVML_USED");
    out->total = fake_memory(fake_device(handle));
    out->used = used ? strtoull(used, NULL, 10) : 512ULL << 20;
    out->free = out->total - out->used;
    return used && *used == '-' ? 3 : fake_lost(handle); /* NOT_SUPPORTED */
}

FAKE(int, nvmlDeviceGetUtilizationRates, void *handle, struct fake_nvml_utilisation *out)
{
    int busy = fake_env("FAKE_NVML_UTILISATION", 10 + fake_device(handle));
    out->gpu = out->memory = (unsigned)busy;
    return busy < 0 ? 3 : fake_lost(handle);
}

FAKE(int, nvmlDeviceGetComputeRunningProcesses_v3, void *handle, unsigned *count,
     struct fake_nvml_process *out)
{
    unsigned have = (unsigned)fake_env("FAKE_NVML_PROCESSES", 1), room = *count;
    *count = have;
    if (have > room)
        return 7; /* INSUFFICIENT_SIZE */
    for (unsigned i = 0; i < have; i++)
        out[i] = (struct fake_nvml_process){
            .pid = 1000 * (unsigned)(fake_device(handle) + 1) + i,
            .used = i == 1 ? ~0ULL : 1ULL << 20, /* the second one's is not available */
        };
    return fake_lost(handle);
}
