/* SPDX-License-Identifier: Apache-2.0 */
/* test_auth.c - auth.c: the token, the names in Host, the pages in Origin, the uid on the socket.
 */
#include "auth.h"

#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tap.h"
#include "util.h"

static char folder[] = "/tmp/ddipd-test-auth-XXXXXX";
static char bearer[80]; /* "Bearer " and the right token */
static struct auth auth;
static struct config config;

static const struct auth_peer tcp = {.local = false};

/* The error's code of a request over TCP with these headers. */
static enum err_code over_tcp(const char *authorization, const char *host, const char *origin)
{
    struct auth_claims claims = {.authorization = authorization, .host = host, .origin = origin};
    struct err err = ERR_INIT;
    int rc = auth_check(&auth, &tcp, &claims, false, &err);
    return rc == 0 ? ERR_NONE : err.code;
}

static void restart(char *listen, char *hosts, char *origins)
{
    struct err err = ERR_INIT;
    config = (struct config){.listen = listen,
                             .runtime_dir = folder,
                             .allowed_hosts = hosts,
                             .allowed_origins = origins};
    if (auth_init(&auth, &config, &err) < 0)
        printf("# %s\n", err.msg);
    snprintf(bearer, sizeof(bearer), "Bearer %s", auth.token);
}

static void check_token_file(void)
{
    struct err err = ERR_INIT;
    struct buf text = BUF_INIT;
    struct stat st;
    char path[128], first[65];
    snprintf(path, sizeof(path), "%s/token", folder);
    restart("127.0.0.1:3347", "", "");
    ok(util_read_file(path, 1000, &text, &err) == 0, "the token is written");
    is_str(buf_cstr(&text), auth.token, "as it is in memory");
    ok(strlen(auth.token) == 64 && stat(path, &st) == 0 && (st.st_mode & 0777) == 0600,
       "64 digits, for the owner alone");
    memcpy(first, auth.token, sizeof(first));
    restart("127.0.0.1:3347", "", "");
    ok(strcmp(first, auth.token) == 0, "what a killed daemon left stays good");
    ok(chmod(path, 0644) == 0, "but not if others could read it");
    restart("127.0.0.1:3347", "", "");
    ok(strcmp(first, auth.token) != 0 && stat(path, &st) == 0 && (st.st_mode & 0777) == 0600,
       "then there is another");
    memcpy(first, auth.token, sizeof(first));
    ok(unlink(path) == 0, "a daemon that ends in order removes it");
    restart("127.0.0.1:3347", "", "");
    ok(strcmp(first, auth.token) != 0, "and the next one makes another");
    config.runtime_dir = "/nonexistent";
    ok(auth_init(&auth, &config, &err) < 0 && strstr(err.msg, "/nonexistent/token"), "nowhere");
    buf_deinit(&text);
}

static void check_token(void)
{
    char wrong[90], *last = wrong + 70;
    restart("127.0.0.1:3347", "", "");
    ok(over_tcp(bearer, "localhost", NULL) == ERR_NONE, "the right token");
    ok(over_tcp(NULL, "localhost", NULL) == ERR_UNAUTHORIZED, "none");
    ok(over_tcp("", "localhost", NULL) == ERR_UNAUTHORIZED, "an empty header");
    ok(over_tcp("Bearer ", "localhost", NULL) == ERR_UNAUTHORIZED, "an empty token");
    ok(over_tcp(bearer + 7, "localhost", NULL) == ERR_UNAUTHORIZED, "the token without its scheme");
    ok(over_tcp("Basic YTpi", "localhost", NULL) == ERR_UNAUTHORIZED, "another scheme");
    snprintf(wrong, sizeof(wrong), "%s", bearer);
    wrong[0] = 'b';
    ok(over_tcp(wrong, "localhost", NULL) == ERR_NONE, "the scheme in lower case");
    *last = *last == '0' ? '1' : '0';
    ok(over_tcp(wrong, "localhost", NULL) == ERR_UNAUTHORIZED, "the last digit wrong");
    *last = '\0';
    ok(over_tcp(wrong, "localhost", NULL) == ERR_UNAUTHORIZED, "the last digit missing");
    snprintf(wrong, sizeof(wrong), "%s0", bearer);
    ok(over_tcp(wrong, "localhost", NULL) == ERR_UNAUTHORIZED, "a digit more");
}

static void check_open(void)
{
    struct err err = ERR_INIT;
    struct auth_claims claims = {.host = "localhost"};
    restart("127.0.0.1:3347", "", "");
    ok(auth_check(&auth, &tcp, &claims, true, &err) == 0, "an open resource needs no token");
    claims.host = "evil.example";
    ok(auth_check(&auth, &tcp, &claims, true, &err) < 0 && err.code == ERR_FORBIDDEN,
       "but the right Host");
    ok(strstr(err.msg, "\"evil.example\"") && strstr(err.hint, "allowed_hosts"), "and says so");
    claims = (struct auth_claims){.host = "localhost", .origin = "http://evil.example"};
    ok(auth_check(&auth, &tcp, &claims, true, &err) < 0 && err.code == ERR_FORBIDDEN,
       "and no strange Origin");
    ok(strstr(err.msg, "http://evil.example") && strstr(err.hint, "allowed_origins"),
       "and says so");
    claims = (struct auth_claims){.host = "localhost"};
    ok(auth_check(&auth, &tcp, &claims, false, &err) < 0 && strstr(err.hint, "Bearer TOKEN"),
       "who lacks a token learns how to send one");
    ok(!strstr(err.msg, auth.token) && !strstr(err.hint, auth.token), "but not which");
}

