/* SPDX-License-Identifier: Apache-2.0 */
/* adopt.h - groups of an earlier daemon: found on disk, joined to their living processes. */
#ifndef DDIPD_ADOPT_H
#define DDIPD_ADOPT_H

#include "pool.h"

/*
 * Finds the groups in the state folder and waits for their ranks to connect. -1: another version's
 * groups are there; nothing has been touched, and this daemon must not run with that folder.
 */
int adopt_all(struct pool *p, struct err *err) ERR_MUST_CHECK;

/* For group.c: a rank of an adopted group has connected, or is gone. */
void adopt_settle(struct group *g);

#endif
