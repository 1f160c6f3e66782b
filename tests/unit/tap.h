/* SPDX-License-Identifier: Apache-2.0 */
/* tap.h - Test Anything Protocol on stdout. `return tap_done();` ends main. */
#ifndef DDIPD_TAP_H
#define DDIPD_TAP_H

#include <stdio.h>
#include <string.h>

static int tap_count, tap_failed;

#define ok(condition, ...)                                                                         \
    do {                                                                                           \
        int tap_good = (condition) ? 1 : 0;                                                        \
        printf("%sok %d - ", tap_good ? "" : "not ", ++tap_count);                                 \
        printf(__VA_ARGS__);                                                                       \
        printf("\n");                                                                              \
        if (!tap_good) {                                                                           \
            tap_failed++;                                                                          \
            printf("# %s:%d: %s\n", __FILE__, __LINE__, #condition);                               \
        }                                                                                          \
        fflush(stdout);                                                                            \
    } while (0)

#define is_str(got, want, name)                                                                    \
    do {                                                                                           \
        const char *tap_got = (got), *tap_want = (want);                                           \
        ok(tap_got &&strcmp(tap_got, tap_want) == 0, "%s", name);                                  \
        if (!tap_got || strcmp(tap_got, tap_want) != 0)                                            \
            printf("#  got: %s\n# want: %s\n", tap_got ? tap_got : "(null)", tap_want);            \
    } while (0)

static inline int tap_done(void)
{
    printf("1..%d\n", tap_count);
    return tap_failed ? 1 : 0;
}

#endif
