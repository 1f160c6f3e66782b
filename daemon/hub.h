/* SPDX-License-Identifier: Apache-2.0 */
/*
 * hub.h - where worker processes report: their Unix socket, and SIGCHLD.
 *
 * The hub knows every worker of the daemon by its secret and its pid; it owns none of them.
 */
#ifndef DDIPD_HUB_H
#define DDIPD_HUB_H

#include <stdbool.h>
#include <sys/types.h>
#include <uv.h>

#include "err.h"

struct hub;
struct sweep;
struct worker;

/* Listens on runtime_dir/workers.sock (0600) and becomes the reaper of orphaned grandchildren. */
struct hub *hub_new(uv_loop_t *loop, const char *runtime_dir, struct err *err) ERR_MUST_CHECK;
/* Frees from the loop; every worker must have been closed. */
void hub_close(struct hub *hub);

uv_loop_t *hub_loop(const struct hub *hub);
const struct pipe_tools *hub_pipe_tools(const struct hub *hub);
struct sweep *hub_sweep(const struct hub *hub);
const char *hub_socket_path(const struct hub *hub);

void hub_add(struct hub *hub, struct worker *w);
void hub_remove(struct hub *hub, struct worker *w);
/* Looks for ended processes now instead of when the loop comes to SIGCHLD. */
void hub_reap(struct hub *hub);
/* A process that may have ended before its pid was known: true, and its status, if so. */
bool hub_was_reaped(struct hub *hub, pid_t pid, int *status);

#endif
