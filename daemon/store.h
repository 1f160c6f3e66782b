/* SPDX-License-Identifier: Apache-2.0 */
/* store.h - a group's rendezvous: torch's TCPStore in a process of its own. */
#ifndef DDIPD_STORE_H
#define DDIPD_STORE_H

#include "group.h"

/* Starts the process; group_rank_present is called when it has said where it listens. */
int store_start(struct group *g, struct err *err) ERR_MUST_CHECK;
/* The store an earlier daemon started; gone: the next generation starts another. */
void store_adopt(struct group *g, const struct worker_past *past, const char *host, int port);

#endif
