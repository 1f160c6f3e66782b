/* SPDX-License-Identifier: Apache-2.0 */
/* test_util.c - util.c and err.c: bytes, text, numbers, files. */
#include "util.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tap.h"

static char folder[] = "/tmp/ddipd-test-util-XXXXXX";

static const char *in_folder(const char *name)
{
    static char paths[4][256];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof(paths[0]), "%s/%s", folder, name);
    return path;
}

/* --- bytes --- */

static void check_buf(void)
{
    struct buf b = BUF_INIT;
    buf_add(&b, NULL, 0);
    ok(b.len == 0, "nothing added to nothing is nothing");
    is_str(buf_cstr(&b), "", "an empty buffer is an empty string");
    buf_adds(&b, "abc");
    buf_addc(&b, '-');
    buf_addf(&b, "%d%s", 42, "");
    is_str(buf_cstr(&b), "abc-42", "strings, characters and formats are appended");
    buf_consume(&b, 4);
    is_str(buf_cstr(&b), "42", "the start is dropped");
    buf_consume(&b, 2);
    ok(b.len == 0, "all of it is dropped");
    buf_adds(&b, "x");
    char *taken = buf_take(&b);
    is_str(taken, "x", "the text is taken out");
    ok(!b.data && !b.len && !b.cap, "and the buffer is empty after");
    free(taken);
    buf_deinit(&b);
}

static void check_buf_growth(void)
{
    struct buf b = BUF_INIT;
    bool good = true;
    for (unsigned i = 0; i < 300000; i++)
        buf_addc(&b, (char)(i % 251));
    for (unsigned i = 0; i < 300000; i++)
        good = good && b.data[i] == i % 251;
    ok(good && b.len == 300000, "300000 bytes one by one are all there");
    buf_consume(&b, 299990);
    ok(b.len == 10 && b.data[0] == 299990 % 251, "what stays moves to the front");
    buf_reset(&b);
    ok(b.len == 0 && b.cap <= 64 * 1024, "reset gives a large buffer back");
    buf_adds(&b, "small");
    size_t cap = b.cap;
    buf_reset(&b);
    ok(b.cap == cap, "and keeps a small one");
    uint8_t *room = buf_room(&b, 100000);
    ok(room == b.data && b.cap >= 100000 && b.len == 0, "room is not length");
    buf_deinit(&b);
}

/* --- numbers --- */

static bool parses(const char *text, uint64_t min, uint64_t max, uint64_t want)
{
    uint64_t got = 77;
    return util_parse_u64(text, min, max, &got) == 0 && got == want;
}

static void check_parse(void)
{
    static const char *const bad[] = {"",     " 1",  "1 ",  "+1",  "-1",
                                      "0x10", "1e3", "1.0", "one", "1;"};
    uint64_t value = 77;
    ok(parses("0", 0, 10, 0) && parses("10", 0, 10, 10) && parses("007", 0, 10, 7),
       "whole numbers");
    ok(parses("18446744073709551615", 0, UINT64_MAX, UINT64_MAX), "the largest");
    ok(util_parse_u64("18446744073709551616", 0, UINT64_MAX, &value) < 0, "one more overflows");
    ok(util_parse_u64("11", 0, 10, &value) < 0 && util_parse_u64("4", 5, 10, &value) < 0,
       "out of range");
    for (size_t i = 0; i < UTIL_COUNT(bad); i++)
        ok(util_parse_u64(bad[i], 0, UINT64_MAX, &value) < 0, "\"%.2s\" is no number", bad[i]);
    ok(value == 77, "a refused text leaves the number alone");
}

