/* SPDX-License-Identifier: Apache-2.0 */
/* launch.h - starts a process of the user's Python: own session, nothing inherited but fds 0 to 2.
 */
#ifndef DDIPD_LAUNCH_H
#define DDIPD_LAUNCH_H

#include <stddef.h>
#include <sys/types.h>

#include "err.h"

struct launch_spec {
    const char *program;     /* a path, or a name looked up in PATH */
    const char *const *argv; /* NULL-terminated */
    const char *cwd;
    const char *const *env; /* "NAME=value" that replace or add to this process's environment */
    size_t env_len;
    int stdin_fd; /* becomes fd 0 */
    int out_fd;   /* becomes fd 1 and 2 */
};

/* Returns the pid, or -1 with *err naming the program or folder that was the trouble. */
pid_t launch_process(const struct launch_spec *spec, struct err *err) ERR_MUST_CHECK;

/* A sealed-off file of its own holding data, at position 0: what a child reads from fd 0. */
int launch_memfd(const char *name, const void *data, size_t len, struct err *err) ERR_MUST_CHECK;

#endif
