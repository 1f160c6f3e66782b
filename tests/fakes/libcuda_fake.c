/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcuda_fake.c - a CUDA driver library over the made-up machine of fake_gpu.h.
 *
 * A test that wants it found under its usual name links it as libcuda.so.1 into a folder of
 * LD_LIBRARY_PATH. FAKE_CUDRV_ERROR=N: cuInit fails so. FAKE_CUDA_DEVICES, FAKE_CUDA_ORDER and
 * CUDA_VISIBLE_DEVICES as in libcudart_fake.c.
 */
#include "fake_gpu.h"

FAKE(int, cuInit, unsigned flags)
{
    (void)flags;
    return fake_env("FAKE_CUDRV_ERROR", 0);
}

FAKE(int, cuDriverGetVersion, int *version)
{
    *version = fake_env("FAKE_CUDA_DRIVER", 13000);
    return 0;
}

FAKE(int, cuDeviceGetCount, int *count)
{
    int devices[FAKE_DEVICES_MAX];
    *count = fake_cuda_devices(devices);
    return 0;
}

FAKE(int, cuDeviceGet, int *device, int at)
{
    int devices[FAKE_DEVICES_MAX];
    if (at < 0 || at >= fake_cuda_devices(devices))
        return 101; /* CUDA_ERROR_INVALID_DEVICE */
    *device = devices[at];
    return 0;
}

FAKE(int, cuDeviceGetUuid, unsigned char *out, int device)
{
    fake_uuid(device, out);
    return 0;
}

FAKE(int, cuDeviceGetPCIBusId, char *out, int size, int device)
{
    snprintf(out, (size_t)size, "0000:%02x:00.0", fake_bus(device));
    return 0;
}

FAKE(int, cuDeviceGetName, char *out, int size, int device)
{
    snprintf(out, (size_t)size, "Fake GPU %c", 'A' + device);
    return 0;
}

FAKE(int, cuDeviceTotalMem_v2, size_t *out, int device)
{
    *out = fake_memory(device);
    return 0;
}
