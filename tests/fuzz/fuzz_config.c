/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_config.c - the text of a configuration file, or (first byte '-') a command line, one
 * argument per line. What is accepted is printed, read again, and must say the same.
 */
#include "config.h"

#include <sys/mman.h>
#include <unistd.h>

#include "fuzz.h"

#define ARGS_MAX 16

static char path[64];
static int file = -1;

static void setup(void)
{
    if (file >= 0)
        return;
    file = memfd_create("config", MFD_CLOEXEC);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", file);
    setenv("HOME", "/h", 1);
}

static int load_text(struct config *c, const void *text, size_t len, struct err *err)
{
    char *argv[] = {"ddipd", "--config", path, NULL};
    fuzz_check(ftruncate(file, 0) == 0 && pwrite(file, text, len, 0) == (ssize_t)len);
    return config_load(c, 3, argv, err);
}

static void check_refused(const struct err *err)
{
    fuzz_check(err->code != ERR_NONE && err->msg[0]);
}

/* The printed settings, read as a file, have the same effect. */
static void check_printed(const struct config *c)
{
    struct buf text = BUF_INIT, again = BUF_INIT;
    struct err err = ERR_INIT;
    struct config other;
    config_print(c, &text);
    const char *rest = strchr(buf_cstr(&text), '\n') + 1; /* the first line names the file */
    fuzz_check(load_text(&other, rest, strlen(rest), &err) == CONFIG_RUN);
    config_print(&other, &again);
    fuzz_check(strcmp(strchr(buf_cstr(&again), '\n') + 1, rest) == 0);
    config_deinit(&other);
    buf_deinit(&text);
    buf_deinit(&again);
}

static void fuzz_file(const uint8_t *data, size_t size)
{
    struct config c;
    struct err err = ERR_INIT;
    char *argv[] = {"ddipd", "--config", path, NULL};
    if (load_text(&c, data, size, &err) == CONFIG_RUN) {
        fuzz_check(config_reload(&c, 3, argv, &err) == CONFIG_RUN);
        check_printed(&c);
    } else {
        check_refused(&err);
    }
    config_deinit(&c);
}

/* Arguments that print, or that name a file of this machine. */
static bool skipped(const char *arg)
{
    return strcmp(arg, "--help") == 0 || strcmp(arg, "--version") == 0 ||
           strncmp(arg, "--config", 8) == 0;
}

static void fuzz_arguments(const uint8_t *data, size_t size)
{
    char *text = util_strndup((const char *)data, size), *rest = text;
    char *argv[ARGS_MAX + 1] = {"ddipd"};
    int argc = 1;
    struct config c;
    struct err err = ERR_INIT;
    while (rest && argc < ARGS_MAX) {
        argv[argc] = strsep(&rest, "\n");
        argc += !skipped(argv[argc]);
    }
    argv[argc] = NULL;
    int rc = config_load(&c, argc, argv, &err);
    fuzz_check(rc == CONFIG_RUN || rc == -1);
    if (rc < 0)
        check_refused(&err);
    config_deinit(&c);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    setup();
    if (size && data[0] == '-')
        fuzz_arguments(data, size);
    else
        fuzz_file(data, size);
    return 0;
}
