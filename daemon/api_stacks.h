/* SPDX-License-Identifier: Apache-2.0 */
/* api_stacks.h - where the ranks of a group are. Called by api.c's table. */
#ifndef DDIPD_API_STACKS_H
#define DDIPD_API_STACKS_H

struct api_call;

void api_stacks_get(struct api_call *call);

#endif
