/* SPDX-License-Identifier: Apache-2.0 */
/* api_group.h - making, showing, restarting, interrupting and deleting groups. */
#ifndef DDIPD_API_GROUP_H
#define DDIPD_API_GROUP_H

struct api_call;

void api_group_list(struct api_call *call);
void api_group_create(struct api_call *call);
void api_group_get(struct api_call *call);
void api_group_delete(struct api_call *call);
void api_group_restart(struct api_call *call);
void api_group_interrupt(struct api_call *call);

#endif
