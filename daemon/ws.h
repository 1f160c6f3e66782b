/* SPDX-License-Identifier: Apache-2.0 */
/* ws.h - the WebSocket endpoint on the loop: libwebsockets is a guest here, it does not listen. */
#ifndef DDIPD_WS_H
#define DDIPD_WS_H

#include <uv.h>

#include "api.h"

struct ws;

struct ws *ws_new(uv_loop_t *loop, struct api *api, struct err *err) ERR_MUST_CHECK;
/* Takes a connection whose first bytes, not read yet, ask for the endpoint's path. */
void ws_take(struct ws *w, int fd);
/* Ends every session; libwebsockets needs some more turns of the loop for that. */
void ws_close(struct ws *w);
/* After those turns. */
void ws_free(struct ws *w);

#endif
