/* SPDX-License-Identifier: Apache-2.0 */
/* rank.h - one rank of a group: its process comes, talks and goes. */
#ifndef DDIPD_RANK_H
#define DDIPD_RANK_H

#include "group.h"

const char *rank_state_name(enum rank_state state);

/* Starts the process. -1: *err, there is none. */
int rank_start(struct rank *r, struct err *err) ERR_MUST_CHECK;
/* The process that an earlier daemon started, if it is still there. */
void rank_adopt(struct rank *r, struct worker_past *past);
/* Asks the process to leave; respawn: and starts a new one once it is gone. */
void rank_leave(struct rank *r, bool respawn);
/* Ends the process, if there is one, and frees what belongs to the rank. */
void rank_close(struct rank *r);
bool rank_alive(const struct rank *r);
/* Releases it from whatever it waits for in the process group. */
void rank_abort(struct rank *r);

#endif
