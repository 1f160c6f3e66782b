/* SPDX-License-Identifier: Apache-2.0 */
/*
 * err.h - how a failure travels up.
 *
 * A fallible function returns 0 or -1 and takes `struct err *` last; only api.c turns a code into
 * an HTTP status. The struct is plain memory: nothing to free, safe to copy.
 */
#ifndef DDIPD_ERR_H
#define DDIPD_ERR_H

#define ERR_MUST_CHECK __attribute__((warn_unused_result))

enum err_code {
    ERR_NONE = 0,
    ERR_SYNTAX,       /* the bytes are not what their type says (malformed JSON, bad UTF-8) */
    ERR_INVALID,      /* well-formed, but a value is wrong */
    ERR_UNAUTHORIZED, /* no or wrong token */
    ERR_FORBIDDEN,    /* known caller, not allowed */
    ERR_NOT_FOUND,
    ERR_METHOD,         /* the path exists, the method does not */
    ERR_NOT_ACCEPTABLE, /* no representation in Accept can be given */
    ERR_CONFLICT,
    ERR_GONE, /* was here, has been retired */
    ERR_TOO_LARGE,
    ERR_MEDIA_TYPE, /* Content-Type not understood */
    ERR_UPGRADE,    /* WebSocket endpoint asked in plain HTTP */
    ERR_TIMEOUT,
    ERR_RANK, /* a rank answered with an exception; err.rank names it */
    ERR_UNAVAILABLE,
    ERR_IO,
};

struct err {
    enum err_code code;
    int rank; /* rank the error is about, or -1 */
    char msg[1024];
    char hint[512]; /* what to do about it, or empty */
};

#define ERR_INIT                                                                                   \
    {                                                                                              \
        .code = ERR_NONE, .rank = -1                                                               \
    }

/* Fills *err (which may be NULL) and returns -1, so a caller can `return err_set(...)`. */
int err_set(struct err *err, enum err_code code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Like err_set, with ": strerror(errnum)" appended. */
int err_errno(struct err *err, enum err_code code, int errnum, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Adds what the reader can do; returns -1. */
int err_hint(struct err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Puts context in front of a message that is already there; returns -1. */
int err_wrap(struct err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
