/* SPDX-License-Identifier: Apache-2.0 */
/* test_systemd.c - systemd.c: sockets passed in, notifications, the watchdog's interval. */
#include "systemd.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tap.h"
#include "util.h"

static char folder[] = "/tmp/ddipd-test-systemd-XXXXXX";

static void set_number(const char *name, long value)
{
    char text[32];
    snprintf(text, sizeof(text), "%ld", value);
    setenv(name, text, 1);
}

/* --- sockets --- */

/* Runs in a child, whose descriptors from 3 on are its own. */
static int sockets_child(void)
{
    int fds[4] = {-1, -1, -1, -1}, flags = 0;
    close(3);
    close(4);
    if (dup2(STDOUT_FILENO, 3) < 0 || dup2(STDOUT_FILENO, 4) < 0)
        return 1;
    set_number("LISTEN_PID", getpid());
    setenv("LISTEN_FDS", "2", 1);
    if (systemd_sockets(fds, 4) != 2 || fds[0] != 3 || fds[1] != 4 || fds[2] != -1)
        return 2;
    for (int fd = 3; fd <= 4; fd++)
        flags |= !(fcntl(fd, F_GETFD) & FD_CLOEXEC) || !(fcntl(fd, F_GETFL) & O_NONBLOCK);
    return flags ? 3 : 0;
}

static void check_sockets(void)
{
    int fds[4], status = -1;
    unsetenv("LISTEN_PID");
    unsetenv("LISTEN_FDS");
    ok(systemd_sockets(fds, 4) == 0, "without the variables there are no sockets");
    setenv("LISTEN_FDS", "2", 1);
    set_number("LISTEN_PID", getpid() + 1);
    ok(systemd_sockets(fds, 4) == 0, "another process's are not ours");
    setenv("LISTEN_PID", "", 1);
    ok(systemd_sockets(fds, 4) == 0, "nor those of nobody");
    set_number("LISTEN_PID", getpid());
    static const char *const bad[] = {"", "-1", "two", "0", "1x", " 1"};
    for (size_t i = 0; i < UTIL_COUNT(bad); i++) {
        setenv("LISTEN_FDS", bad[i], 1);
        ok(systemd_sockets(fds, 4) == 0, "LISTEN_FDS=\"%s\" is none", bad[i]);
    }
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0)
        _exit(sockets_child());
    waitpid(pid, &status, 0);
    ok(status == 0, "two sockets from 3 on, non-blocking and close-on-exec (%d)", status >> 8);
    unsetenv("LISTEN_PID");
    unsetenv("LISTEN_FDS");
}

static void check_sockets_bound(void)
{
    int status = -1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        int fds[3] = {-1, -1, -1};
        dup2(STDOUT_FILENO, 3);
        dup2(STDOUT_FILENO, 4);
        set_number("LISTEN_PID", getpid());
        setenv("LISTEN_FDS", "18446744073709551615", 1);
        _exit(systemd_sockets(fds, 2) == 2 && fds[1] == 4 && fds[2] == -1 ? 0 : 1);
    }
    waitpid(pid, &status, 0);
    ok(status == 0, "never more than there is room for");
}

/* --- notifications --- */

/* A bound datagram socket; name "@...": abstract. */
static int listen_on(const char *name)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    size_t n = strlen(name);
    memcpy(addr.sun_path, name, n);
    if (*name == '@')
        addr.sun_path[0] = '\0';
    if (bind(fd, (struct sockaddr *)&addr,
             (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n)) < 0)
        perror("# bind");
    return fd;
}

static size_t received_bytes;

static const char *received(int fd)
{
    static char text[2048];
    ssize_t n = recv(fd, text, sizeof(text) - 1, MSG_DONTWAIT);
    received_bytes = n < 0 ? 0 : (size_t)n;
    text[received_bytes] = '\0';
    return n < 0 ? "nothing" : text;
}

static void check_notify_to(const char *name, const char *kind)
{
    int fd = listen_on(name);
    setenv("NOTIFY_SOCKET", name, 1);
    systemd_notify("READY=1\nMAINPID=%d", 42);
    is_str(received(fd), "READY=1\nMAINPID=42", kind);
    is_str(received(fd), "nothing", "as one datagram");
    systemd_notify("STOPPING=1");
    is_str(received(fd), "STOPPING=1", "and another");
    close(fd);
    systemd_notify("READY=1"); /* nobody is there */
}

static void check_notify(void)
{
    char path[128], abstract[64];
    snprintf(path, sizeof(path), "%s/notify", folder);
    snprintf(abstract, sizeof(abstract), "@ddipd-test-%d", (int)getpid());
    check_notify_to(path, "a notification to a path");
    check_notify_to(abstract, "a notification to an abstract socket");
    unlink(path);
    int fd = listen_on(path), before = dup(fd);
    close(before);
    unsetenv("NOTIFY_SOCKET");
    systemd_notify("READY=1");
    setenv("NOTIFY_SOCKET", path + 1, 1);
    systemd_notify("READY=1");
    char *long_path = util_printf("/%0*d", 200, 0);
    setenv("NOTIFY_SOCKET", long_path, 1);
    systemd_notify("READY=1");
    free(long_path);
    setenv("NOTIFY_SOCKET", "", 1);
    systemd_notify("READY=1");
    is_str(received(fd), "nothing", "nothing without a proper address");
    int after = dup(fd);
    ok(after == before, "and no descriptor is left open");
    close(after);
    close(fd);
}

static void check_long_status(void)
{
    char path[128], status[900];
    snprintf(path, sizeof(path), "%s/notify", folder);
    unlink(path);
    int fd = listen_on(path);
    memset(status, 's', sizeof(status) - 1);
    status[sizeof(status) - 1] = '\0';
    setenv("NOTIFY_SOCKET", path, 1);
    systemd_notify("STATUS=%s", status);
    const char *got = received(fd);
    ok(strncmp(got, "STATUS=sss", 10) == 0, "a long status arrives");
    ok(received_bytes < 907 && strspn(got + 7, "s") + 7 == received_bytes,
       "cut, with nothing behind it (%zu bytes)", received_bytes);
    close(fd);
    unsetenv("NOTIFY_SOCKET");
}

/* --- watchdog --- */

static uint64_t watchdog(const char *usec, long pid)
{
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
    if (usec)
        setenv("WATCHDOG_USEC", usec, 1);
    if (pid)
        set_number("WATCHDOG_PID", pid);
    return systemd_watchdog_ms();
}

static void check_watchdog(void)
{
    ok(watchdog(NULL, 0) == 0, "no watchdog");
    ok(watchdog("3000000", getpid()) == 1500, "half its limit");
    ok(watchdog("3000000", 0) == 1500, "also when no process is named");
    ok(watchdog("3000000", getpid() + 1) == 0, "not when it is another process's");
    ok(watchdog("soon", getpid()) == 0, "not when it is no number");
    ok(watchdog("0", getpid()) == 0, "not when it is 0");
}

int main(void)
{
    if (!mkdtemp(folder))
        return 1;
    check_sockets();
    check_sockets_bound();
    check_notify();
    check_long_status();
    check_watchdog();
    util_remove_tree(folder);
    return tap_done();
}
