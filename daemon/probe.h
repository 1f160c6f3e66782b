/* SPDX-License-Identifier: Apache-2.0 */
/*
 * probe.h - which devices CUDA offers to a process with this environment.
 *
 * Asked in a child process that ends at once: a CUDA driver in the daemon would cost tens of
 * megabytes, outlive a driver update, and take the daemon along when it hangs or crashes.
 */
#ifndef DDIPD_PROBE_H
#define DDIPD_PROBE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PROBE_DEVICES_MAX 64

struct probe_device {
    char uuid[48];   /* "GPU-" and 8-4-4-4-12 lower-case hexadecimal digits */
    char bus_id[24]; /* "00000000:3B:00.0", as nvidia-smi writes it */
    char name[128];
    int64_t memory_total;
};

struct probe {
    bool available;
    char reason[768]; /* why not, in words */
    int driver;       /* CUDA version the driver supports, 13000 for 13.0; 0: unknown */
    int runtime;      /* version of the runtime library; 0: the driver library answered */
    size_t count;
    struct probe_device devices[PROBE_DEVICES_MAX];
};

/*
 * Takes as long as the driver takes to start (seconds for many GPUs without persistence mode), at
 * most a minute. library NULL or empty: the usual names of the CUDA runtime, then the driver
 * library itself, since a machine whose only CUDA runtime lies in a Python wheel is common.
 */
void probe_run(const char *library, struct probe *out);

/* "0000:3b:00.0" and "00000000:3B:00.0" become the latter. */
void probe_bus_id(const char *text, char *out, size_t size);

#endif
