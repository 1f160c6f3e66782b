/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log.c - one line per happening, on standard error.
 *
 * Under systemd (JOURNAL_STREAM is set) lines carry the journal's "<N>" priority prefix and no
 * time; elsewhere a UTC time stamp. One write(2) per line, so lines of several processes do not
 * mix.
 */
#include "log.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const struct {
    const char *name;
    int syslog_priority;
} log_levels[] = {
    [LOG_LEVEL_ERROR] = {"error", 3},
    [LOG_LEVEL_WARN] = {"warn", 4},
    [LOG_LEVEL_INFO] = {"info", 6},
    [LOG_LEVEL_DEBUG] = {"debug", 7},
};

static enum log_level log_threshold = LOG_LEVEL_INFO;

int log_level_parse(const char *name, enum log_level *out)
{
    for (size_t i = 0; i < sizeof(log_levels) / sizeof(log_levels[0]); i++) {
        if (strcmp(name, log_levels[i].name) == 0) {
            *out = (enum log_level)i;
            return 0;
        }
    }
    return -1;
}

void log_set_level(enum log_level level)
{
    log_threshold = level;
}

static size_t log_prefix(char *line, size_t cap, enum log_level level)
{
    if (getenv("JOURNAL_STREAM"))
        return (size_t)snprintf(line, cap, "<%d>", log_levels[level].syslog_priority);
    struct timespec now;
    struct tm tm;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    size_t n = strftime(line, cap, "%Y-%m-%dT%H:%M:%S", &tm);
    return n + (size_t)snprintf(line + n, cap - n, ".%03ldZ %s ", now.tv_nsec / 1000000,
                                log_levels[level].name);
}

void log_write(enum log_level level, const char *fmt, ...)
{
    if (level > log_threshold)
        return;
    char line[2048];
    size_t n = log_prefix(line, sizeof(line), level);
    va_list ap;
    va_start(ap, fmt);
    int m = vsnprintf(line + n, sizeof(line) - n - 1, fmt, ap);
    va_end(ap);
    if (m < 0)
        return;
    n += (size_t)m;
    if (n > sizeof(line) - 2)
        n = sizeof(line) - 2;
    for (size_t i = 0; i < n; i++) {
        if (line[i] == '\n')
            line[i] = ' ';
    }
    line[n++] = '\n';
    if (write(STDERR_FILENO, line, n) < 0)
        return; /* nowhere left to complain */
}
