/* SPDX-License-Identifier: Apache-2.0 */
/* systemd.h - sockets passed in, readiness and watchdog told back. Without systemd nothing happens.
 */
#ifndef DDIPD_SYSTEMD_H
#define DDIPD_SYSTEMD_H

#include <stddef.h>
#include <stdint.h>

/* Descriptors passed to this process, made close-on-exec; returns how many (at most max). */
size_t systemd_sockets(int *fds, size_t max);

/* One notification, lines "NAME=value" separated by newlines. */
void systemd_notify(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* How often the watchdog must be told, in milliseconds (half its limit); 0: there is none. */
uint64_t systemd_watchdog_ms(void);

#endif
