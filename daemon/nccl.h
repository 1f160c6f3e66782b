/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl.h - NCCL's part in the daemon: its version, and the unique ids that join ranks.
 *
 * Each id leaves a thread and a listening socket in this process for good (NCCL gives no way to
 * end them), so ids are counted and limited. Ranks must run the same NCCL release as the library
 * opened here: the id names a socket where this library's thread answers.
 */
#ifndef DDIPD_NCCL_H
#define DDIPD_NCCL_H

#include <stdbool.h>

#include "err.h"

#define NCCL_ID_HEX (2 * 128 + 1) /* a unique id in hexadecimal, with its NUL */
#define NCCL_IDS_MAX 256          /* made in one daemon's life */

struct nccl;

/*
 * Never fails and loads nothing: the first question below does. library may be a path; NULL or ""
 * means the usual names. Unless the user chose otherwise, sets NCCL_SOCKET_IFNAME=lo in this
 * process's environment: ids are for ranks on this machine and their sockets stay on it. Call it
 * before there are threads.
 */
struct nccl *nccl_open(const char *library);
void nccl_close(struct nccl *n); /* NULL is allowed; the library stays loaded, its threads live */

bool nccl_available(struct nccl *n);
const char *nccl_reason(struct nccl *n);  /* NULL when available */
const char *nccl_version(struct nccl *n); /* "2.28.9", or "" */

/* Also marks what NCCL opened close-on-exec; else every rank would inherit it. */
int nccl_unique_id(struct nccl *n, char hex[NCCL_ID_HEX], struct err *err) ERR_MUST_CHECK;

#endif
