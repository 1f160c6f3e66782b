/* SPDX-License-Identifier: Apache-2.0 */
/* test_blob.c - blob.c: a value's bytes, its limit, and that nobody changes it once it is sealed.
 */
#include "blob.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tap.h"

static bool put(struct blob *b, const char *text, uint64_t limit, struct err *err)
{
    return blob_write(b, text, strlen(text), limit, err) == 0;
}

static void check_limit(void)
{
    struct blob b = BLOB_INIT;
    struct err err = ERR_INIT;
    ok(put(&b, "12345", 10, &err) && put(&b, "67890", 10, &err) && b.size == 10, "up to the limit");
    ok(!put(&b, "x", 10, &err) && err.code == ERR_TOO_LARGE, "not one byte more");
    is_str(err.msg, "the value is larger than 10 bytes", "and why");
    is_str(err.hint, "the setting payload_limit says how large one may be", "and what to do");
    ok(b.size == 10 && put(&b, "", 10, &err), "nothing more still fits");
    blob_deinit(&b);
    ok(b.fd == -1 && b.size == 0, "nothing is left");
    ok(blob_write(&b, "abc", 3, 2, &err) < 0 && b.fd == -1, "too long at once: no file is made");
    blob_deinit(&b);
}

static void check_read(void)
{
    struct blob b = BLOB_INIT;
    struct err err = ERR_INIT;
    struct buf out = BUF_INIT;
    ok(blob_read(&b, 100, &out, &err) == 0 && out.len == 0, "an empty blob is empty");
    put(&b, "one ", 100, &err);
    put(&b, "two", 100, &err);
    buf_adds(&out, "> ");
    ok(blob_read(&b, 7, &out, &err) == 0, "it is read back");
    is_str(buf_cstr(&out), "> one two", "whole, behind what is there");
    ok(blob_read(&b, 6, &out, &err) < 0 && err.code == ERR_TOO_LARGE, "not past a limit");
    is_str(err.msg, "the body is larger than 6 bytes", "and why");
    put(&b, "!", 100, &err);
    buf_reset(&out);
    ok(blob_read(&b, 100, &out, &err) == 0 && out.len == 8, "reading does not disturb writing");
    buf_deinit(&out);
    blob_deinit(&b);
}

static void check_seal(void)
{
    struct blob b = BLOB_INIT;
    struct err err = ERR_INIT;
    char got[8] = "";
    put(&b, "value", 100, &err);
    int fd = blob_seal(&b, &err);
    ok(fd >= 0 && b.fd == -1, "the descriptor is the caller's");
    ok(b.size == 5, "the size is still known");
    blob_deinit(&b);
    ok(pread(fd, got, sizeof(got), 0) == 5 && memcmp(got, "value", 5) == 0, "it has the bytes");
    ok(fcntl(fd, F_GETFD) & FD_CLOEXEC, "and is close-on-exec");
    ok(pwrite(fd, "x", 1, 0) < 0 && errno == EPERM, "nobody can write");
    ok(ftruncate(fd, 1) < 0 && ftruncate(fd, 100) < 0, "nor change the size");
    ok(mmap(NULL, 5, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED,
       "nor map it writable");
    char *map = mmap(NULL, 5, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    ok(map != MAP_FAILED, "but map a copy of its own");
    if (map != MAP_FAILED)
        munmap(map, 5);
    ok(fcntl(fd, F_ADD_SEALS, 0) < 0, "and no seal can be added");
    close(fd);
}

static void check_empty(void)
{
    struct blob b = BLOB_INIT;
    struct err err = ERR_INIT;
    struct stat st;
    int fd = blob_seal(&b, &err);
    ok(fd >= 0 && fstat(fd, &st) == 0 && st.st_size == 0, "an empty value is a file as well");
    close(fd);
    blob_deinit(&b);
}

static void check_large(void)
{
    struct blob b = BLOB_INIT;
    struct err err = ERR_INIT;
    struct stat st;
    char *part = util_malloc(1 << 20);
    bool good = true;
    for (int i = 0; i < 48; i++) {
        memset(part, i, 1 << 20);
        good = good && blob_write(&b, part, 1 << 20, 48 << 20, &err) == 0;
    }
    int fd = blob_seal(&b, &err);
    ok(good && fd >= 0 && fstat(fd, &st) == 0 && st.st_size == 48 << 20, "48 MiB in pieces");
    good = pread(fd, part, 1, (47 << 20) - 1) == 1 && part[0] == 46 &&
           pread(fd, part, 1, 47 << 20) == 1 && part[0] == 47;
    ok(good, "each in its place");
    close(fd);
    free(part);
    blob_deinit(&b);
}

int main(void)
{
    check_limit();
    check_read();
    check_seal();
    check_empty();
    check_large();
    return tap_done();
}
