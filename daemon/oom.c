/* SPDX-License-Identifier: Apache-2.0 */
/*
 * oom.c - was a process killed because memory ran out?
 *
 * The count is that of a cgroup, which ranks usually share with each other and with ddipd. It tells
 * that some process there was killed for memory since it was read the last time; so it is read
 * again whenever the ranks have joined a new generation.
 */
#include "oom.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "util.h"

#define OOM_FILE_MAX 65536

/* Does a version 1 line ("4:cpu,memory:/path") name the controller? */
static bool oom_has_memory(const char *controllers, size_t len)
{
    for (size_t i = 0; i < len;) {
        size_t n = strcspn(controllers + i, ",:");
        if (n == 6 && strncmp(controllers + i, "memory", 6) == 0)
            return true;
        i += n + 1;
    }
    return false;
}

static bool oom_take(struct oom *o, char *file)
{
    if (access(file, R_OK) != 0) {
        free(file);
        return false;
    }
    o->file = file;
    return true;
}

/* One line of /proc/PID/cgroup, "ID:CONTROLLERS:/PATH". */
static void oom_line(struct oom *o, const char *root, const char *line)
{
    const char *controllers = strchr(line, ':');
    const char *path = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!path || path[1] != '/' || strstr(path, "/.."))
        return; /* "/..": outside of what this cgroup namespace shows */
    size_t len = (size_t)(path++ - ++controllers);
    if (len == 0 && !oom_take(o, util_printf("%s%s/memory.events", root, path)))
        (void)oom_take(o, util_printf("%s/unified%s/memory.events", root, path));
    if (!o->file && oom_has_memory(controllers, len))
        (void)oom_take(o, util_printf("%s/memory%s/memory.oom_control", root, path));
}

void oom_watch_text(struct oom *o, const char *root, const char *cgroups)
{
    oom_deinit(o);
    while (*cgroups && !o->file) {
        size_t len = strcspn(cgroups, "\n");
        char *line = util_strndup(cgroups, len);
        oom_line(o, root, line);
        free(line);
        cgroups += len + (cgroups[len] == '\n');
    }
    o->before = oom_count(o);
}

void oom_watch(struct oom *o, const char *root, pid_t pid)
{
    char path[64];
    struct buf text = BUF_INIT;
    struct err err = ERR_INIT;
    snprintf(path, sizeof(path), "/proc/%d/cgroup", (int)pid);
    if (util_read_file(path, OOM_FILE_MAX, &text, &err) < 0)
        buf_reset(&text);
    oom_watch_text(o, root, buf_cstr(&text));
    buf_deinit(&text);
}

int64_t oom_count(const struct oom *o)
{
    struct buf text = BUF_INIT;
    struct err err = ERR_INIT;
    long long count = -1;
    if (o->file && util_read_file(o->file, OOM_FILE_MAX, &text, &err) == 0) {
        const char *line = buf_cstr(&text);
        while (line && sscanf(line, "oom_kill %lld", &count) != 1) {
            line = strchr(line, '\n');
            line = line ? line + 1 : NULL;
        }
    }
    buf_deinit(&text);
    return count;
}

void oom_deinit(struct oom *o)
{
    free(o->file);
    *o = (struct oom){.before = -1};
}
