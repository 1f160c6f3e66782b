/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz.h - what a fuzz target is: one function, and checks that end the process when they fail. */
#ifndef DDIPD_FUZZ_H
#define DDIPD_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define fuzz_check(condition)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);              \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

/* A copy of exactly that size, so that a sanitizer sees a read past it. */
static inline uint8_t *fuzz_copy(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    fuzz_check(copy);
    if (size)
        memcpy(copy, data, size);
    return copy;
}

#endif
