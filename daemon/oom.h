/* SPDX-License-Identifier: Apache-2.0 */
/*
 * oom.h - was a process killed because memory ran out? The kernel says so in a count only, that of
 * such kills in the process's memory cgroup (version 2 or 1).
 */
#ifndef DDIPD_OOM_H
#define DDIPD_OOM_H

#include <stdint.h>
#include <sys/types.h>

struct oom {
    char *file;     /* where the count is; NULL: nowhere */
    int64_t before; /* -1: not known */
};

/* Finds the count of the living process pid under root (/sys/fs/cgroup) and remembers it. */
void oom_watch(struct oom *o, const char *root, pid_t pid);
/* The count now; -1: not known. */
int64_t oom_count(const struct oom *o);
void oom_deinit(struct oom *o);

/* What oom_watch does, given the text of /proc/PID/cgroup. */
void oom_watch_text(struct oom *o, const char *root, const char *cgroups);

#endif
