/* SPDX-License-Identifier: Apache-2.0 */
/* util.c - memory that never fails, growable bytes, and small things over libc. */
#include "util.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define UTIL_BUF_KEEP (64 * 1024) /* buf_reset gives back anything larger */

static void *util_checked(void *ptr)
{
    if (!ptr) {
        static const char msg[] = "ddipd: out of memory\n";
        ssize_t ignored = write(STDERR_FILENO, msg, sizeof(msg) - 1);
        (void)ignored;
        abort();
    }
    return ptr;
}

void *util_malloc(size_t size)
{
    return util_checked(malloc(size ? size : 1));
}

void *util_calloc(size_t count, size_t size)
{
    return util_checked(calloc(count ? count : 1, size ? size : 1));
}

void *util_realloc(void *ptr, size_t size)
{
    return util_checked(realloc(ptr, size ? size : 1));
}

char *util_strdup(const char *s)
{
    return util_checked(strdup(s));
}

char *util_strndup(const char *s, size_t n)
{
    return util_checked(strndup(s, n));
}

char *util_printf(const char *fmt, ...)
{
    char *s = NULL;
    va_list ap;
    va_start(ap, fmt);
    if (vasprintf(&s, fmt, ap) < 0)
        s = NULL;
    va_end(ap);
    return util_checked(s);
}

void buf_deinit(struct buf *b)
{
    free(b->data);
    *b = (struct buf)BUF_INIT;
}

void buf_reset(struct buf *b)
{
    b->len = 0;
    if (b->cap > UTIL_BUF_KEEP)
        buf_deinit(b);
}

uint8_t *buf_room(struct buf *b, size_t more)
{
    if (!b->data || b->cap - b->len < more) {
        size_t cap = b->cap ? b->cap : 256;
        while (cap - b->len < more)
            cap *= 2;
        b->data = util_realloc(b->data, cap);
        b->cap = cap;
    }
    return b->data + b->len;
}

void buf_add(struct buf *b, const void *data, size_t len)
{
    if (len == 0)
        return;
    memcpy(buf_room(b, len), data, len);
    b->len += len;
}

void buf_adds(struct buf *b, const char *s)
{
    buf_add(b, s, strlen(s));
}

void buf_addc(struct buf *b, char c)
{
    buf_add(b, &c, 1);
}

void buf_addf(struct buf *b, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n > 0) {
        vsnprintf((char *)buf_room(b, (size_t)n + 1), (size_t)n + 1, fmt, again);
        b->len += (size_t)n;
    }
    va_end(again);
}

void buf_consume(struct buf *b, size_t n)
{
    b->len -= n;
    if (b->len)
        memmove(b->data, b->data + n, b->len);
}

const char *buf_cstr(struct buf *b)
{
    *buf_room(b, 1) = '\0';
    return (const char *)b->data;
}

char *buf_take(struct buf *b)
{
    buf_cstr(b);
    char *s = (char *)b->data;
    *b = (struct buf)BUF_INIT;
    return s;
}

double util_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

uint64_t util_monotonic_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

int util_random(void *out, size_t len, struct err *err)
{
    if (getrandom(out, len, 0) != (ssize_t)len)
        return err_errno(err, ERR_IO, errno, "getrandom");
    return 0;
}

int util_random_hex(char *out, size_t bytes, struct err *err)
{
    uint8_t raw[64];
    if (bytes > sizeof(raw))
        return err_set(err, ERR_IO, "a secret of %zu bytes is too long", bytes);
    if (util_random(raw, bytes, err) < 0)
        return -1;
    for (size_t i = 0; i < bytes; i++)
        snprintf(out + 2 * i, 3, "%02x", raw[i]);
    return 0;
}

bool util_equal_secret(const char *a, const char *b)
{
    size_t la = strlen(a), lb = strlen(b);
    unsigned char diff = la != lb;
    for (size_t i = 0; i < la && lb; i++)
        diff |= (unsigned char)(a[i] ^ b[i % lb]);
    return la && diff == 0;
}

