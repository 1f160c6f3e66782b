/* SPDX-License-Identifier: Apache-2.0 */
/* api_namespace.h - variables of ranks: put, get, delete, list, many at once; completion,
 * inspection. */
#ifndef DDIPD_API_NAMESPACE_H
#define DDIPD_API_NAMESPACE_H

struct api_call;

void api_namespace_list(struct api_call *call);
void api_namespace_bulk(struct api_call *call);
void api_namespace_put(struct api_call *call);
void api_namespace_get(struct api_call *call);
void api_namespace_delete(struct api_call *call);
void api_namespace_complete(struct api_call *call);
void api_namespace_inspect(struct api_call *call);

#endif
