/* SPDX-License-Identifier: Apache-2.0 */
/* dl.c - a library that may be absent, and its functions from one table. */
#include "dl.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

void *dl_open(const char *library, const struct dl_symbol *symbols, size_t count, void *api,
              char *why, size_t size)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        const char *text = dlerror();
        snprintf(why, size, "%s", text ? text : library);
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        void *function = dlsym(handle, symbols[i].name);
        if (!function && symbols[i].required) {
            snprintf(why, size, "%s has no function %s", library, symbols[i].name);
            dlclose(handle);
            return NULL;
        }
        memcpy((char *)api + symbols[i].offset, &function, sizeof(function));
    }
    return handle;
}

void dl_close(void *handle)
{
    if (handle)
        dlclose(handle);
}
