/* SPDX-License-Identifier: Apache-2.0 */
/* recall.h - cells of an earlier daemon: from the journal's lines back to records. */
#ifndef DDIPD_RECALL_H
#define DDIPD_RECALL_H

#include "cell.h"

/* A cell that is not done, for the head of a journal file. */
void recall_write(const struct cell *c, struct jw *w);
void recall_read(struct group *g, const json *j);

/* An event of a cell, as the journal has it; events that say nothing about its state do nothing. */
void recall_event(struct group *g, const struct output_mark *m, const json *event);

/* All events are read: cells that wait are queued again, the one that runs goes on once
 * recall_resume is called, with every rank that is there connected. */
void recall_done(struct group *g);
void recall_resume(struct group *g);

#endif
