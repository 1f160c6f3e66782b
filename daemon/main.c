/* SPDX-License-Identifier: Apache-2.0 */
/* main.c - arguments in, exit code out. */
#include <stdio.h>

#include "config.h"
#include "server.h"

int main(int argc, char **argv)
{
    struct config config;
    struct err err = ERR_INIT;
    int rc = config_load(&config, argc, argv, &err);
    if (rc < 0) {
        fprintf(stderr, "ddipd: %s\n", err.msg);
        if (err.hint[0])
            fprintf(stderr, "ddipd: %s\n", err.hint);
        config_deinit(&config);
        return 2;
    }
    if (rc == CONFIG_RUN && config.check_only) {
        struct buf text = BUF_INIT;
        config_print(&config, &text);
        fwrite(text.data, 1, text.len, stdout);
        buf_deinit(&text);
    } else if (rc == CONFIG_RUN) {
        rc = server_run(&config, argc, argv);
    } else {
        rc = 0;
    }
    config_deinit(&config);
    return rc;
}
