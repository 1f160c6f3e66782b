/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_gpu.h - the made-up machine that the fake libcudart, libcuda and libnvml describe.
 *
 * Its devices are numbered in PCI order, as NVML does; FAKE_CUDA_ORDER ("2,0,1,3") is CUDA's order
 * and CUDA_VISIBLE_DEVICES (indices into that order, or UUIDs) narrows it as CUDA would. The UUIDs
 * of devices 1 and 3 begin alike.
 */
#ifndef DDIPD_FAKE_GPU_H
#define DDIPD_FAKE_GPU_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FAKE_DEVICES_MAX 64

/* Declares a function before it defines it: the fakes have no headers of their own. */
#define FAKE(type, name, ...)                                                                      \
    type name(__VA_ARGS__);                                                                        \
    type name(__VA_ARGS__)

static inline int fake_env(const char *name, int fallback)
{
    const char *value = getenv(name);
    return value && *value ? atoi(value) : fallback;
}

static inline void fake_uuid(int device, unsigned char out[16])
{
    static const unsigned char first[4] = {0xe3, 0x1f, 0x9a, 0x1f};
    for (int i = 0; i < 16; i++)
        out[i] = (unsigned char)(0x35 * i + (i < 4 ? 0 : device * 0x1d) + first[device % 4]);
    if (device >= 4)
        out[0] = (unsigned char)(0xff - device);
}

static inline void fake_uuid_text(int device, char *out, size_t size)
{
    unsigned char b[16];
    fake_uuid(device, b);
    snprintf(out, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
             b[14], b[15]);
}

static inline int fake_bus(int device)
{
    return 0x17 + 0x11 * device;
}

static inline size_t fake_memory(int device)
{
    return ((size_t)16 + 8 * (size_t)(device % 2)) << 30;
}

/* Which machine device one entry of CUDA_VISIBLE_DEVICES means; -1: none. */
static inline int fake_visible(const char *entry, const int *order, int count)
{
    char uuid[48];
    for (int i = 0; i < count; i++) {
        fake_uuid_text(order[i], uuid, sizeof(uuid));
        if (strncmp(entry, "GPU-", 4) == 0 ? strncmp(uuid, entry, strlen(entry)) == 0
                                           : atoi(entry) == i && *entry)
            return order[i];
    }
    return -1;
}

/* Fills out with machine devices in CUDA's order and returns how many CUDA shows. */
static inline int fake_cuda_devices(int out[FAKE_DEVICES_MAX])
{
    int order[FAKE_DEVICES_MAX], shown = 0, count = fake_env("FAKE_CUDA_DEVICES", 4);
    if (count > FAKE_DEVICES_MAX)
        count = FAKE_DEVICES_MAX;
    const char *text = getenv("FAKE_CUDA_ORDER");
    for (int i = 0; i < count; i++) {
        char *end = NULL;
        order[i] = text && *text ? (int)strtol(text, &end, 10) : i;
        text = end && *end == ',' ? end + 1 : end;
    }
    memcpy(out, order, sizeof(order));
    if (!getenv("CUDA_VISIBLE_DEVICES"))
        return count;
    char *copy = strdup(getenv("CUDA_VISIBLE_DEVICES")), *rest = copy;
    for (char *entry; (entry = strsep(&rest, ","));) {
        out[shown] = fake_visible(entry, order, count);
        if (out[shown] < 0) /* as CUDA does: what follows a wrong entry is not shown */
            break;
        shown++;
    }
    free(copy);
    return shown;
}

#endif
