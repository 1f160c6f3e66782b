/* SPDX-License-Identifier: Apache-2.0 */
/*
 * abort.c - the process group's sockets, and shutting them down under a rank that waits in them.
 *
 * gloo has no abort of its own, but a rank blocked in a collective gets an exception within
 * milliseconds when its connections are shut down, whatever the interpreter is doing. Which sockets
 * those are is found by a bracket around everything that makes them: TCP sockets that are new when
 * the bracket closes are the group's. Known ones stay known across generations, since a model may
 * hold an old group. Only connections are shut: shutting gloo's listener makes its accept fail in a
 * thread where nobody catches the exception, and the process dies.
 */
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ddw.h"

/* Growable set of socket inodes; a process has few. */
static void abort_add(struct abort_set *s, uint64_t inode)
{
    if (s->len == s->cap) {
        s->cap = s->cap ? 2 * s->cap : 32;
        s->inodes = util_realloc(s->inodes, s->cap * sizeof(*s->inodes));
    }
    s->inodes[s->len++] = inode;
}

static bool abort_has(const struct abort_set *s, uint64_t inode)
{
    for (size_t i = 0; i < s->len; i++) {
        if (s->inodes[i] == inode)
            return true;
    }
    return false;
}

static bool abort_is_tcp(int fd)
{
    struct sockaddr_storage addr;
    socklen_t len = sizeof(addr);
    return getsockname(fd, (struct sockaddr *)&addr, &len) == 0 &&
           (addr.ss_family == AF_INET || addr.ss_family == AF_INET6);
}

static bool abort_is_connection(int fd)
{
    int listening = 1;
    socklen_t len = sizeof(listening);
    return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &len) == 0 && !listening;
}

/* Calls visit for every TCP socket of this process. */
static void abort_each(void (*visit)(int fd, uint64_t inode, void *ctx), void *ctx)
{
    DIR *dir = opendir("/proc/self/fd");
    struct dirent *e;
    while (dir && (e = readdir(dir)) != NULL) {
        struct stat st;
        int fd = atoi(e->d_name);
        if (*e->d_name != '.' && fstat(fd, &st) == 0 && S_ISSOCK(st.st_mode) && abort_is_tcp(fd))
            visit(fd, st.st_ino, ctx);
    }
    if (dir)
        closedir(dir);
}

static void abort_visit_add(int fd, uint64_t inode, void *ctx)
{
    (void)fd;
    abort_add(ctx, inode);
}

void abort_bracket_open(void)
{
    if (ddw.bracket_depth++)
        return;
    ddw.before.len = 0;
    abort_each(abort_visit_add, &ddw.before);
}

static void abort_visit_known(int fd, uint64_t inode, void *ctx)
{
    struct abort_set *now = ctx;
    (void)fd;
    if (abort_has(&ddw.known, inode) || !abort_has(&ddw.before, inode))
        abort_add(now, inode);
}

/* What is new, and what of the known is still there. */
void abort_bracket_close(void)
{
    struct abort_set now = {0};
    if (!ddw.bracket_depth || --ddw.bracket_depth)
        return;
    abort_each(abort_visit_known, &now);
    free(ddw.known.inodes);
    ddw.known = now;
}

static void abort_visit_shut(int fd, uint64_t inode, void *ctx)
{
    int *count = ctx;
    bool fresh = ddw.bracket_depth && !abort_has(&ddw.before, inode);
    if (!fresh && !abort_has(&ddw.known, inode))
        return;
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0); /* the number may change hands any moment */
    struct stat st;
    if (own >= 0 && fstat(own, &st) == 0 && st.st_ino == inode && abort_is_connection(own) &&
        shutdown(own, SHUT_RDWR) == 0)
        (*count)++;
    if (own >= 0)
        close(own);
}

int abort_now(void)
{
    int count = 0;
    interrupt_end(); /* an exception is on its way; a second one would only hit its handlers */
    abort_each(abort_visit_shut, &count);
    return count;
}
