/* SPDX-License-Identifier: Apache-2.0 */
/* test_config.c - config.c: defaults < file < command line, what is refused, what a reload changes.
 */
#include "config.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "tap.h"

#define ARGS_MAX 8

static char folder[] = "/tmp/ddipd-test-config-XXXXXX";
static char file[64];

static void write_config(const char *text)
{
    struct err err = ERR_INIT;
    if (util_write_file(file, 0600, text, strlen(text), &err) < 0)
        printf("# %s\n", err.msg);
}

/* argv from a NULL-terminated list, with a first element. */
static int count_args(char **argv, const char *const *list)
{
    int argc = 1;
    argv[0] = "ddipd";
    while (list && list[argc - 1] && argc < ARGS_MAX) {
        argv[argc] = (char *)list[argc - 1];
        argc++;
    }
    return argc;
}

#define LIST(...) ((const char *const[]){__VA_ARGS__, NULL})

static int load(struct config *c, const char *const *list, struct err *err)
{
    char *argv[ARGS_MAX + 1];
    int argc = count_args(argv, list);
    *err = (struct err)ERR_INIT;
    return config_load(c, argc, argv, err);
}

/* The message of a load that must fail; "taken" if it did not. */
static const char *fault(const char *const *list)
{
    static struct err err;
    struct config c;
    int rc = load(&c, list, &err);
    config_deinit(&c);
    return rc < 0 && err.code != ERR_NONE ? err.msg : "taken";
}

static const char *file_fault(const char *text)
{
    write_config(text);
    return fault(LIST("--config", file));
}

/* --- defaults --- */

static void check_defaults(void)
{
    struct config c;
    struct err err;
    ok(load(&c, NULL, &err) == CONFIG_RUN, "no arguments are needed");
    is_str(c.listen, "127.0.0.1:3347", "the default address");
    is_str(c.python, "python3", "the default interpreter");
    is_str(c.config, "", "no file");
    ok(c.body_limit == 16 << 20 && c.payload_limit == 16ull << 30, "default sizes");
    ok(c.rank_limit == 256 && c.queue_limit == 1024 && c.orphan_timeout_s == 600,
       "default numbers");
    ok(!c.check_only, "and it runs");
    config_deinit(&c);
    ok(!c.listen && !c.socket, "nothing is left");
}

static const char *folders(void)
{
    static char text[1024];
    struct config c;
    struct err err;
    if (load(&c, NULL, &err) != CONFIG_RUN)
        return "refused";
    snprintf(text, sizeof(text), "%s %s %s", c.runtime_dir, c.state_dir, c.socket);
    config_deinit(&c);
    return text;
}

static void check_folders(void)
{
    char want[256];
    unsetenv("XDG_RUNTIME_DIR");
    unsetenv("XDG_STATE_HOME");
    unsetenv("HOME");
    snprintf(want, sizeof(want), "/tmp/ddipd-%u /var/tmp/ddipd-%u /tmp/ddipd-%u/ddipd.sock",
             getuid(), getuid(), getuid());
    is_str(folders(), want, "with no variable at all");
    setenv("HOME", "/h", 1);
    snprintf(want, sizeof(want), "/tmp/ddipd-%u /h/.local/state/ddipd /tmp/ddipd-%u/ddipd.sock",
             getuid(), getuid());
    is_str(folders(), want, "with HOME");
    setenv("XDG_RUNTIME_DIR", "/run/user/1", 1);
    setenv("XDG_STATE_HOME", "/s", 1);
    is_str(folders(), "/run/user/1/ddipd /s/ddipd /run/user/1/ddipd/ddipd.sock", "with XDG's");
    setenv("XDG_STATE_HOME", "relative", 1);
    is_str(folders(), "/run/user/1/ddipd /h/.local/state/ddipd /run/user/1/ddipd/ddipd.sock",
           "a relative folder does not count");
    setenv("RUNTIME_DIRECTORY", "/run/ddipd", 1);
    setenv("STATE_DIRECTORY", "/var/lib/ddipd:/var/lib/second", 1);
    is_str(folders(), "/run/ddipd /var/lib/ddipd /run/ddipd/ddipd.sock", "systemd's come first");
    unsetenv("RUNTIME_DIRECTORY");
    unsetenv("STATE_DIRECTORY");
}