int util_parse_u64(const char *s, uint64_t min, uint64_t max, uint64_t *out)
{
    if (*s < '0' || *s > '9')
        return -1;
    char *end;
    errno = 0;
    unsigned long long v = strtoull(s, &end, 10);
    if (errno || *end || v < min || v > max)
        return -1;
    *out = v;
    return 0;
}

int util_mkdirs(const char *path, mode_t mode, struct err *err)
{
    char *copy = util_strdup(path);
    int rc = 0;
    for (char *p = copy + 1; *p && rc == 0; p++) {
        if (*p != '/')
            continue;
        *p = '\0';
        if (mkdir(copy, 0700) < 0 && errno != EEXIST)
            rc = err_errno(err, ERR_IO, errno, "cannot make the folder %s", copy);
        *p = '/';
    }
    if (rc == 0 && mkdir(copy, mode) < 0 && errno != EEXIST)
        rc = err_errno(err, ERR_IO, errno, "cannot make the folder %s", path);
    free(copy);
    return rc;
}

static int util_write_all(int fd, const char *data, size_t len)
{
    while (len) {
        ssize_t n = write(fd, data, len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        data += n;
        len -= (size_t)n;
    }
    return 0;
}

int util_write_file(const char *path, mode_t mode, const void *data, size_t len, struct err *err)
{
    char *tmp = util_printf("%s.new", path);
    int rc = 0;
    unlink(tmp);
    int fd = open(tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (fd < 0 || util_write_all(fd, data, len) < 0 || rename(tmp, path) < 0)
        rc = err_errno(err, ERR_IO, errno, "cannot write %s", path);
    if (fd >= 0)
        close(fd);
    if (rc < 0)
        unlink(tmp);
    free(tmp);
    return rc;
}

int util_read_file(const char *path, size_t max, struct buf *b, struct err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_errno(err, ERR_IO, errno, "cannot read %s", path);
    int rc = 0;
    for (;;) {
        ssize_t n = read(fd, buf_room(b, 4096), 4096);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            rc = err_errno(err, ERR_IO, errno, "cannot read %s", path);
        if (n <= 0)
            break;
        b->len += (size_t)n;
        if (b->len > max) {
            rc = err_set(err, ERR_TOO_LARGE, "%s is larger than %zu bytes", path, max);
            break;
        }
    }
    close(fd);
    return rc;
}

void util_remove_tree(const char *path)
{
    DIR *dir = opendir(path);
    if (dir) {
        struct dirent *e;
        while ((e = readdir(dir)) != NULL) {
            if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
                continue;
            if (unlinkat(dirfd(dir), e->d_name, 0) == 0)
                continue;
            char *sub = util_printf("%s/%s", path, e->d_name);
            util_remove_tree(sub);
            free(sub);
        }
        closedir(dir);
    }
    rmdir(path);
}

/* Length of the UTF-8 character at s: 0 when invalid, -1 when valid so far but cut by len. */
static int util_utf8_char(const unsigned char *s, size_t len)
{
    unsigned char c = s[0];
    int n = c < 0x80 ? 1 : c < 0xc2 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 0;
    for (int i = 1; i < n; i++) {
        if ((size_t)i >= len)
            return -1;
        unsigned char lo = 0x80, hi = 0xbf;
        if (i == 1) { /* no overlong forms, no surrogates, nothing past U+10FFFF */
            lo = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
            hi = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
        }
        if (s[i] < lo || s[i] > hi)
            return 0;
    }
    return n;
}

size_t util_utf8_valid(const char *s, size_t len)
{
    size_t i = 0;
    while (i < len) {
        int n = util_utf8_char((const unsigned char *)s + i, len - i);
        if (n <= 0)
            break;
        i += (size_t)n;
    }
    return i;
}

size_t util_utf8_partial(const char *s, size_t len)
{
    for (size_t back = 1; back <= 3 && back <= len; back++) {
        unsigned char c = (unsigned char)s[len - back];
        if ((c & 0xc0) == 0x80)
            continue;
        return util_utf8_char((const unsigned char *)s + len - back, back) == -1 ? back : 0;
    }
    return 0;
}

bool util_is_slug(const char *s)
{
    size_t n = strlen(s);
    if (n == 0 || n > 64 || *s == '.' || *s == '-' || *s == '_')
        return false;
    return strspn(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-") == n;
}
