/* SPDX-License-Identifier: Apache-2.0 */
/* start.h - the processes of a group: what each is told, and how it comes to life. */
#ifndef DDIPD_START_H
#define DDIPD_START_H

#include "group.h"

#define START_STORE (-1)
#define START_PROTOCOL 1 /* what daemon and ranks say to each other */

/* Starts w's process as the group's store (START_STORE) or as a rank. */
int start_worker(struct group *g, struct worker *w, int rank, struct err *err) ERR_MUST_CHECK;

/* How a process of the group ended, in words; more: what is known besides, or ""; last_words: what
 * it printed before it reported. */
void start_describe_exit(const char *who, int status, const char *more, const char *last_words,
                         struct err *err);

/* JSON for FRAME_JOIN of the group's present generation. */
int start_join_body(struct group *g, struct buf *out, struct err *err) ERR_MUST_CHECK;

#endif