static void check_hosts(void)
{
    static const char *const good[] = {"localhost",        "localhost:3347",  "LOCALHOST:1",
                                       "127.0.0.1",        "127.0.0.1:3347",  "[::1]",
                                       "[::1]:3347",       "here.example:80", "gpu.example",
                                       "GPU.example:3347", "second",          "[fd00::1]:3347"};
    static const char *const bad[] = {"",
                                      ":3347",
                                      "localhost.evil.example",
                                      "127.0.0.1.evil.example",
                                      "evil.example",
                                      "evil.example:3347",
                                      "127.0.0.2",
                                      "[::1",
                                      "[::2]",
                                      "gpu",
                                      "gpu.example.evil",
                                      "xgpu.example",
                                      "here.exampl",
                                      "second,",
                                      "gpu.example,second",
                                      " localhost",
                                      "::1"};
    restart("here.example:3347", "gpu.example, second,,[fd00::1]", "");
    for (size_t i = 0; i < UTIL_COUNT(good); i++)
        ok(over_tcp(bearer, good[i], NULL) == ERR_NONE, "Host %s", good[i]);
    for (size_t i = 0; i < UTIL_COUNT(bad); i++)
        ok(over_tcp(bearer, bad[i], NULL) == ERR_FORBIDDEN, "not Host \"%s\"", bad[i]);
    ok(over_tcp(bearer, NULL, NULL) == ERR_FORBIDDEN, "not without a Host");
    ok(over_tcp(NULL, "evil.example", NULL) == ERR_FORBIDDEN, "Host is looked at before the token");
    restart("[::]:3347", "", "");
    ok(over_tcp(bearer, "[::]:3347", NULL) == ERR_NONE, "the address that is bound");
    restart("none", "", "");
    ok(over_tcp(bearer, "none", NULL) == ERR_FORBIDDEN, "none is no name");
}

static void check_origins(void)
{
    restart("127.0.0.1:3347", "", "https://lab.example, http://localhost:8888");
    ok(over_tcp(bearer, "localhost:3347", "http://localhost:3347") == ERR_NONE, "the same origin");
    ok(over_tcp(bearer, "localhost:3347", "HTTP://LOCALHOST:3347") == ERR_NONE, "in other letters");
    ok(over_tcp(bearer, "localhost:3347", "https://lab.example") == ERR_NONE, "a listed one");
    ok(over_tcp(bearer, "localhost:3347", "http://localhost:8888") == ERR_NONE, "another");
    static const char *const bad[] = {"http://localhost",
                                      "http://localhost:3348",
                                      "null",
                                      "",
                                      "http://lab.example",
                                      "https://lab.example.evil",
                                      "lab.example",
                                      "http://127.0.0.1:3347",
                                      "https://lab.example/x",
                                      "localhost:3347",
                                      "http://evil/://localhost:3347",
                                      "https://lab.exampl"};
    for (size_t i = 0; i < UTIL_COUNT(bad); i++)
        ok(over_tcp(bearer, "localhost:3347", bad[i]) == ERR_FORBIDDEN, "not \"%s\"", bad[i]);
    ok(over_tcp(NULL, "localhost:3347", "http://localhost:3347") == ERR_UNAUTHORIZED,
       "the same origin does not stand for the token");
}

/* --- the Unix socket --- */

static enum err_code over_socket(uid_t uid, const char *origin)
{
    struct auth_peer peer = {.local = true, .uid = uid};
    struct auth_claims claims = {.host = "anything", .origin = origin};
    struct err err = ERR_INIT;
    return auth_check(&auth, &peer, &claims, false, &err) == 0 ? ERR_NONE : err.code;
}

static void check_socket(void)
{
    restart("none", "", "https://lab.example");
    ok(over_socket(getuid(), NULL) == ERR_NONE, "our own user needs no token");
    ok(over_socket(0, NULL) == ERR_NONE, "nor does root");
    ok(over_socket(54321, NULL) == ERR_FORBIDDEN, "others are sent away");
    ok(over_socket((uid_t)-1, NULL) == ERR_FORBIDDEN, "and so is nobody");
    ok(over_socket(getuid(), "http://evil.example") == ERR_FORBIDDEN, "and a strange page");
    ok(over_socket(getuid(), "https://lab.example") == ERR_NONE, "but not a listed one");
    struct auth_peer one = {.uid = 54321}, root = {.uid = 0};
    ok(auth_may_touch(&one, 54321) && !auth_may_touch(&one, 54322), "to each their own groups");
    ok(!auth_may_touch(&one, 0) && auth_may_touch(&root, 54321), "to root all");
}

static void check_peer_of(void)
{
    int fds[2], inet = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
        return;
    struct auth_peer peer = auth_peer_of(fds[0]);
    ok(peer.local && peer.uid == getuid(), "the kernel names the peer of a Unix socket");
    peer = auth_peer_of(inet);
    ok(!peer.local && peer.uid == getuid(), "TCP stands for the daemon's own user");
    ok(!auth_peer_of(-1).local, "what is no socket is not trusted");
    close(fds[0]);
    close(fds[1]);
    close(inet);
}

int main(void)
{
    if (!mkdtemp(folder))
        return 1;
    check_token_file();
    check_token();
    check_open();
    check_hosts();
    check_origins();
    check_socket();
    check_peer_of();
    util_remove_tree(folder);
    return tap_done();
}
