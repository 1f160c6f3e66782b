/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcudart_fake.c - a CUDA runtime over the made-up machine of fake_gpu.h.
 *
 * FAKE_CUDA_DEVICES=4         devices of the machine
 * FAKE_CUDA_ORDER=2,0,1,3     CUDA's numbering of them
 * FAKE_CUDA_ERROR=35          cudaGetDeviceCount fails so, and leaves the count alone
 * FAKE_CUDA_DRIVER=13000      CUDA version of the driver; 0 with FAKE_CUDA_ERROR, unless set
 * FAKE_CUDA_RUNTIME=13000     version of this library
 * FAKE_CUDA_UUID=other        UUIDs that NVML does not know, as for MIG instances
 * FAKE_CUDA_CRASH=1           cudaGetDeviceCount aborts
 * FAKE_CUDA_HANG=1            cudaGetDeviceCount does not return
 */
#include "fake_gpu.h"

#include <unistd.h>

/* The beginning of struct cudaDeviceProp, alike in every runtime since 10.0. */
struct fake_properties {
    char name[256];
    unsigned char uuid[16];
    char luid[8];
    unsigned luid_mask;
    size_t memory;
};

FAKE(int, cudaDriverGetVersion, int *version)
{
    *version = fake_env("FAKE_CUDA_DRIVER", fake_env("FAKE_CUDA_ERROR", 0) ? 0 : 13000);
    return 0;
}

FAKE(int, cudaRuntimeGetVersion, int *version)
{
    *version = fake_env("FAKE_CUDA_RUNTIME", 13000);
    return 0;
}

FAKE(int, cudaGetDeviceCount, int *count)
{
    int devices[FAKE_DEVICES_MAX], error = fake_env("FAKE_CUDA_ERROR", 0);
    if (fake_env("FAKE_CUDA_CRASH", 0))
        abort();
    while (fake_env("FAKE_CUDA_HANG", 0))
        pause();
    if (error)
        return error;
    *count = fake_cuda_devices(devices);
    return *count ? 0 : 100; /* cudaErrorNoDevice */
}

FAKE(int, cudaDeviceGetPCIBusId, char *out, int size, int at)
{
    int devices[FAKE_DEVICES_MAX];
    if (at < 0 || at >= fake_cuda_devices(devices))
        return 101; /* cudaErrorInvalidDevice */
    snprintf(out, (size_t)size, "0000:%02x:00.0", fake_bus(devices[at]));
    return 0;
}

FAKE(int, cudaGetDeviceProperties, struct fake_properties *p, int at)
{
    int devices[FAKE_DEVICES_MAX];
    if (at < 0 || at >= fake_cuda_devices(devices))
        return 101;
    snprintf(p->name, sizeof(p->name), "Fake GPU %c", 'A' + devices[at]);
    fake_uuid(devices[at], p->uuid);
    if (getenv("FAKE_CUDA_UUID"))
        memset(p->uuid, 0xc0 + at, sizeof(p->uuid));
    p->memory = fake_memory(devices[at]);
    return 0;
}

FAKE(const char *, cudaGetErrorString, int error)
{
    return error == 35    ? "CUDA driver version is insufficient for CUDA runtime version"
           : error == 100 ? "no CUDA-capable device is detected"
                          : "fake CUDA error";
}
