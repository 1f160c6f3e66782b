/* SPDX-License-Identifier: Apache-2.0 */
/*
 * listener.h - one TCP port and one Unix socket, each for HTTP and WebSocket.
 *
 * Looks at the first bytes of a connection without taking them, and hands it to the one it is for.
 */
#ifndef DDIPD_LISTENER_H
#define DDIPD_LISTENER_H

#include <uv.h>

#include "config.h"
#include "http.h"
#include "ws.h"

struct listener;

/* Passed sockets (systemd) are the whole set; without any, binds what the configuration says. */
struct listener *listener_new(uv_loop_t *loop, const struct config *config, struct http *http,
                              struct ws *ws, struct err *err) ERR_MUST_CHECK;
/* "http://127.0.0.1:3347", or NULL without TCP. */
const char *listener_url(const struct listener *l);
/* Frees from the loop. */
void listener_close(struct listener *l);

#endif
