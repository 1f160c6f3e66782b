/* SPDX-License-Identifier: Apache-2.0 */
/* api_daemon.h - questions about the daemon itself. */
#ifndef DDIPD_API_DAEMON_H
#define DDIPD_API_DAEMON_H

struct api_call;

void api_daemon_health(struct api_call *call);
void api_daemon_ready(struct api_call *call);
void api_daemon_info(struct api_call *call);
void api_daemon_gpus(struct api_call *call);
void api_daemon_shutdown(struct api_call *call);
void api_daemon_upgrade(struct api_call *call); /* a WebSocket endpoint asked in plain HTTP */

#endif
