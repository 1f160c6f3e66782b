/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kin.c - everything that descends from a process, and its end.
 *
 * A descendant may have its own session, may have lost its parent, may ignore signals and may be
 * forking right now. It is known by any of: its parent, its session, the mark in its environment
 * (/proc/PID/environ is inherited by fork as well as by exec), or having been known before. What
 * has neither mark nor session is found only while its chain of parents lives; kin_mark_self makes
 * the root the parent of its orphans, so that is as long as the root lives: roots end last.
 *
 * No look at /proc is a snapshot, so it is looked at until nothing was found twice in a row. Two
 * traps: a pid may be another process by the time of the signal, hence pidfd and start time; and
 * reading another's environ waits for locks of that process, hence the daemon does all this in a
 * child of its own (sweep.c).
 */
#include "kin.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "util.h"

#define KIN_ENVIRON_MAX (4u << 20) /* of one process */
#define KIN_TERM_MS 500            /* from SIGTERM to SIGKILL */
#define KIN_PAUSE_US 2000          /* after the first look; each pause is longer, up to: */
#define KIN_PAUSE_MAX_US 50000
#define KIN_EMPTY 2 /* looks in a row that find nothing */

struct kin_process {
    pid_t pid, ppid, session;
    uint64_t start;
    bool ended; /* a zombie */
    bool root, victim;
};

struct kin {
    const struct kin_root *roots;
    size_t roots_len;
    uint64_t oldest; /* no descendant is older than this */
    struct kin_process *list;
    size_t len, cap;
    struct kin_root *known; /* victims so far */
    size_t known_len, known_cap;
    struct buf environ;
};

/* --- one process --- */

static bool kin_read_stat(pid_t pid, struct kin_process *p)
{
    char path[32], text[1024];
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = '\0';
    const char *after_name = strrchr(text, ')');
    char state;
    int ppid, session;
    long threads;
    unsigned long long start;
    if (!after_name || sscanf(after_name + 1,
                              " %c %d %*d %d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d "
                              "%ld %*d %llu",
                              &state, &ppid, &session, &threads, &start) != 5)
        return false;
    /* the main thread may have ended alone */
    bool ended = (state == 'Z' || state == 'X') && threads <= 1;
    *p = (struct kin_process){
        .pid = pid, .ppid = ppid, .session = session, .start = start, .ended = ended};
    return true;
}

uint64_t kin_start_time(pid_t pid)
{
    struct kin_process p;
    return kin_read_stat(pid, &p) ? p.start : 0;
}

