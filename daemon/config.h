/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.h - every setting, from one table: defaults < file < command line.
 *
 * A setting `some_name` is `some_name = value` in the file and `--some-name value` on the command
 * line. Sizes take K, M, G. Paths may start with ~/.
 */
#ifndef DDIPD_CONFIG_H
#define DDIPD_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"
#include "util.h"

struct config {
    char *config; /* the file; NULL: none */
    char *listen; /* HOST:PORT or "none" */
    char *socket;
    char *state_dir;
    char *runtime_dir;
    char *worker_dir; /* folder of ddip_worker/ and libddipworker.so */
    char *python;     /* ranks' interpreter when a request names none */
    char *cgroup_dir;
    char *log_level;
    char *allowed_hosts;   /* comma-separated, besides localhost and the bound address */
    char *allowed_origins; /* comma-separated, besides same-host origins */
    char *cudart_library, *nvml_library, *nccl_library; /* dlopen names; empty: the usual ones */
    uint64_t body_limit;                                /* bytes of a JSON or code body */
    uint64_t payload_limit;                             /* bytes of a namespace value */
    uint64_t journal_limit;                             /* bytes of events kept per group */
    uint64_t connection_limit;
    uint64_t group_limit, rank_limit; /* groups, and ranks of one group */
    uint64_t queue_limit;             /* waiting cells and requests of one group */
    uint64_t start_timeout_s;         /* a group that is not ready by then has failed */
    uint64_t orphan_timeout_s;        /* a rank waits this long for a daemon, then exits */
    uint64_t idle_timeout_s;          /* a connection without traffic or request is closed */
    uint64_t template_idle_s;         /* an unused template process is stopped; 0: none is kept */

    bool check_only; /* --check-config */
};

enum config_action { CONFIG_RUN, CONFIG_PRINTED };

/*
 * Reads argv and the file. CONFIG_PRINTED: --help or --version was asked and answered. -1: *err
 * says which option, where, what was wrong and what is right.
 */
int config_load(struct config *c, int argc, char **argv, struct err *err) ERR_MUST_CHECK;
/* Reads the file again; only settings the table marks as reloadable change. */
int config_reload(struct config *c, int argc, char **argv, struct err *err) ERR_MUST_CHECK;
void config_deinit(struct config *c);

/* Appends every setting with its effective value, in file syntax. */
void config_print(const struct config *c, struct buf *out);

#endif