static void check_secrets(void)
{
    struct err err = ERR_INIT;
    char a[65] = "", b[65] = "", tiny[3];
    ok(util_random_hex(a, 32, &err) == 0 && util_random_hex(b, 32, &err) == 0, "random hex");
    ok(strlen(a) == 64 && strspn(a, "0123456789abcdef") == 64, "64 lower-case digits");
    ok(strcmp(a, b) != 0, "never the same");
    ok(util_random_hex(tiny, 1, &err) == 0 && strlen(tiny) == 2, "one byte is two digits");
    ok(util_random_hex(a, 65, &err) < 0 && err.code == ERR_IO, "too long a secret is refused");
    ok(util_equal_secret(b, b) && !util_equal_secret(b, a), "equal and different");
    ok(!util_equal_secret("abc", "abcd") && !util_equal_secret("abcd", "abc"), "a prefix differs");
    ok(!util_equal_secret("abcabc", "abc"), "a repetition differs");
    ok(!util_equal_secret("", "") && !util_equal_secret("", "a") && !util_equal_secret("a", ""),
       "nothing is no secret");
    uint64_t before = util_monotonic_ns();
    ok(util_now() > 1.6e9 && util_monotonic_ns() >= before, "clocks");
}

/* --- UTF-8 --- */

/* Straight from the definition: decode, then look at the value. Bytes used, or 0. */
static int reference_char(const unsigned char *s, size_t len)
{
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    int n = s[0] < 0x80 ? 1 : s[0] >> 5 == 6 ? 2 : s[0] >> 4 == 14 ? 3 : s[0] >> 3 == 30 ? 4 : 0;
    uint32_t value = n == 1 ? s[0] : n ? s[0] & (0x7fu >> n) : 0;
    if (!n || (size_t)n > len)
        return 0;
    for (int i = 1; i < n; i++) {
        if (s[i] >> 6 != 2)
            return 0;
        value = value << 6 | (s[i] & 0x3f);
    }
    bool good = value >= least[n] && value <= 0x10ffff && (value < 0xd800 || value > 0xdfff);
    return good ? n : 0;
}

static size_t reference_valid(const unsigned char *s, size_t len)
{
    size_t i = 0;
    for (int n; i < len && (n = reference_char(s + i, len - i)) > 0;)
        i += (size_t)n;
    return i;
}

/* All texts of three bytes whose first is 0xc0 or more, and all of one and two bytes. */
static void check_utf8_exhaustively(void)
{
    uint32_t wrong = 0;
    for (uint32_t v = 0; v < 1u << 24; v++) {
        unsigned char s[3] = {(unsigned char)(v >> 16), (unsigned char)(v >> 8), (unsigned char)v};
        if (s[0] < 0xc0)
            v |= 0x3fffff; /* on to the next quarter */
        else
            wrong += util_utf8_valid((char *)s, 3) != reference_valid(s, 3);
    }
    ok(wrong == 0, "every text of three bytes from 0xc0 on is judged as by the definition");
    for (uint32_t v = wrong = 0; v < 1u << 16; v++) {
        unsigned char s[2] = {(unsigned char)(v >> 8), (unsigned char)v};
        wrong += util_utf8_valid((char *)s, 2) != reference_valid(s, 2);
        wrong += util_utf8_valid((char *)s, 1) != reference_valid(s, 1);
    }
    ok(wrong == 0, "and every text of one and two bytes");
    static const unsigned char edges[] = {0x00, 0x7f, 0x80, 0xbf, 0xc0, 0xff};
    for (uint32_t v = wrong = 0; v < 36u << 12; v++) { /* 0xf0 to 0xff, any byte, two edges */
        unsigned char s[4] = {(unsigned char)(0xf0 | (v & 15)), (unsigned char)(v >> 4),
                              edges[(v >> 12) % 6], edges[(v >> 12) / 6]};
        wrong += util_utf8_valid((char *)s, 4) != reference_valid(s, 4);
    }
    ok(wrong == 0, "and those of four bytes at the edges");
}

static size_t encode(uint32_t c, char *s)
{
    size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = n; i-- > 1; c >>= 6)
        s[i] = (char)(0x80 | (c & 0x3f));
    s[0] = (char)(lead[n] | c);
    return n;
}

