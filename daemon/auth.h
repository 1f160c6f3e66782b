/* SPDX-License-Identifier: Apache-2.0 */
/*
 * auth.h - who asks, and may they.
 *
 * On the Unix socket the kernel names the caller (SO_PEERCRED); on TCP a Bearer token does, and it
 * stands for the daemon's own user. A browser is kept out unless its page is of the same origin
 * (Host and Origin, against DNS rebinding). Ranks run as the daemon's user, so only that user and
 * root may have any.
 */
#ifndef DDIPD_AUTH_H
#define DDIPD_AUTH_H

#include <stdbool.h>
#include <sys/types.h>

#include "config.h"
#include "err.h"

struct auth {
    const struct config *config;
    char token[65];
    char host[256]; /* what TCP is bound to, without the port; empty: no TCP */
};

struct auth_peer {
    bool local; /* came over the Unix socket */
    uid_t uid;
};

/* What a request says of itself; NULL: the header is absent. */
struct auth_claims {
    const char *authorization, *host, *origin;
};

/* Makes a fresh token and writes it to runtime_dir/token (0600). */
int auth_init(struct auth *a, const struct config *config, struct err *err) ERR_MUST_CHECK;

struct auth_peer auth_peer_of(int fd);
/* open: the resource is for anyone (health); Host and Origin are still looked at. */
int auth_check(const struct auth *a, const struct auth_peer *peer, const struct auth_claims *claims,
               bool open, struct err *err) ERR_MUST_CHECK;
/* May the peer see and touch what belongs to uid? */
bool auth_may_touch(const struct auth_peer *peer, uid_t uid);

#endif
