/* SPDX-License-Identifier: Apache-2.0 */
/* kin.h - everything that descends from a process, and its end. Blocks: see kin.c. */
#ifndef DDIPD_KIN_H
#define DDIPD_KIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* The variable that marks a process and what it starts; the value is blank until kin_mark_self. */
#define KIN_VARIABLE "DDIP_SCOPE"
#define KIN_BLANK "00000000-0000000000000000"

/* A process for good: the number alone may come again. */
struct kin_root {
    pid_t pid;
    uint64_t start; /* as kin_start_time tells */
};

/* When the process was started, in clock ticks since the boot; 0: there is none. */
uint64_t kin_start_time(pid_t pid);

/* A pidfd of it. -1: it is not there. */
int kin_open(struct kin_root root);

/* Marks this process, and so all it will start, by itself; later orphans come to it, not to ddipd.
 * Must come before other threads and before anyone has set the variable. */
void kin_mark_self(void);

/*
 * Ends all descendants of the roots: SIGTERM, a moment, SIGKILL. Then the roots themselves, unless
 * they are spared. Roots may be dead already. Returns how many processes are left after timeout_ms.
 */
size_t kin_end(const struct kin_root *roots, size_t len, bool spare_roots, unsigned timeout_ms);

#endif
