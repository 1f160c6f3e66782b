/* SPDX-License-Identifier: Apache-2.0 */
/*
 * roster.h - what of a group outlives the daemon, besides its events: who its processes are.
 *
 * group.json in the group's folder says what the group was asked to be, and for each process its
 * pid, when it started, and its secret. What has happened since is in the journal; the first line
 * of its every file (the head) repeats what matters of the files before.
 */
#ifndef DDIPD_ROSTER_H
#define DDIPD_ROSTER_H

#include "group.h"

#define ROSTER_FILE "group.json"
#define ROSTER_FORMAT 1 /* raised when an older daemon could not make sense of it */

int roster_write(struct group *g, struct err *err) ERR_MUST_CHECK;
/* The same; failing is logged and tried again: until then a later daemon does not know the
 * processes that are new. */
void roster_save(struct group *g);

/* A process's entry. 1: filled; 0: there was none; past->secret is borrowed from j. */
int roster_read_process(const json *j, struct worker_past *past);

extern const struct output_owner roster_owner; /* ctx: the group */

#endif
