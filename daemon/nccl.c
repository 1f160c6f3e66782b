/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl.c - NCCL's part in the daemon: its version, and the unique ids that join ranks.
 *
 * NVIDIA's header has the same name as ours. Angle brackets find theirs only when daemon/ is given
 * to the compiler with -iquote; with -I they find ours.
 */
#include "nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "util.h"

#ifdef HAVE_NCCL
#include <dirent.h>
#include <fcntl.h>
#include <nccl.h>
#include <pthread.h>
#include <signal.h>

#include "dl.h"

#ifndef NCCL_MAJOR
#error "daemon/nccl.h hides NVIDIA's nccl.h: give daemon/ with -iquote instead of -I"
#endif

_Static_assert(sizeof(ncclUniqueId) * 2 + 1 == NCCL_ID_HEX, "an id is 128 bytes");

static const char *const nccl_names[] = {"libnccl.so.2", "libnccl.so"};

struct nccl_api {
    __typeof__(ncclGetVersion) *version;
    __typeof__(ncclGetUniqueId) *unique_id;
    __typeof__(ncclGetErrorString) *error_string;
    __typeof__(ncclGetLastError) *last_error;
};

static const struct dl_symbol nccl_symbols[] = {
    DL_SYMBOL(struct nccl_api, version, "ncclGetVersion", true),
    DL_SYMBOL(struct nccl_api, unique_id, "ncclGetUniqueId", true),
    DL_SYMBOL(struct nccl_api, error_string, "ncclGetErrorString", true),
    DL_SYMBOL(struct nccl_api, last_error, "ncclGetLastError", false), /* since 2.13 */
};
#endif

struct nccl {
    char *library; /* as configured, maybe empty */
    bool tried;    /* the library was looked for */
    char reason[512];
    char version[32];
    int made; /* ids so far */
#ifdef HAVE_NCCL
    struct nccl_api api;
#endif
};

struct nccl *nccl_open(const char *library)
{
    struct nccl *n = util_calloc(1, sizeof(*n));
    n->library = util_strdup(library ? library : "");
#ifdef HAVE_NCCL
    /* Now, not at first use: by then NCCL's threads may be reading the environment. */
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
#endif
    return n;
}

void nccl_close(struct nccl *n)
{
    if (!n)
        return;
    free(n->library);
    free(n);
}

#ifdef HAVE_NCCL

static void *nccl_load_any(struct nccl *n, char *why, size_t size)
{
    if (*n->library)
        return dl_open(n->library, nccl_symbols, UTIL_COUNT(nccl_symbols), &n->api, why, size);
    void *handle = NULL;
    for (size_t i = 0; !handle && i < UTIL_COUNT(nccl_names); i++)
        handle = dl_open(nccl_names[i], nccl_symbols, UTIL_COUNT(nccl_symbols), &n->api, why, size);
    return handle;
}

static void nccl_load(struct nccl *n)
{
    char why[400];
    int code = 0;
    n->tried = true;
    if (!nccl_load_any(n, why, sizeof(why))) {
        snprintf(n->reason, sizeof(n->reason), "NCCL not found: %s", why);
        return;
    }
    ncclResult_t error = n->api.version(&code);
    if (error) {
        snprintf(n->reason, sizeof(n->reason), "NCCL cannot be used: %.300s",
                 n->api.error_string(error));
        return;
    }
    int major = code < 10000 ? 1000 : 10000; /* the encoding changed with 2.9 */
    snprintf(n->version, sizeof(n->version), "%d.%d.%d", code / major, code % major / 100,
             code % 100);
}

/* One bit per descriptor of this process; those past the end are treated as NCCL's. */
#define NCCL_FDS_MAX 65536

static void nccl_each_fd(uint8_t *known, bool mark)
{
    DIR *dir = opendir("/proc/self/fd");
    for (struct dirent *e; dir && (e = readdir(dir));) {
        uint64_t fd;
        /* The folder's own descriptor is free again when NCCL picks a number. */
        if (util_parse_u64(e->d_name, 0, INT32_MAX, &fd) < 0 || (int)fd == dirfd(dir))
            continue;
        bool old = fd < NCCL_FDS_MAX && known[fd / 8] & (1 << fd % 8);
        if (mark && !old)
            fcntl((int)fd, F_SETFD, FD_CLOEXEC);
        else if (!mark && fd < NCCL_FDS_MAX)
            known[fd / 8] |= (uint8_t)(1 << fd % 8);
    }
    if (dir)
        closedir(dir);
}

/* The thread NCCL starts inherits a full mask, so the daemon's signals stay with the loop. */
static ncclResult_t nccl_call_unique_id(struct nccl *n, ncclUniqueId *id)
{
    uint8_t known[NCCL_FDS_MAX / 8] = {0};
    sigset_t all, before;
    nccl_each_fd(known, false);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    ncclResult_t error = n->api.unique_id(id);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    nccl_each_fd(known, true);
    return error;
}

int nccl_unique_id(struct nccl *n, char hex[NCCL_ID_HEX], struct err *err)
{
    ncclUniqueId id;
    if (!nccl_available(n))
        return err_set(err, ERR_UNAVAILABLE, "%s", n->reason);
    if (n->made == NCCL_IDS_MAX) {
        err_set(err, ERR_UNAVAILABLE, "this ddipd has made %d NCCL ids, the most it may", n->made);
        return err_hint(err, "restart ddipd; ranks keep running and join the new one");
    }
    ncclResult_t error = nccl_call_unique_id(n, &id);
    if (error) {
        const char *last = n->api.last_error ? n->api.last_error(NULL) : NULL;
        return err_set(err, ERR_UNAVAILABLE, "NCCL made no unique id: %s%s%s",
                       n->api.error_string(error), last && *last ? ": " : "", last ? last : "");
    }
    n->made++;
    for (size_t i = 0; i < sizeof(id); i++)
        snprintf(hex + 2 * i, 3, "%02x", ((unsigned char *)&id)[i]);
    return 0;
}

#else

static void nccl_load(struct nccl *n)
{
    n->tried = true;
    snprintf(n->reason, sizeof(n->reason), "this ddipd was built without the NCCL header");
}

int nccl_unique_id(struct nccl *n, char hex[NCCL_ID_HEX], struct err *err)
{
    *hex = '\0';
    return err_set(err, ERR_UNAVAILABLE, "%s", nccl_reason(n));
}

#endif

bool nccl_available(struct nccl *n)
{
    if (!n->tried)
        nccl_load(n);
    return !n->reason[0];
}

const char *nccl_reason(struct nccl *n)
{
    return nccl_available(n) ? NULL : n->reason;
}

const char *nccl_version(struct nccl *n)
{
    nccl_available(n);
    return n->version;
}
