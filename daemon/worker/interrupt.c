/* SPDX-License-Identifier: Apache-2.0 */
/*
 * interrupt.c - SIGINT to the main thread and to the rank's children, until it has been noticed.
 *
 * A signal can get lost: system(3) ignores SIGINT while it waits, and so may any code for a while.
 * So it is sent again, ever more rarely, until Python's handler has run or the cell is over.
 * Children get it too, as from a terminal: most commands end by it, DataLoader workers expect it.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ddw.h"

#define INTERRUPT_FIRST_NS (50ull * 1000 * 1000)
#define INTERRUPT_TRIES 12 /* each waits 1.5 times as long as the one before: 13 s in all */
#define INTERRUPT_TWICE_NS (20ull * 1000 * 1000)
#define INTERRUPT_DEPTH 8 /* generations of children */

static void interrupt_children(pid_t pid, int depth);

/* One thread's children: /proc/PID/task/TID/children, numbers separated by spaces. */
static void interrupt_children_file(const char *path, int depth)
{
    FILE *f = fopen(path, "re");
    long child;
    while (f && fscanf(f, "%ld", &child) == 1) {
        if (getpgid((pid_t)child) != getpgrp())
            continue; /* it left our terminal, so to speak: a daemon of the user's */
        interrupt_children((pid_t)child, depth + 1);
        kill((pid_t)child, SIGINT);
    }
    if (f)
        fclose(f);
}

static void interrupt_children(pid_t pid, int depth)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
    DIR *dir = depth < INTERRUPT_DEPTH ? opendir(path) : NULL;
    struct dirent *e;
    while (dir && (e = readdir(dir)) != NULL) {
        char file[400];
        if (*e->d_name == '.')
            continue;
        snprintf(file, sizeof(file), "%s/%s/children", path, e->d_name);
        interrupt_children_file(file, depth);
    }
    if (dir)
        closedir(dir);
}

/* Trips Python's handler for SIGINT without a signal; needs no GIL. */
static void interrupt_python(void)
{
    static void (*trip)(void);
    if (!trip)
        *(void **)&trip = dlsym(RTLD_DEFAULT, "PyErr_SetInterrupt");
    if (trip)
        trip();
}

static void interrupt_send(uint64_t now)
{
    if (ddw.interrupt_tries)
        interrupt_python();
    pthread_kill(ddw.main, SIGINT); /* also ends a system call that waits */
    interrupt_children(getpid(), 0);
    ddw.interrupt_wait_ns += ddw.interrupt_wait_ns / 2;
    ddw.interrupt_next_ns = now + ddw.interrupt_wait_ns;
    ddw.interrupt_tries++;
}

void interrupt_later(uint64_t now)
{
    ddw.interrupt_tries = 0;
    ddw.interrupt_wait_ns = INTERRUPT_FIRST_NS;
    ddw.interrupt_next_ns = now + INTERRUPT_FIRST_NS;
}

void interrupt_begin(void)
{
    uint64_t now = util_monotonic_ns();
    interrupt_later(now);
    interrupt_send(now);
}

/* Python may have been told twice of one interrupt: the second time is not to raise. */
bool interrupt_seen(uint64_t now)
{
    bool pending = ddw.interrupt_next_ns != 0;
    if (pending)
        ddw.interrupt_seen_ns = now;
    interrupt_end();
    return pending || now - ddw.interrupt_seen_ns > INTERRUPT_TWICE_NS;
}

void interrupt_end(void)
{
    ddw.interrupt_next_ns = 0;
}

void interrupt_again(uint64_t now)
{
    if (!ddw.interrupt_next_ns || now < ddw.interrupt_next_ns)
        return;
    if (ddw.running && ddw.interrupt_tries < INTERRUPT_TRIES)
        interrupt_send(now);
    else
        interrupt_end();
}
