/* SPDX-License-Identifier: Apache-2.0 */
/* server.h - the daemon from start to stop. */
#ifndef DDIPD_SERVER_H
#define DDIPD_SERVER_H

#include "config.h"

/* Runs until told to stop; returns the process's exit code. argc and argv: for reloads. */
int server_run(struct config *config, int argc, char **argv);

#endif
