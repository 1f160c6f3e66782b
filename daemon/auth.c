/* SPDX-License-Identifier: Apache-2.0 */
/* auth.c - who asks, and may they. The token is in one file and in this memory, and nowhere else.
 */
#include "auth.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util.h"

/* The token of a daemon that did not end in order stays good: its clients come back with it. */
static bool auth_read_token(struct auth *a, const char *path)
{
    struct buf text = BUF_INIT;
    struct err err = ERR_INIT;
    struct stat st;
    bool good = lstat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == getuid() &&
                !(st.st_mode & 077) && util_read_file(path, 64, &text, &err) == 0 &&
                text.len == 64 && strspn(buf_cstr(&text), "0123456789abcdef") == 64;
    if (good)
        snprintf(a->token, sizeof(a->token), "%s", buf_cstr(&text));
    buf_deinit(&text);
    return good;
}

int auth_init(struct auth *a, const struct config *config, struct err *err)
{
    *a = (struct auth){.config = config};
    const char *colon = strrchr(config->listen, ':');
    if (colon)
        snprintf(a->host, sizeof(a->host), "%.*s", (int)(colon - config->listen), config->listen);
    char *path = util_printf("%s/token", config->runtime_dir);
    int rc = 0;
    if (!auth_read_token(a, path)) {
        rc = util_random_hex(a->token, 32, err);
        if (rc == 0)
            rc = util_write_file(path, 0600, a->token, strlen(a->token), err);
    }
    free(path);
    return rc;
}

struct auth_peer auth_peer_of(int fd)
{
    struct sockaddr_storage addr;
    socklen_t len = sizeof(addr);
    struct ucred cred;
    socklen_t cred_len = sizeof(cred);
    struct auth_peer peer = {.local = false, .uid = getuid()};
    if (getsockname(fd, (struct sockaddr *)&addr, &len) == 0 && addr.ss_family == AF_UNIX) {
        peer.local = true;
        peer.uid = (uid_t)-1; /* nobody's, should the kernel not say */
        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &cred_len) == 0)
            peer.uid = cred.uid;
    }
    return peer;
}

/* Is the name in a comma-separated list? */
static bool auth_listed(const char *list, const char *name, size_t len)
{
    while (*list) {
        list += strspn(list, ", ");
        size_t n = strcspn(list, ", ");
        if (n == len && n && strncasecmp(list, name, n) == 0)
            return true;
        list += n;
    }
    return false;
}

static size_t auth_host_len(const char *host)
{
    if (*host == '[')
        return strcspn(host, "]") + (strchr(host, ']') ? 1 : 0);
    return strcspn(host, ":");
}

static int auth_check_host(const struct auth *a, const char *host, struct err *err)
{
    static const char always[] = "localhost,127.0.0.1,[::1]";
    size_t len = host ? auth_host_len(host) : 0;
    if (len && (auth_listed(always, host, len) || auth_listed(a->host, host, len) ||
                auth_listed(a->config->allowed_hosts, host, len)))
        return 0;
    err_set(err, ERR_FORBIDDEN, "the Host \"%.100s\" is not one of this daemon's names",
            host ? host : "");
    return err_hint(err, "the setting allowed_hosts lists further names");
}

static int auth_check_origin(const struct auth *a, const struct auth_claims *c, struct err *err)
{
    const char *site = strstr(c->origin, "://");
    if (site && c->host && strcasecmp(site + 3, c->host) == 0)
        return 0;
    if (auth_listed(a->config->allowed_origins, c->origin, strlen(c->origin)))
        return 0;
    err_set(err, ERR_FORBIDDEN, "web pages of the origin \"%.100s\" may not use this daemon",
            c->origin);
    return err_hint(err, "the setting allowed_origins lists those that may");
}

static int auth_check_token(const struct auth *a, const char *authorization, struct err *err)
{
    static const char scheme[] = "Bearer ";
    if (authorization && strncasecmp(authorization, scheme, sizeof(scheme) - 1) == 0 &&
        util_equal_secret(authorization + sizeof(scheme) - 1, a->token))
        return 0;
    err_set(err, ERR_UNAUTHORIZED, authorization ? "the token is wrong" : "a token is needed");
    return err_hint(err, "send `Authorization: Bearer TOKEN` with the text of the file `token` in "
                         "the daemon's runtime folder, or use its Unix socket");
}

int auth_check(const struct auth *a, const struct auth_peer *peer, const struct auth_claims *claims,
               bool open, struct err *err)
{
    if (!peer->local && auth_check_host(a, claims->host, err) < 0)
        return -1;
    if (claims->origin && auth_check_origin(a, claims, err) < 0)
        return -1;
    if (open)
        return 0;
    if (!peer->local)
        return auth_check_token(a, claims->authorization, err);
    if (peer->uid == getuid() || peer->uid == 0)
        return 0;
    return err_set(err, ERR_FORBIDDEN, "this daemon serves the user %u and root, you are %u",
                   (unsigned)getuid(), (unsigned)peer->uid);
}

bool auth_may_touch(const struct auth_peer *peer, uid_t uid)
{
    return peer->uid == 0 || peer->uid == uid;
}
