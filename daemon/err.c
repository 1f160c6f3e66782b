/* SPDX-License-Identifier: Apache-2.0 */
/* err.c - how a failure travels up. Long messages are cut, never overrun. */
#include "err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int err_set(struct err *err, enum err_code code, const char *fmt, ...)
{
    if (!err)
        return -1;
    va_list ap;
    va_start(ap, fmt);
    err->code = code;
    err->rank = -1;
    err->hint[0] = '\0';
    vsnprintf(err->msg, sizeof(err->msg), fmt, ap);
    va_end(ap);
    return -1;
}

int err_errno(struct err *err, enum err_code code, int errnum, const char *fmt, ...)
{
    if (!err)
        return -1;
    char what[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof(what), fmt, ap);
    va_end(ap);
    return err_set(err, code, "%s: %s", what, strerror(errnum));
}

int err_hint(struct err *err, const char *fmt, ...)
{
    if (!err)
        return -1;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err->hint, sizeof(err->hint), fmt, ap);
    va_end(ap);
    return -1;
}

int err_wrap(struct err *err, const char *fmt, ...)
{
    if (!err)
        return -1;
    char cause[sizeof(err->msg)];
    memcpy(cause, err->msg, sizeof(cause));
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(err->msg, sizeof(err->msg), fmt, ap);
    va_end(ap);
    strncat(err->msg, ": ", sizeof(err->msg) - strlen(err->msg) - 1);
    strncat(err->msg, cause, sizeof(err->msg) - strlen(err->msg) - 1);
    return -1;
}
