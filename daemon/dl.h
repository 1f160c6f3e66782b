/* SPDX-License-Identifier: Apache-2.0 */
/* dl.h - a library that may be absent, and its functions from one table. The only user of dlfcn. */
#ifndef DDIPD_DL_H
#define DDIPD_DL_H

#include <stdbool.h>
#include <stddef.h>

/* One function: where its pointer goes in the caller's struct, and whether to do without it. */
struct dl_symbol {
    const char *name;
    size_t offset;
    bool required;
};

/* A row for `type`'s member `slot`. Declare the slot as `__typeof__(function) *slot`. */
#define DL_SYMBOL(type, slot, name, required)                                                      \
    {                                                                                              \
        name, offsetof(type, slot), required                                                       \
    }

/*
 * Opens the library and fills the slots of *api; an optional function that is missing leaves NULL.
 * NULL: why[size] says what was wrong. Close the result with dl_close, or never, where the library
 * has threads of its own.
 */
void *dl_open(const char *library, const struct dl_symbol *symbols, size_t count, void *api,
              char *why, size_t size);
void dl_close(void *handle); /* NULL is allowed */

#endif
