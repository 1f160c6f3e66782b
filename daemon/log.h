/* SPDX-License-Identifier: Apache-2.0 */
/* log.h - one line per happening, on standard error. Never pass a secret or user code to it. */
#ifndef DDIPD_LOG_H
#define DDIPD_LOG_H

enum log_level { LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };

/* Parses "error", "warn", "info" or "debug" into *out; returns -1 for anything else. */
int log_level_parse(const char *name, enum log_level *out);
void log_set_level(enum log_level level);

void log_write(enum log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define log_error(...) log_write(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warn(...) log_write(LOG_LEVEL_WARN, __VA_ARGS__)
#define log_info(...) log_write(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...) log_write(LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
