/* SPDX-License-Identifier: Apache-2.0 */
/*
 * config.c - every setting, from one table: defaults < file < command line.
 *
 * --help, the file's syntax, the command line and reload all follow config_options;
 * docs/operations.md is tested against it. A reload parses into a fresh struct first, so a bad file
 * changes nothing.
 */
#include "config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "log.h"

#ifndef DDIPD_VERSION
#define DDIPD_VERSION "0.0.0"
#endif
#ifndef DDIPD_WORKER_DIR
#define DDIPD_WORKER_DIR "/usr/libexec/ddipd"
#endif

#define CONFIG_FILE_MAX (256 * 1024)

enum config_kind { CONFIG_TEXT, CONFIG_NUMBER, CONFIG_SIZE };

struct config_option {
    const char *name;
    enum config_kind kind;
    size_t offset;
    const char *fallback; /* NULL: config_defaults works it out */
    uint64_t min, max;
    bool reload;
    const char *help;
};

#define TEXT(field, fallback, reload, help)                                                        \
    {                                                                                              \
#field, CONFIG_TEXT, offsetof(struct config, field), fallback, 0, 0, reload, help          \
    }
#define NUMBER(field, fallback, min, max, reload, help)                                            \
    {                                                                                              \
#field, CONFIG_NUMBER, offsetof(struct config, field), fallback, min, max, reload, help    \
    }
#define SIZE(field, fallback, min, max, reload, help)                                              \
    {                                                                                              \
#field, CONFIG_SIZE, offsetof(struct config, field), fallback, min, max, reload, help      \
    }

static const struct config_option config_options[] = {
    TEXT(config, "", false, "read settings from this file"),
    TEXT(listen, "127.0.0.1:3347", false, "TCP address, HOST:PORT (port 0: any free one) or none"),
    TEXT(socket, NULL, false, "Unix socket (default: ddipd.sock in the runtime folder)"),
    TEXT(state_dir, NULL, false, "journals (default: $XDG_STATE_HOME/ddipd)"),
    TEXT(runtime_dir, NULL, false, "sockets, token, pid (default: $XDG_RUNTIME_DIR/ddipd)"),
    TEXT(worker_dir, NULL, false, "folder of ddip_worker and libddipworker.so"),
    TEXT(python, "python3", true, "interpreter of ranks when a request names none"),
    TEXT(cgroup_dir, "/sys/fs/cgroup", true, "where the kernel counts out-of-memory kills"),
    TEXT(log_level, "info", true, "error, warn, info or debug"),
    TEXT(allowed_hosts, "", true, "further Host names accepted on TCP, comma-separated"),
    TEXT(allowed_origins, "", true, "further web origins accepted, comma-separated"),
    TEXT(cudart_library, "", false, "CUDA runtime to load (default: libcudart.so.13, .12, ...)"),
    TEXT(nvml_library, "", false, "NVML to load (default: libnvidia-ml.so.1)"),
    TEXT(nccl_library, "", false, "NCCL to load (default: libnccl.so.2)"),
    SIZE(body_limit, "16M", 1024, 1ull << 30, true, "largest JSON or code body"),
    SIZE(payload_limit, "16G", 1024, 1ull << 44, true, "largest namespace value"),
    SIZE(journal_limit, "1G", 1048576, 1ull << 44, true, "events kept on disk per group"),
    NUMBER(connection_limit, "512", 4, 65536, false, "connections at once"),
    NUMBER(group_limit, "64", 1, 4096, true, "groups at once"),
    NUMBER(rank_limit, "256", 1, 1024, true, "ranks of one group"),
    NUMBER(queue_limit, "1024", 1, 1000000, true, "waiting cells and requests of one group"),
    NUMBER(start_timeout_s, "120", 1, 86400, true, "seconds until a starting group has failed"),
    NUMBER(orphan_timeout_s, "600", 1, 604800, true, "seconds a rank waits for a lost daemon"),
    NUMBER(idle_timeout_s, "120", 1, 86400, false, "seconds until a silent connection is closed"),
    NUMBER(template_idle_s, "600", 0, 604800, true,
           "seconds a warm template process is kept for the next group (0: not at all)"),
};

static void *config_field(struct config *c, const struct config_option *o)
{
    return (char *)c + o->offset;
}

static int config_number(const struct config_option *o, const char *value, uint64_t *out)
{
    char digits[24];
    size_t n = strlen(value);
    unsigned shift = 0;
    if (o->kind == CONFIG_SIZE && n > 1) {
        const char *units = "KMG", *unit = strchr(units, value[n - 1]);
        if (unit) {
            shift = 10 * (unsigned)(unit - units + 1);
            n--;
        }
    }
    if (n == 0 || n >= sizeof(digits))
        return -1;
    memcpy(digits, value, n);
    digits[n] = '\0';
    if (util_parse_u64(digits, 0, UINT64_MAX >> shift, out) < 0)
        return -1;
    *out <<= shift;
    return *out < o->min || *out > o->max ? -1 : 0;
}