/* Every character is valid whole, and its start is recognised as a start, after any text. */
static void check_utf8_characters(void)
{
    uint32_t wrong = 0;
    for (uint32_t c = 0; c <= 0x10ffff; c += c == 0xd7ff ? 0x801 : 1) {
        char s[8] = "a";
        size_t n = encode(c, s + 1);
        wrong += util_utf8_valid(s, n + 1) != n + 1 || util_utf8_partial(s, n + 1) != 0;
        for (size_t cut = 1; cut < n; cut++)
            wrong += util_utf8_partial(s, cut + 1) != cut || util_utf8_partial(s + 1, cut) != cut;
    }
    ok(wrong == 0, "all characters are valid, and their starts are starts");
    ok(util_utf8_partial("", 0) == 0 && util_utf8_partial("abc", 3) == 0, "nothing is open");
    ok(util_utf8_partial("\x80\x80\x80\x80", 4) == 0, "continuations without a start");
    ok(util_utf8_partial("\xe2\x28", 2) == 0 && util_utf8_partial("\xff", 1) == 0, "invalid bytes");
    ok(util_utf8_partial("\xed\xa0", 2) == 0, "half of a surrogate is not waited for");
    ok(util_utf8_valid("ok\xc3", 3) == 2 && util_utf8_valid("a\0b", 3) == 3,
       "cut; and NUL is fine");
}

static void check_slug(void)
{
    char long_name[66];
    memset(long_name, 'a', 65);
    long_name[65] = '\0';
    ok(!util_is_slug(long_name) && util_is_slug(long_name + 1), "64 characters, not 65");
    ok(util_is_slug("a") && util_is_slug("A-1_b.c") && util_is_slug("0"), "good names");
    static const char *const bad[] = {"", ".", "..", "-a", "_a", "a/b", "a b", "\xc3\xa4", "a%"};
    for (size_t i = 0; i < UTIL_COUNT(bad); i++)
        ok(!util_is_slug(bad[i]), "\"%s\" is no name", bad[i]);
    ok(!util_is_slug("a\n"), "nor is one with a line break");
}

/* --- files --- */

static mode_t mode_of(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 ? st.st_mode & 07777 : 0;
}

static void check_folders(void)
{
    struct err err = ERR_INIT;
    ok(util_mkdirs(in_folder("one/two/three"), 0755, &err) == 0, "folders are made");
    ok(mode_of(in_folder("one")) == 0700 && mode_of(in_folder("one/two/three")) == 0755,
       "the parents for us alone, the last as asked");
    ok(util_mkdirs(in_folder("one/two/three"), 0755, &err) == 0, "again: they are there");
    ok(util_write_file(in_folder("one/file"), 0600, "x", 1, &err) == 0, "a file among them");
    ok(util_mkdirs(in_folder("one/file/four"), 0700, &err) < 0 && err.code == ERR_IO,
       "not below a file");
    ok(strstr(err.msg, "/one/file") && strstr(err.msg, strerror(ENOTDIR)), "which is named");
    ok(symlink("/tmp", in_folder("one/two/out")) == 0, "a link that leads out");
    util_remove_tree(in_folder("one"));
    ok(access(in_folder("one"), F_OK) < 0 && access("/tmp", F_OK) == 0,
       "the tree is removed, the link's target is not");
    util_remove_tree(in_folder("never there"));
}

static bool holds(const char *path, const char *want)
{
    struct err err = ERR_INIT;
    struct buf b = BUF_INIT;
    bool good = util_read_file(path, 1 << 20, &b, &err) == 0 && b.len == strlen(want) &&
                memcmp(buf_cstr(&b), want, b.len) == 0;
    buf_deinit(&b);
    return good;
}