/* --- precedence and syntax --- */

static void check_precedence(void)
{
    struct config c;
    struct err err;
    write_config("python = from-file\nrank_limit = 7\nbody_limit=2K");
    ok(load(&c, LIST("--rank-limit", "9", "--config", file), &err) == CONFIG_RUN, "all three");
    is_str(c.python, "from-file", "the file beats the default");
    ok(c.rank_limit == 9, "the command line beats the file, wherever it names it");
    ok(c.body_limit == 2048, "a last line without its end counts");
    config_deinit(&c);
    ok(load(&c, LIST("--rank_limit=3", "--python=a=b", "--rank-limit=4"), &err) == CONFIG_RUN,
       "--name=value, underscores, twice");
    ok(c.rank_limit == 4, "the last one counts");
    is_str(c.python, "a=b", "the first = divides");
    config_deinit(&c);
    ok(load(&c, LIST("--check-config"), &err) == CONFIG_RUN && c.check_only, "--check-config");
    config_deinit(&c);
}

static void check_file_syntax(void)
{
    struct config c;
    struct err err;
    write_config("# a comment\n\n  \t\n listen =  [::1]:0  # and one here\r\n"
                 "rank-limit=5\nsocket = ~/s.sock\nstate_dir = ~\npython =\n");
    setenv("HOME", "/h", 1);
    ok(load(&c, LIST("--config", file), &err) == CONFIG_RUN, "comments, blanks, CRLF: %s", err.msg);
    is_str(c.listen, "[::1]:0", "a value is trimmed");
    ok(c.rank_limit == 5, "dashes do as well");
    is_str(c.socket, "/h/s.sock", "~/ is the home folder");
    is_str(c.state_dir, "/h", "and so is ~");
    is_str(c.python, "", "an empty value is a value");
    config_deinit(&c);
}

static void check_print(void)
{
    struct config c, again;
    struct err err;
    struct buf first = BUF_INIT, second = BUF_INIT;
    ok(load(&c, LIST("--payload-limit", "3G", "--allowed-hosts", "a, b"), &err) == CONFIG_RUN,
       "set");
    config_print(&c, &first);
    char *text = util_strdup(buf_cstr(&first));
    ok(strstr(text, "payload_limit = 3221225472\n") && strstr(text, "allowed_hosts = a, b\n"),
       "effective values are printed");
    write_config(strchr(text, '\n') + 1); /* its first line names the file */
    ok(load(&again, LIST("--config", file), &err) == CONFIG_RUN, "and can be read: %s", err.msg);
    config_print(&again, &second);
    ok(strcmp(strchr(text, '\n'), strchr(buf_cstr(&second), '\n')) == 0, "to the same effect");
    free(text);
    buf_deinit(&first);
    buf_deinit(&second);
    config_deinit(&c);
    config_deinit(&again);
}

/* --- refusals --- */