static char *config_expand(const char *value)
{
    const char *home = getenv("HOME");
    if (home && value[0] == '~' && (value[1] == '/' || !value[1]))
        return util_printf("%s%s", home, value + 1);
    return util_strdup(value);
}

static int config_set(struct config *c, const struct config_option *o, const char *value,
                      struct err *err)
{
    if (o->kind == CONFIG_TEXT) {
        char **field = config_field(c, o);
        free(*field);
        *field = config_expand(value);
        return 0;
    }
    if (config_number(o, value, config_field(c, o)) == 0)
        return 0;
    return err_set(err, ERR_INVALID, "%s must be a whole number from %llu to %llu%s, not \"%s\"",
                   o->name, (unsigned long long)o->min, (unsigned long long)o->max,
                   o->kind == CONFIG_SIZE ? " (K, M, G allowed)" : "", value);
}

/* Finds an option by its file name, or by its command-line spelling (dashes). */
static const struct config_option *config_find(const char *name, size_t len)
{
    for (size_t i = 0; i < UTIL_COUNT(config_options); i++) {
        const char *have = config_options[i].name;
        size_t k = 0;
        while (k < len && have[k] && (have[k] == name[k] || (have[k] == '_' && name[k] == '-')))
            k++;
        if (k == len && !have[k])
            return &config_options[i];
    }
    return NULL;
}

/* The variables of the XDG base directory specification, and systemd's for units. */
static char *config_default_dir(const char *unit_var, const char *xdg_var, const char *home_sub,
                                const char *last)
{
    const char *unit = getenv(unit_var), *xdg = getenv(xdg_var), *home = getenv("HOME");
    if (unit && *unit == '/')
        return util_strndup(unit, strcspn(unit, ":"));
    if (xdg && *xdg == '/')
        return util_printf("%s/ddipd", xdg);
    if (home_sub && home && *home == '/')
        return util_printf("%s/%s/ddipd", home, home_sub);
    return util_printf("%s/ddipd-%u", last, (unsigned)getuid());
}

/* A build tree carries its worker beside the binary; an installed binary knows its own folder. */
static char *config_default_worker_dir(void)
{
    char exe[4096];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    char *slash = n > 0 ? memrchr(exe, '/', (size_t)n) : NULL;
    if (slash) {
        *slash = '\0';
        char *library = util_printf("%s/libddipworker.so", exe);
        bool here = access(library, R_OK) == 0;
        free(library);
        if (here)
            return util_strdup(exe);
    }
    return util_strdup(DDIPD_WORKER_DIR);
}

static void config_defaults(struct config *c)
{
    if (!c->worker_dir)
        c->worker_dir = config_default_worker_dir();
    if (!c->runtime_dir)
        c->runtime_dir = config_default_dir("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR", NULL, "/tmp");
    if (!c->state_dir)
        c->state_dir =
            config_default_dir("STATE_DIRECTORY", "XDG_STATE_HOME", ".local/state", "/var/tmp");
    if (!c->socket)
        c->socket = util_printf("%s/ddipd.sock", c->runtime_dir);
}

static char *config_trim(char *s)
{
    s += strspn(s, " \t\r");
    size_t n = strlen(s);
    while (n && strchr(" \t\r", s[n - 1]))
        s[--n] = '\0';
    return s;
}

static int config_line(struct config *c, char *line, struct err *err)
{
    char *comment = strchr(line, '#');
    if (comment)
        *comment = '\0';
    line = config_trim(line);
    if (!*line)
        return 0;
    char *eq = strchr(line, '=');
    if (!eq)
        return err_set(err, ERR_SYNTAX, "expected `name = value`, got \"%s\"", line);
    *eq = '\0';
    char *name = config_trim(line);
    const struct config_option *o = config_find(name, strlen(name));
    if (!o || o->offset == offsetof(struct config, config)) {
        err_set(err, ERR_INVALID, "unknown setting \"%s\"", name);
        return err_hint(err, "`ddipd --help` lists the settings");
    }
    return config_set(c, o, config_trim(eq + 1), err);
}

static int config_read_file(struct config *c, const char *path, struct err *err)
{
    struct buf text = BUF_INIT;
    int rc = util_read_file(path, CONFIG_FILE_MAX, &text, err);
    if (rc == 0 && strlen(buf_cstr(&text)) < text.len)
        rc = err_set(err, ERR_SYNTAX, "%s has a NUL byte", path);
    unsigned number = 0;
    char *rest = rc == 0 ? (char *)buf_cstr(&text) : NULL;
    while (rest && rc == 0) {
        char *line = strsep(&rest, "\n");
        number++;
        rc = config_line(c, line, err);
        if (rc < 0)
            err_wrap(err, "%s:%u", path, number);
    }
    buf_deinit(&text);
    return rc;
}