static void check_files(void)
{
    struct err err = ERR_INIT;
    const char *path = in_folder("file");
    ok(util_write_file(path, 0600, "one", 3, &err) == 0 && holds(path, "one"), "written");
    ok(mode_of(path) == 0600, "with its mode");
    ok(util_write_file(path, 0640, "", 0, &err) == 0 && holds(path, ""), "replaced by nothing");
    ok(util_write_file(path, 0600, "two", 3, &err) == 0 && holds(path, "two"), "and again");
    ok(access(in_folder("file.new"), F_OK) < 0, "no trace of the way it is done");
    ok(util_mkdirs(in_folder("taken/x"), 0700, &err) == 0, "a folder");
    ok(util_write_file(in_folder("taken"), 0600, "x", 1, &err) < 0, "is not replaced by a file");
    ok(strstr(err.msg, "/taken") && access(in_folder("taken.new"), F_OK) < 0,
       "and nothing is left");
    ok(util_write_file("/nonexistent/x", 0600, "x", 1, &err) < 0 && err.code == ERR_IO, "nowhere");
}

static void check_read_limits(void)
{
    struct err err = ERR_INIT;
    struct buf b = BUF_INIT, big = BUF_INIT;
    for (int i = 0; i < 10000; i++)
        buf_addc(&big, (char)('a' + i % 26));
    ok(util_write_file(in_folder("big"), 0600, big.data, big.len, &err) == 0, "10000 bytes");
    ok(util_read_file(in_folder("big"), 10000, &b, &err) == 0 && b.len == 10000, "are read whole");
    ok(memcmp(b.data, big.data, 10000) == 0, "as they were");
    buf_reset(&b);
    ok(util_read_file(in_folder("big"), 9999, &b, &err) < 0 && err.code == ERR_TOO_LARGE,
       "not with a limit of one byte less");
    ok(util_read_file(in_folder("missing"), 10, &b, &err) < 0 && err.code == ERR_IO, "missing");
    ok(strstr(err.msg, "/missing: No such file"), "and named");
    ok(util_read_file(folder, 10, &b, &err) < 0 && err.code == ERR_IO, "a folder is no file");
    buf_deinit(&b);
    buf_deinit(&big);
}

/* --- errors --- */

static void check_err(void)
{
    struct err err = ERR_INIT;
    char long_text[3000];
    memset(long_text, 'x', sizeof(long_text) - 1);
    long_text[sizeof(long_text) - 1] = '\0';
    ok(err.code == ERR_NONE && err.rank == -1 && !err.msg[0], "it starts empty");
    err.rank = 3;
    ok(err_set(&err, ERR_INVALID, "no %d", 7) == -1 && err_hint(&err, "try %d", 8) == -1, "set");
    is_str(err.msg, "no 7", "the message");
    is_str(err.hint, "try 8", "the hint");
    ok(err.code == ERR_INVALID && err.rank == -1, "the code; and no rank from before");
    err_wrap(&err, "file:%d", 3);
    is_str(err.msg, "file:3: no 7", "context goes in front");
    err_errno(&err, ERR_IO, ENOENT, "opening %s", "x");
    is_str(err.msg, "opening x: No such file or directory", "with the system's words");
    is_str(err.hint, "", "a new message has no old hint");
    err_set(&err, ERR_INVALID, "%s", long_text);
    ok(strlen(err.msg) == sizeof(err.msg) - 1, "a long message is cut");
    err_wrap(&err, "%s", long_text);
    ok(strlen(err.msg) == sizeof(err.msg) - 1, "also with long context");
    err_hint(&err, "%s", long_text);
    ok(strlen(err.hint) == sizeof(err.hint) - 1, "and a long hint");
    ok(err_set(NULL, ERR_IO, "x") == -1 && err_errno(NULL, ERR_IO, 1, "x") == -1 &&
           err_hint(NULL, "x") == -1 && err_wrap(NULL, "x") == -1,
       "nobody need listen");
}

int main(void)
{
    umask(022);
    if (!mkdtemp(folder))
        return 1;
    check_buf();
    check_buf_growth();
    check_parse();
    check_secrets();
    check_utf8_exhaustively();
    check_utf8_characters();
    check_slug();
    check_folders();
    check_files();
    check_read_limits();
    check_err();
    util_remove_tree(folder);
    ok(access(folder, F_OK) < 0, "the test's own folder is gone");
    return tap_done();
}
