/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_nccl.c - nccl.c against the fake library (tests/fakes), and against a real libnccl.
 *
 * DDIP_FAKES names the fakes' folder. DDIP_REAL_NCCL names a real libnccl to try as well.
 */
#include "nccl.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tap.h"
#include "util.h"

static void check_absent(void)
{
    struct err err = ERR_INIT;
    char hex[NCCL_ID_HEX];
    struct nccl *n = nccl_open("/nonexistent/libnccl.so");
    ok(!nccl_available(n), "without the library NCCL is not available");
#ifdef HAVE_NCCL
    ok(strstr(nccl_reason(n), "NCCL not found: /nonexistent/libnccl.so"), "reason names the file");
#else
    is_str(nccl_reason(n), "this ddipd was built without the NCCL header", "reason");
#endif
    is_str(nccl_version(n), "", "no version");
    ok(nccl_unique_id(n, hex, &err) < 0 && err.code == ERR_UNAVAILABLE, "no id");
    is_str(err.msg, nccl_reason(n), "the error is the reason");
    nccl_close(n);
    nccl_close(NULL);
}

#ifdef HAVE_NCCL

static const char *fake(void)
{
    static char path[512];
    const char *folder = getenv("DDIP_FAKES");
    snprintf(path, sizeof(path), "%s/libnccl_fake.so", folder ? folder : "build/fakes");
    return path;
}

static void check_environment(void)
{
    unsetenv("NCCL_SOCKET_IFNAME");
    nccl_close(nccl_open(""));
    is_str(getenv("NCCL_SOCKET_IFNAME"), "lo", "sockets stay on this machine");
    setenv("NCCL_SOCKET_IFNAME", "eth7", 1);
    nccl_close(nccl_open(""));
    is_str(getenv("NCCL_SOCKET_IFNAME"), "eth7", "unless the user chose");
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
}

static void check_version(const char *code, const char *want)
{
    setenv("FAKE_NCCL_VERSION", code, 1);
    struct nccl *n = nccl_open(fake());
    is_str(nccl_version(n), want, "version");
    ok(nccl_available(n) && !nccl_reason(n), "available");
    nccl_close(n);
    unsetenv("FAKE_NCCL_VERSION");
}

static bool is_hex_id(const char *hex)
{
    return strlen(hex) == 256 && strspn(hex, "0123456789abcdef") == 256;
}

/* Open descriptors above 2; *bare: those without close-on-exec, *foreign: sockets not on lo. */
static int count_fds(int *bare, int *foreign)
{
    int count = 0;
    *bare = *foreign = 0;
    for (int fd = 3; fd < 1024; fd++) {
        struct sockaddr_in a = {0};
        socklen_t len = sizeof(a);
        int flags = fcntl(fd, F_GETFD);
        if (flags < 0)
            continue;
        count++;
        *bare += !(flags & FD_CLOEXEC);
        if (getsockname(fd, (struct sockaddr *)&a, &len) == 0 && a.sin_family == AF_INET)
            *foreign += ntohl(a.sin_addr.s_addr) >> 24 != 127;
    }
    return count;
}

static void check_ids(const char *library, const char *what)
{
    struct err err = ERR_INIT;
    char one[NCCL_ID_HEX] = "", two[NCCL_ID_HEX] = "";
    int bare_before, bare, foreign;
    struct nccl *n = nccl_open(library);
    int mine = dup(0), before = count_fds(&bare_before, &foreign);
    ok(nccl_unique_id(n, one, &err) == 0 && nccl_unique_id(n, two, &err) == 0, "%s: two ids %s",
       what, err.msg);
    ok(is_hex_id(one) && is_hex_id(two) && strcmp(one, two) != 0, "%s: they differ", what);
    ok(count_fds(&bare, &foreign) >= before + 2, "%s: sockets were opened", what);
    ok(bare == bare_before, "%s: new descriptors are close-on-exec, old ones as before", what);
    ok(foreign == 0, "%s: no socket is reachable from outside", what);
    close(mine);
    nccl_close(n);
}

static void check_errors(void)
{
    struct err err = ERR_INIT;
    char hex[NCCL_ID_HEX];
    struct nccl *n = nccl_open(fake());
    setenv("FAKE_NCCL_ERROR", "5", 1);
    ok(nccl_unique_id(n, hex, &err) < 0 && err.code == ERR_UNAVAILABLE,
       "NCCL's error is passed on");
    is_str(err.msg, "NCCL made no unique id: invalid usage: no socket interface found", "in words");
    unsetenv("FAKE_NCCL_ERROR");
    nccl_close(n);
    setenv("FAKE_NCCL_VERSION", "0", 1);
    n = nccl_open(fake());
    is_str(nccl_reason(n), "NCCL cannot be used: internal error", "a library that does not work");
    nccl_close(n);
    unsetenv("FAKE_NCCL_VERSION");
}

static void check_limit(void)
{
    struct err err = ERR_INIT;
    char hex[NCCL_ID_HEX];
    int made = 0;
    setenv("FAKE_NCCL_NO_SOCKET", "1", 1);
    struct nccl *n = nccl_open(fake());
    while (made < 1000 && nccl_unique_id(n, hex, &err) == 0)
        made++;
    ok(made == NCCL_IDS_MAX, "%d ids are made", NCCL_IDS_MAX);
    ok(err.code == ERR_UNAVAILABLE && strstr(err.msg, "256 NCCL ids"), "then the limit is named");
    ok(strstr(err.hint, "restart ddipd"), "and the way out");
    nccl_close(n);
    unsetenv("FAKE_NCCL_NO_SOCKET");
}

static void check_real(void)
{
    const char *library = getenv("DDIP_REAL_NCCL");
    if (!library || access(library, R_OK) < 0) {
        ok(true, "the real libnccl # SKIP DDIP_REAL_NCCL names no file");
        return;
    }
    struct nccl *n = nccl_open(library);
    ok(nccl_available(n), "the real libnccl is available");
    printf("# real: NCCL %s\n", nccl_version(n));
    ok(nccl_version(n)[0] == '2', "it has a version");
    nccl_close(n);
    check_ids(library, "real");
}

#endif

int main(void)
{
    check_absent();
#ifdef HAVE_NCCL
    check_environment();
    check_version("22809", "2.28.9");
    check_version("21805", "2.18.5");
    check_version("2804", "2.8.4");
    check_ids(fake(), "fake");
    check_errors();
    check_limit();
    check_real();
#else
    ok(true, "fake NCCL # SKIP built without the NCCL header");
#endif
    return tap_done();
}