static void config_help(void)
{
    printf("usage: ddipd [--check-config] [--version] [--help] [--SETTING VALUE]...\n\n"
           "Coordinator of interactive PyTorch DistributedDataParallel groups.\n\nSettings:\n");
    for (size_t i = 0; i < UTIL_COUNT(config_options); i++) {
        const struct config_option *o = &config_options[i];
        char flag[64];
        snprintf(flag, sizeof(flag), "--%s", o->name);
        for (char *p = flag; *p; p++)
            *p = *p == '_' ? '-' : *p;
        printf("  %-22s %s", flag, o->help);
        if (o->fallback && *o->fallback)
            printf(" [%s]", o->fallback);
        printf("\n");
    }
}

/* Command line into c; pass 1 only takes --config, so that the file comes before the rest. */
static int config_read_args(struct config *c, int argc, char **argv, bool only_file,
                            struct err *err)
{
    for (int i = 1; i < argc; i++) {
        const char *arg = argv[i];
        if (strcmp(arg, "--check-config") == 0) {
            c->check_only = true;
            continue;
        }
        size_t len = strcspn(arg, "=");
        const struct config_option *o =
            strncmp(arg, "--", 2) == 0 ? config_find(arg + 2, len - 2) : NULL;
        if (!o) {
            err_set(err, ERR_INVALID, "unknown argument \"%s\"", arg);
            return err_hint(err, "`ddipd --help` lists what there is");
        }
        const char *value = arg[len] == '=' ? arg + len + 1 : i + 1 < argc ? argv[++i] : NULL;
        if (!value)
            return err_set(err, ERR_INVALID, "%s needs a value", arg);
        bool is_file = o->offset == offsetof(struct config, config);
        if (is_file == only_file && config_set(c, o, value, err) < 0)
            return -1;
    }
    return 0;
}

static int config_check(const struct config *c, struct err *err)
{
    enum log_level level;
    if (log_level_parse(c->log_level, &level) < 0)
        return err_set(err, ERR_INVALID, "log_level must be error, warn, info or debug, not \"%s\"",
                       c->log_level);
    if (strcmp(c->listen, "none") != 0) {
        const char *colon = strrchr(c->listen, ':');
        uint64_t port;
        if (!colon || colon == c->listen || util_parse_u64(colon + 1, 0, 65535, &port) < 0)
            return err_set(err, ERR_INVALID, "listen must be HOST:PORT or none, not \"%s\"",
                           c->listen);
    }
    if (strlen(c->socket) > 100 || strlen(c->runtime_dir) > 88)
        return err_set(err, ERR_INVALID, "the socket path %s is too long for a Unix socket",
                       c->socket);
    return 0;
}

int config_load(struct config *c, int argc, char **argv, struct err *err)
{
    *c = (struct config){0};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--version") == 0) {
            printf("ddipd %s\n", DDIPD_VERSION);
            return CONFIG_PRINTED;
        }
        if (strcmp(argv[i], "--help") == 0) {
            config_help();
            return CONFIG_PRINTED;
        }
    }
    for (size_t i = 0; i < UTIL_COUNT(config_options); i++) {
        const struct config_option *o = &config_options[i];
        if (o->fallback && config_set(c, o, o->fallback, err) < 0)
            return -1;
    }
    if (config_read_args(c, argc, argv, true, err) < 0)
        return -1;
    if (*c->config && config_read_file(c, c->config, err) < 0)
        return -1;
    if (config_read_args(c, argc, argv, false, err) < 0)
        return -1;
    config_defaults(c);
    return config_check(c, err);
}

int config_reload(struct config *c, int argc, char **argv, struct err *err)
{
    struct config fresh;
    int rc = config_load(&fresh, argc, argv, err);
    for (size_t i = 0; rc == CONFIG_RUN && i < UTIL_COUNT(config_options); i++) {
        const struct config_option *o = &config_options[i];
        if (!o->reload)
            continue;
        if (o->kind == CONFIG_TEXT) {
            char **to = config_field(c, o), **from = config_field(&fresh, o), *old = *to;
            *to = *from;
            *from = old;
        } else {
            *(uint64_t *)config_field(c, o) = *(uint64_t *)config_field(&fresh, o);
        }
    }
    config_deinit(&fresh);
    return rc;
}

void config_deinit(struct config *c)
{
    for (size_t i = 0; i < UTIL_COUNT(config_options); i++) {
        char **field = config_field(c, &config_options[i]);
        if (config_options[i].kind == CONFIG_TEXT)
            free(*field);
    }
    *c = (struct config){0};
}

void config_print(const struct config *c, struct buf *out)
{
    for (size_t i = 0; i < UTIL_COUNT(config_options); i++) {
        const struct config_option *o = &config_options[i];
        const void *field = (const char *)c + o->offset;
        if (o->offset == offsetof(struct config, config))
            continue; /* a file cannot name another */
        if (o->kind == CONFIG_TEXT)
            buf_addf(out, "%s = %s\n", o->name, *(char *const *)field);
        else
            buf_addf(out, "%s = %llu\n", o->name, (unsigned long long)*(const uint64_t *)field);
    }
}