static void check_numbers(void)
{
    static const char *const good[] = {"1024", "1K", "3M", "1G"};
    static const uint64_t want[] = {1024, 1024, 3 << 20, 1 << 30};
    static const char *const bad[] = {"",
                                      "K",
                                      "1k",
                                      "1 K",
                                      "-1",
                                      "+1",
                                      "1.5M",
                                      "0x400",
                                      "1KB",
                                      "KK",
                                      "1T",
                                      "1023",
                                      "2G",
                                      "18446744073709551616",
                                      "18014398509481985K",
                                      "99999999999999999999999999999999999G"};
    struct config c;
    struct err err;
    for (size_t i = 0; i < UTIL_COUNT(good); i++) {
        ok(load(&c, LIST("--body-limit", good[i]), &err) == CONFIG_RUN && c.body_limit == want[i],
           "body_limit %s", good[i]);
        config_deinit(&c);
    }
    for (size_t i = 0; i < UTIL_COUNT(bad); i++)
        ok(strstr(fault(LIST("--body-limit", bad[i])), "body_limit must be a whole number"),
           "body_limit \"%s\" is refused", bad[i]);
    is_str(fault(LIST("--rank-limit", "1K")),
           "rank_limit must be a whole number from 1 to 1024, not \"1K\"", "a number has no unit");
    is_str(fault(LIST("--body-limit", "5")),
           "body_limit must be a whole number from 1024 to 1073741824 (K, M, G allowed), not \"5\"",
           "bounds are said");
}

static void check_arguments(void)
{
    is_str(fault(LIST("--nope", "1")), "unknown argument \"--nope\"", "unknown");
    is_str(fault(LIST("listen")), "unknown argument \"listen\"", "not an option");
    is_str(fault(LIST("-listen", "x")), "unknown argument \"-listen\"", "one dash");
    is_str(fault(LIST("--")), "unknown argument \"--\"", "no name");
    is_str(fault(LIST("--listen")), "--listen needs a value", "no value");
    is_str(fault(LIST("--liste", "x")), "unknown argument \"--liste\"", "an abbreviation");
    is_str(fault(LIST("--listenx", "x")), "unknown argument \"--listenx\"", "one letter more");
    is_str(fault(LIST("--log-level", "loud")),
           "log_level must be error, warn, info or debug, not \"loud\"", "a wrong level");
    static const char *const listens[] = {
        "", "3347", ":3347", "host:", "host:65536", "host:-1", "host:x"};
    for (size_t i = 0; i < UTIL_COUNT(listens); i++)
        ok(strstr(fault(LIST("--listen", listens[i])), "listen must be HOST:PORT or none"),
           "listen \"%s\" is refused", listens[i]);
    is_str(fault(LIST("--listen", "none")), "taken", "listen none");
    char path[140];
    memset(path, 'x', sizeof(path));
    path[0] = '/';
    path[101] = '\0';
    ok(strstr(fault(LIST("--socket", path)), "is too long for a Unix socket"),
       "a long socket path");
    ok(strstr(fault(LIST("--runtime-dir", path)), "is too long for a Unix socket"),
       "a long folder");
}

static void check_file_faults(void)
{
    char want[256];
    snprintf(want, sizeof(want), "%s:3: expected `name = value`, got \"nonsense\"", file);
    is_str(file_fault("# one\n\nnonsense\nlisten = none"), want, "a line without =");
    snprintf(want, sizeof(want), "%s:1: unknown setting \"colour\"", file);
    is_str(file_fault("colour = blue\n"), want, "an unknown name");
    snprintf(want, sizeof(want),
             "%s:2: rank_limit must be a whole number from 1 to 1024, not \"0\"", file);
    is_str(file_fault("listen = none\nrank_limit = 0 # none\n"), want, "a wrong value");
    ok(strstr(file_fault("config = other"), ":1: unknown setting \"config\""), "no file in a file");
    ok(strstr(file_fault("= x"), ":1: unknown setting \"\""), "no name");
    ok(strstr(fault(LIST("--config", "/nonexistent/c")),
              "cannot read /nonexistent/c: No such file"),
       "a missing file");
    char *big = util_calloc(1, 300 * 1024);
    memset(big, '#', 300 * 1024 - 1);
    ok(strstr(file_fault(big), "is larger than 262144 bytes"), "a huge file");
    free(big);
    struct err err = ERR_INIT;
    static const char nul[] = "listen = none\n\0rank_limit = 0\n";
    ok(util_write_file(file, 0600, nul, sizeof(nul) - 1, &err) == 0 &&
           strstr(fault(LIST("--config", file)), "NUL"),
       "a NUL byte does not end the file unseen");
}