int kin_open(struct kin_root root)
{
    /* in this order: a pid can be another process by now, a pidfd stays with the one it has */
    int fd = (int)syscall(SYS_pidfd_open, root.pid, 0);
    if (fd >= 0 && kin_start_time(root.pid) != root.start) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Only if the process is still the one that was looked at. */
static void kin_signal(pid_t pid, uint64_t start, int signum)
{
    int fd = kin_open((struct kin_root){pid, start});
    if (fd < 0)
        return;
    syscall(SYS_pidfd_send_signal, fd, signum, NULL, 0);
    close(fd);
}

/* --- the mark --- */

void kin_mark_self(void)
{
    pid_t pid = getpid();
    char mark[sizeof(KIN_BLANK)];
    char *value = getenv(KIN_VARIABLE);
    snprintf(mark, sizeof(mark), "%08x-%016llx", (unsigned)pid,
             (unsigned long long)kin_start_time(pid));
    /* in place: it is the memory that /proc shows, of forked processes too */
    if (value && strlen(value) == sizeof(mark) - 1)
        memcpy(value, mark, sizeof(mark));
    else
        setenv(KIN_VARIABLE, mark, 1);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
}

static bool kin_is_root(const struct kin *k, pid_t pid, uint64_t start)
{
    for (size_t i = 0; i < k->roots_len; i++) {
        if (k->roots[i].pid == pid && k->roots[i].start == start)
            return true;
    }
    return false;
}

static void kin_read_environ(struct kin *k, pid_t pid)
{
    char path[32];
    snprintf(path, sizeof(path), "/proc/%d/environ", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : 1;
    k->environ.len = 0;
    while (n > 0 && k->environ.len < KIN_ENVIRON_MAX) {
        n = read(fd, buf_room(&k->environ, 16384), 16384);
        k->environ.len += n > 0 ? (size_t)n : 0;
    }
    if (fd >= 0)
        close(fd);
}

static bool kin_is_marked(struct kin *k, pid_t pid)
{
    static const char name[] = KIN_VARIABLE "=";
    kin_read_environ(k, pid);
    const char *text = buf_cstr(&k->environ), *end = text + k->environ.len, *at = text;
    while ((at = memmem(at, (size_t)(end - at), name, sizeof(name) - 1)) != NULL) {
        bool whole = at == text || at[-1] == '\0';
        unsigned root;
        unsigned long long start;
        at += sizeof(name) - 1;
        if (whole && sscanf(at, "%8x-%16llx", &root, &start) == 2 &&
            kin_is_root(k, (pid_t)root, start))
            return true;
    }
    return false;
}

/* --- one look at all processes --- */

static struct kin_process *kin_find(const struct kin *k, pid_t pid)
{
    for (size_t i = 0; i < k->len; i++) {
        if (k->list[i].pid == pid)
            return &k->list[i];
    }
    return NULL;
}

static void kin_list(struct kin *k)
{
    DIR *dir = opendir("/proc");
    struct dirent *e;
    k->len = 0;
    while (dir && (e = readdir(dir)) != NULL) {
        struct kin_process p;
        if (!isdigit((unsigned char)*e->d_name) || !kin_read_stat((pid_t)atol(e->d_name), &p) ||
            p.start < k->oldest)
            continue;
        if (k->len == k->cap)
            k->list = util_realloc(k->list, (k->cap = k->cap * 2 + 64) * sizeof(*k->list));
        k->list[k->len++] = p;
    }
    if (dir)
        closedir(dir);
}

static bool kin_was_known(const struct kin *k, const struct kin_process *p)
{
    for (size_t i = 0; i < k->known_len; i++) {
        if (k->known[i].pid == p->pid && k->known[i].start == p->start)
            return true;
    }
    return false;
}

/* A rank leads its session; the number may since be that of somebody else's session. */
static bool kin_is_of_session(const struct kin *k, const struct kin_process *p)
{
    for (size_t i = 0; i < k->roots_len; i++) {
        const struct kin_process *leader = kin_find(k, k->roots[i].pid);
        if (p->session == k->roots[i].pid && p->start >= k->roots[i].start &&
            (!leader || leader->start == k->roots[i].start))
            return true;
    }
    return false;
}

/* Children of victims and roots are victims. */
static void kin_spread(struct kin *k)
{
    for (bool more = true; more;) {
        more = false;
        for (size_t i = 0; i < k->len; i++) {
            struct kin_process *p = &k->list[i];
            const struct kin_process *parent = p->victim || p->root ? NULL : kin_find(k, p->ppid);
            if (parent && (parent->victim || parent->root) && p->start >= parent->start &&
                p->pid != getpid())
                more = p->victim = true;
        }
    }
}

/* How many living victims there are; *roots: and how many of the roots live. */
static size_t kin_look(struct kin *k, size_t *roots)
{
    size_t victims = 0;
    kin_list(k);
    *roots = 0;
    for (size_t i = 0; i < k->len; i++) {
        struct kin_process *p = &k->list[i];
        p->root = kin_is_root(k, p->pid, p->start);
        p->victim = !p->root && !p->ended && p->pid != getpid() &&
                    (kin_was_known(k, p) || kin_is_of_session(k, p) || kin_is_marked(k, p->pid));
        *roots += p->root && !p->ended;
    }
    kin_spread(k);
    for (size_t i = 0; i < k->len; i++)
        victims += k->list[i].victim && !k->list[i].ended;
    return victims;
}

/* --- the end --- */

static void kin_remember(struct kin *k, const struct kin_process *p)
{
    if (k->known_len == k->known_cap)
        k->known =
            util_realloc(k->known, (k->known_cap = k->known_cap * 2 + 64) * sizeof(*k->known));
    k->known[k->known_len++] = (struct kin_root){p->pid, p->start};
}

static void kin_signal_victims(struct kin *k, bool late)
{
    for (size_t i = 0; i < k->len; i++) {
        const struct kin_process *p = &k->list[i];
        if (!p->victim || p->ended)
            continue;
        bool known = kin_was_known(k, p);
        if (!known)
            kin_remember(k, p);
        if (late || !known)
            kin_signal(p->pid, p->start, late ? SIGKILL : SIGTERM);
    }
}

size_t kin_end(const struct kin_root *roots, size_t len, bool spare_roots, unsigned timeout_ms)
{
    struct kin k = {.roots = roots, .roots_len = len, .oldest = UINT64_MAX};
    uint64_t began = util_monotonic_ns();
    useconds_t pause = KIN_PAUSE_US;
    size_t victims = 0, living = 0;
    for (size_t i = 0; i < len; i++)
        k.oldest = roots[i].start < k.oldest ? roots[i].start : k.oldest;
    for (int empty = 0; empty < KIN_EMPTY;) {
        uint64_t ms = (util_monotonic_ns() - began) / 1000000;
        victims = kin_look(&k, &living);
        if (spare_roots)
            living = 0;
        empty = victims || living ? 0 : empty + 1;
        kin_signal_victims(&k, ms >= KIN_TERM_MS);
        for (size_t i = 0; i < len && living && !victims; i++)
            kin_signal(roots[i].pid, roots[i].start, SIGKILL);
        if (ms >= timeout_ms)
            break;
        if (empty < KIN_EMPTY)
            usleep(pause);
        pause = pause * 2 < KIN_PAUSE_MAX_US ? pause * 2 : KIN_PAUSE_MAX_US;
    }
    free(k.list);
    free(k.known);
    buf_deinit(&k.environ);
    return victims + living;
}
