/* SPDX-License-Identifier: Apache-2.0 */
/* record.h - groups, cells and GPUs as the JSON objects the API shows (proto/openapi.yaml). */
#ifndef DDIPD_RECORD_H
#define DDIPD_RECORD_H

#include "cell.h"
#include "gpu.h"
#include "group.h"
#include "json.h"
#include "pool.h"

void record_group(struct jw *w, const struct group *g);
void record_cell(struct jw *w, const struct cell *c);
/* Answers "cell accepted": group, cell, first_seq, position. */
void record_accepted(struct jw *w, const struct cell *c);
void record_gpu(struct jw *w, const struct pool *p, const struct gpu_device *d);

#endif
