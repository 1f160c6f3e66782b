/* SPDX-License-Identifier: Apache-2.0 */
/* test_kin.c - kin.c with real processes: who belongs to a root and who does not, how they end. */
#include "kin.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tap.h"
#include "util.h"

static int tell[2]; /* descendants say their pids */

static void say_and_wait(void)
{
    pid_t pid = getpid();
    (void)!write(tell[1], &pid, sizeof(pid));
    alarm(30);
    for (;;)
        pause();
}

static pid_t listen_for_one(void)
{
    pid_t pid = 0;
    return read(tell[0], &pid, sizeof(pid)) == sizeof(pid) ? pid : -1;
}

static bool lives(pid_t pid)
{
    while (waitpid(-1, NULL, WNOHANG) > 0) /* orphans come to this process */
        ;
    return kill(pid, 0) == 0;
}

/* A root as ranks are: marked, in a session of its own. */
static struct kin_root start_root(void (*life)(void))
{
    pid_t pid = fork();
    if (pid == 0) {
        setsid();
        kin_mark_self();
        life();
        say_and_wait();
    }
    return (struct kin_root){pid, kin_start_time(pid)};
}

static void life_alone(void)
{
}

static void life_daemon(void)
{
    if (fork() == 0) {
        setsid();
        if (fork() == 0)
            say_and_wait();
        _exit(0);
    }
}

static void life_deaf(void)
{
    if (fork() == 0) {
        setsid();
        signal(SIGTERM, SIG_IGN);
        say_and_wait();
    }
}

/* Neither mark nor session. */
static void life_unmarked(void)
{
    if (fork() == 0) {
        setsid();
        if (fork() == 0) {
            alarm(30);
            char *argv[] = {"sh", "-c", "read line < /dev/zero; sleep 30", NULL}, *env[] = {NULL};
            pid_t pid = getpid();
            (void)!write(tell[1], &pid, sizeof(pid));
            execve("/bin/sh", argv, env);
        }
        _exit(0);
    }
}

static void check_end(void (*life)(void), const char *what, bool root_dies_first)
{
    struct kin_root other = start_root(life_daemon), root = start_root(life);
    int count = life == life_alone ? 3 : 4;
    pid_t pids[4];
    for (int i = 0; i < count; i++)
        pids[i] = listen_for_one();
    if (root_dies_first) {
        kill(root.pid, SIGKILL);
        waitpid(root.pid, NULL, 0);
    }
    ok(kin_end(&root, 1, false, 5000) == 0, "%s: nothing is left%s", what,
       root_dies_first ? ", the root had died" : "");
    int alive = 0;
    for (int i = 0; i < count; i++)
        alive += lives(pids[i]);
    ok(alive == 2 && lives(other.pid), "and all of another root's is (%d)", alive);
    ok(kin_end(&other, 1, false, 5000) == 0, "until its turn");
    lives(other.pid);
}

static void check_spared(void)
{
    struct kin_root root = start_root(life_daemon);
    listen_for_one();
    listen_for_one();
    ok(kin_end(&root, 1, true, 5000) == 0 && lives(root.pid), "a spared root lives on");
    struct kin_root past = {root.pid, root.start - 1};
    ok(kin_end(&past, 1, false, 300) == 0 && lives(root.pid), "as does another of the same pid");
    kin_end(&root, 1, false, 5000);
    ok(!lives(root.pid), "a root that is not spared does not");
}

int main(int argc, char **argv)
{
    (void)argc;
    if (!getenv(KIN_VARIABLE)) { /* it must be there when the program starts, as in ranks */
        setenv(KIN_VARIABLE, KIN_BLANK, 1);
        execv("/proc/self/exe", argv);
        return 1;
    }
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    if (pipe(tell) < 0)
        return 1;
    ok(kin_start_time(getpid()) > 0 && kin_start_time(0x3fffffff) == 0, "start times");
    for (int dies = 0; dies < 2; dies++) {
        check_end(life_alone, "a root alone", dies);
        check_end(life_deaf, "a child in a session of its own that ignores SIGTERM", dies);
        check_end(life_daemon, "a daemon", dies);
    }
    check_end(life_unmarked, "a daemon without environment", false);
    check_spared();
    return tap_done();
}