/* --- reload --- */

static void check_reload(void)
{
    struct config c;
    struct err err;
    char *argv[ARGS_MAX + 1];
    int argc = count_args(argv, LIST("--config", file, "--queue-limit", "10"));
    write_config("listen = none\npython = one\nbody_limit = 1K\nconnection_limit = 8\n");
    ok(load(&c, LIST("--config", file, "--queue-limit", "10"), &err) == CONFIG_RUN, "loaded");
    write_config("listen = 127.0.0.1:1\npython = two\nbody_limit = 2K\nconnection_limit = 9\n"
                 "queue_limit = 11\nlog_level = debug\n");
    ok(config_reload(&c, argc, argv, &err) == 0, "reloaded");
    is_str(c.python, "two", "the interpreter changes");
    is_str(c.log_level, "debug", "the log level changes");
    ok(c.body_limit == 2048, "a size changes");
    is_str(c.listen, "none", "the address does not");
    ok(c.connection_limit == 8, "nor the number of connections");
    ok(c.queue_limit == 10, "the command line still beats the file");
    write_config("python = three\nbody_limit = 3K\nlog_level = loud\n");
    ok(config_reload(&c, argc, argv, &err) < 0 && strstr(err.msg, "loud"), "a bad file is refused");
    is_str(c.python, "two", "and changes nothing");
    ok(c.body_limit == 2048, "nothing at all");
    unlink(file);
    ok(config_reload(&c, argc, argv, &err) < 0, "a missing file is refused");
    is_str(c.python, "two", "and changes nothing either");
    config_deinit(&c);
}

/* --- what is printed --- */

/* stdout goes to a file meanwhile. */
static int load_quietly(const char *argument, struct buf *out)
{
    struct config c;
    struct err err;
    fflush(stdout);
    int old = dup(STDOUT_FILENO), fd = open(file, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    dup2(fd, STDOUT_FILENO);
    int rc = load(&c, LIST(argument), &err);
    config_deinit(&c);
    fflush(stdout);
    dup2(old, STDOUT_FILENO);
    close(old);
    close(fd);
    return util_read_file(file, 1 << 20, out, &err) < 0 ? -1 : rc;
}

static void check_printed(void)
{
    struct buf help = BUF_INIT, version = BUF_INIT, settings = BUF_INIT;
    struct config c;
    struct err err;
    ok(load_quietly("--version", &version) == CONFIG_PRINTED, "--version");
    ok(strncmp(buf_cstr(&version), "ddipd ", 6) == 0, "is printed");
    ok(load_quietly("--help", &help) == CONFIG_PRINTED, "--help");
    bool all = load(&c, NULL, &err) == CONFIG_RUN && strlen(buf_cstr(&help)) > 100;
    config_print(&c, &settings);
    char *rest = (char *)buf_cstr(&settings), *line;
    while ((line = strsep(&rest, "\n")) != NULL && *line) {
        char flag[64] = "  --";
        snprintf(flag + 4, sizeof(flag) - 4, "%.*s ", (int)strcspn(line, " "), line);
        for (char *p = flag; *p; p++)
            *p = *p == '_' ? '-' : *p;
        all = all && strstr((char *)help.data, flag);
    }
    ok(all, "it shows every setting");
    config_deinit(&c);
    buf_deinit(&help);
    buf_deinit(&version);
    buf_deinit(&settings);
}

int main(void)
{
    if (!mkdtemp(folder))
        return 1;
    snprintf(file, sizeof(file), "%s/ddipd.conf", folder);
    check_defaults();
    check_folders();
    check_precedence();
    check_file_syntax();
    check_print();
    check_numbers();
    check_arguments();
    check_file_faults();
    check_reload();
    check_printed();
    util_remove_tree(folder);
    return tap_done();
}
