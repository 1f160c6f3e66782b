/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.c - starts a process of the user's Python: own session, nothing inherited but fds 0 to 2.
 *
 * posix_spawn reports a missing program or folder to the caller, and unlike fork does not copy page
 * tables.
 */
#include "launch.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util.h"

extern char **environ;

static bool launch_replaced(const struct launch_spec *spec, const char *entry)
{
    size_t name = strcspn(entry, "=") + 1;
    for (size_t i = 0; i < spec->env_len; i++) {
        if (strncmp(spec->env[i], entry, name) == 0)
            return true;
    }
    return false;
}

/* This process's environment with the spec's entries; what systemd told the daemon stays here. */
static char **launch_environment(const struct launch_spec *spec)
{
    static const char *const own[] = {"NOTIFY_SOCKET=", "LISTEN_", "WATCHDOG_",
                                      "JOURNAL_STREAM=", "INVOCATION_ID="};
    size_t count = 0, n = 0;
    while (environ[count])
        count++;
    char **env = util_calloc(count + spec->env_len + 1, sizeof(*env));
    for (size_t i = 0; i < count; i++) {
        bool skip = launch_replaced(spec, environ[i]);
        for (size_t k = 0; k < UTIL_COUNT(own); k++)
            skip |= strncmp(environ[i], own[k], strlen(own[k])) == 0;
        if (!skip)
            env[n++] = environ[i];
    }
    for (size_t i = 0; i < spec->env_len; i++)
        env[n++] = (char *)spec->env[i];
    return env;
}

static int launch_checked(const struct launch_spec *spec, struct err *err)
{
    struct stat st;
    if (stat(spec->cwd, &st) < 0)
        return err_errno(err, ERR_INVALID, errno, "the working folder %s", spec->cwd);
    if (!S_ISDIR(st.st_mode))
        return err_set(err, ERR_INVALID, "the working folder %s is not a folder", spec->cwd);
    return 0;
}

pid_t launch_process(const struct launch_spec *spec, struct err *err)
{
    if (launch_checked(spec, err) < 0)
        return -1;
    close_range(3, ~0U, CLOSE_RANGE_CLOEXEC); /* NCCL's threads open sockets as they please */
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attr;
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, spec->stdin_fd, 0);
    posix_spawn_file_actions_adddup2(&actions, spec->out_fd, 1);
    posix_spawn_file_actions_adddup2(&actions, spec->out_fd, 2);
    posix_spawn_file_actions_addchdir_np(&actions, spec->cwd);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &all);
    posix_spawnattr_setflags(&attr,
                             POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    char **env = launch_environment(spec);
    pid_t pid = -1;
    int rc = posix_spawnp(&pid, spec->program, &actions, &attr, (char *const *)spec->argv, env);
    free(env);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&actions);
    if (rc != 0) {
        err_errno(err, ERR_INVALID, rc, "cannot run the Python interpreter %s", spec->program);
        err_hint(err, "give the path of an interpreter that has IPython, cloudpickle and torch");
        return -1;
    }
    return pid;
}

int launch_memfd(const char *name, const void *data, size_t len, struct err *err)
{
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0)
        return err_errno(err, ERR_IO, errno, "memfd_create");
    size_t done = 0;
    while (done < len) {
        ssize_t n = pwrite(fd, (const char *)data + done, len - done, (off_t)done);
        if (n < 0 && errno != EINTR) {
            err_errno(err, ERR_IO, errno, "cannot write %zu bytes into shared memory", len);
            close(fd);
            return -1;
        }
        done += n > 0 ? (size_t)n : 0;
    }
    return fd;
}
