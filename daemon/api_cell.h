/* SPDX-License-Identifier: Apache-2.0 */
/* api_cell.h - executing cells, their records, and their events. */
#ifndef DDIPD_API_CELL_H
#define DDIPD_API_CELL_H

struct api_call;

void api_cell_execute(struct api_call *call);
void api_cell_list(struct api_call *call);
void api_cell_get(struct api_call *call);
void api_cell_events(struct api_call *call); /* of a cell, or of all cells of a group */

#endif
