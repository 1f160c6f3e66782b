/* SPDX-License-Identifier: Apache-2.0 */
/* release.h - ranks that wait for others that will not come are freed for the next generation. */
#ifndef DDIPD_RELEASE_H
#define DDIPD_RELEASE_H

struct group;

/* The group has left its cell, or has given up joining: whoever is still in it comes back. */
void release_begin(struct group *g);

#endif
