/* SPDX-License-Identifier: Apache-2.0 */
/*
 * systemd.c - sockets passed in, readiness and watchdog told back. Without systemd nothing happens.
 *
 * The protocols are a few variables and one datagram (sd_listen_fds(3), sd_notify(3)), not worth a
 * library.
 */
#include "systemd.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "util.h"

#define SYSTEMD_FIRST_FD 3

static uint64_t systemd_number(const char *name)
{
    const char *text = getenv(name);
    uint64_t value = 0;
    return text && util_parse_u64(text, 0, UINT64_MAX, &value) == 0 ? value : 0;
}

size_t systemd_sockets(int *fds, size_t max)
{
    if (systemd_number("LISTEN_PID") != (uint64_t)getpid())
        return 0;
    size_t n = (size_t)systemd_number("LISTEN_FDS");
    n = n < max ? n : max;
    for (size_t i = 0; i < n; i++) {
        fds[i] = SYSTEMD_FIRST_FD + (int)i;
        fcntl(fds[i], F_SETFD, FD_CLOEXEC);
        fcntl(fds[i], F_SETFL, fcntl(fds[i], F_GETFL) | O_NONBLOCK); /* they come blocking */
    }
    return n;
}

void systemd_notify(const char *fmt, ...)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    if (!path || (*path != '/' && *path != '@') || strlen(path) >= sizeof(addr.sun_path))
        return;
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    int len = vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (len >= (int)sizeof(text))
        len = sizeof(text) - 1;
    strcpy(addr.sun_path, path);
    socklen_t addr_len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(path));
    if (*path == '@')
        addr.sun_path[0] = '\0'; /* an abstract socket */
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || len < 0)
        return;
    sendto(fd, text, (size_t)len, MSG_NOSIGNAL | MSG_DONTWAIT, (struct sockaddr *)&addr, addr_len);
    close(fd);
}

uint64_t systemd_watchdog_ms(void)
{
    uint64_t pid = systemd_number("WATCHDOG_PID");
    if (pid && pid != (uint64_t)getpid())
        return 0;
    return systemd_number("WATCHDOG_USEC") / 2000;
}
