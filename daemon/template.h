/* SPDX-License-Identifier: Apache-2.0 */
/*
 * template.h - warm processes that ranks are forked from, one per interpreter and environment.
 *
 * A template has torch and IPython imported and nothing else; forking it takes milliseconds where a
 * fresh interpreter takes seconds. It ends with the daemon, or when it has been idle for too long.
 */
#ifndef DDIPD_TEMPLATE_H
#define DDIPD_TEMPLATE_H

#include <stdbool.h>
#include <uv.h>

#include "config.h"
#include "launch.h"

struct templates;
struct worker;
struct hub;

struct templates *templates_new(struct hub *hub, const struct config *config);
void templates_close(struct templates *t);

/*
 * Has w's process forked from the template for spec->program and spec->env, starting that template
 * if need be. config is the process's configuration, a JSON object; spec->out_fd its early output.
 * The pid is set later; when the template cannot be had, w is told so by worker_never.
 */
int templates_fork(struct templates *t, const struct launch_spec *spec, const char *config,
                   struct worker *w, struct err *err) ERR_MUST_CHECK;
/* Gives a request up; true if there was one. A process that is forked for it is killed at once. */
bool templates_forget(struct templates *t, struct worker *w);

#endif
