/* SPDX-License-Identifier: Apache-2.0 */
/* http.h - HTTP on the loop: libmicrohttpd is a guest here, it neither listens nor threads. */
#ifndef DDIPD_HTTP_H
#define DDIPD_HTTP_H

#include <sys/socket.h>
#include <uv.h>

#include "api.h"

struct http;

struct http *http_new(uv_loop_t *loop, struct api *api, struct err *err) ERR_MUST_CHECK;
/* Takes a connection whose first bytes have not been read. */
void http_take(struct http *h, int fd, const struct sockaddr *addr, socklen_t len);
/* Ends every connection; the rest is freed from the loop. */
void http_close(struct http *h);

#endif
