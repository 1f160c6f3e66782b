/* SPDX-License-Identifier: Apache-2.0 */
/* test_wire.c - wire.c over a socket pair: frames, the descriptors that ride with them, peers that
 * are slow, wrong or gone. */
#include "wire.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tap.h"

struct pair {
    struct wire a, b;
};

static void pair_init(struct pair *p, int send_buffer)
{
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
        abort();
    if (send_buffer)
        setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof(send_buffer));
    wire_init(&p->a, fds[0]);
    wire_init(&p->b, fds[1]);
}

static void pair_deinit(struct pair *p)
{
    wire_deinit(&p->a);
    wire_deinit(&p->b);
}

static int count_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    int n = 0;
    while (readdir(dir))
        n++;
    closedir(dir);
    return n - 3; /* ".", ".." and dir itself */
}

/* A memory file that says who it is. */
static int numbered_fd(uint32_t number)
{
    int fd = memfd_create("test", MFD_CLOEXEC);
    if (pwrite(fd, &number, sizeof(number), 0) != sizeof(number))
        abort();
    return fd;
}

static bool is_numbered(int fd, uint32_t number)
{
    uint32_t got = ~number;
    bool good = pread(fd, &got, sizeof(got), 0) == sizeof(got) && got == number;
    return good && (fcntl(fd, F_GETFD) & FD_CLOEXEC);
}

static uint8_t *pattern(uint32_t number, uint32_t len)
{
    uint8_t *data = util_malloc(len);
    for (uint32_t i = 0; i < len; i++)
        data[i] = (uint8_t)(number * 7 + i * 13 + (i >> 8));
    return data;
}

/* Sends frame `number` with number % (nfds_max + 1) numbered descriptors. */
static int send_numbered(struct wire *w, uint32_t number, uint32_t len, int nfds_max)
{
    int fds[FRAME_MAX_FDS];
    uint8_t *payload = pattern(number, len);
    struct frame f = {.type = FRAME_EVENT, .number = number, .length = len, .payload = payload};
    f.nfds = (uint8_t)(number % (uint32_t)(nfds_max + 1));
    for (uint32_t i = 0; i < f.nfds; i++)
        fds[i] = numbered_fd(number * 10 + i);
    int rc = wire_send(w, &f, fds);
    for (int i = 0; i < f.nfds; i++)
        close(fds[i]);
    free(payload);
    return rc;
}

/* Is the received frame what send_numbered sent? Closes its descriptors. */
static bool is_sent(const struct frame *f, const int *fds, uint32_t number, int nfds_max)
{
    uint8_t *want = pattern(number, f->length);
    bool good = f->number == number && f->nfds == number % (uint32_t)(nfds_max + 1) &&
                memcmp(want, f->payload, f->length) == 0;
    free(want);
    for (uint32_t i = 0; i < f->nfds; i++) {
        good = good && is_numbered(fds[i], number * 10 + i);
        close(fds[i]);
    }
    return good;
}

/* --- together --- */

static void check_order(void)
{
    struct pair p;
    int before = count_fds(), fds[FRAME_MAX_FDS];
    pair_init(&p, 0);
    uint32_t sent = 0, got = 0, fills = 0;
    struct frame f;
    const char *why;
    while (sent < 60 && send_numbered(&p.a, sent, sent * 11, FRAME_MAX_FDS) == 0)
        sent++;
    ok(sent == 60 && TAILQ_EMPTY(&p.a.out) && p.a.out_bytes == 0, "60 frames are sent at once");
    bool good = true;
    while (good && got < sent && wire_fill(&p.b, 64 * 1024) == WIRE_FRAME && ++fills) {
        while (wire_next(&p.b, FRAME_MAX, &f, fds, &why) == WIRE_FRAME)
            good = is_sent(&f, fds, got++, FRAME_MAX_FDS) && good;
    }
    ok(good && got == 60, "and come in order, each with its own descriptors, close-on-exec");
    ok(wire_fill(&p.b, 4096) == WIRE_EMPTY, "then there is nothing");
    pair_deinit(&p);
    ok(count_fds() == before, "no descriptor is left open");
}

static void check_byte_by_byte(void)
{
    struct pair p;
    struct frame f;
    const char *why;
    int fds[FRAME_MAX_FDS];
    uint32_t got = 0, reads = 0;
    bool good = true;
    pair_init(&p, 0);
    for (uint32_t i = 0; i < 8; i++)
        send_numbered(&p.a, i, 40, FRAME_MAX_FDS);
    while (good && wire_fill(&p.b, 1) == WIRE_FRAME) {
        reads++;
        while (wire_next(&p.b, FRAME_MAX, &f, fds, &why) == WIRE_FRAME)
            good = is_sent(&f, fds, got++, FRAME_MAX_FDS) && good;
    }
    ok(good && got == 8 && reads == 8 * 72, "eight frames read byte by byte");
    pair_deinit(&p);
}

/* Descriptors of several frames wait until their frames are looked at. */
static void check_read_ahead(void)
{
    struct pair p;
    struct frame f;
    const char *why;
    int fds[FRAME_MAX_FDS];
    uint32_t got = 0;
    bool good = true;
    pair_init(&p, 0);
    for (uint32_t i = 0; i < 8; i++)
        send_numbered(&p.a, i, 40, FRAME_MAX_FDS);
    while (wire_fill(&p.b, 64) == WIRE_FRAME)
        ;
    ok(p.b.fds_len == 12 && p.b.in.len == 8 * 72, "eight frames are read before one is taken");
    while (wire_next(&p.b, FRAME_MAX, &f, fds, &why) == WIRE_FRAME)
        good = is_sent(&f, fds, got++, FRAME_MAX_FDS) && good;
    ok(good && got == 8 && p.b.fds_len == 0, "each gets its own descriptors");
    pair_deinit(&p);
}

/* --- a slow reader --- */

/* Reads what is there, in pieces of `limit`; counts good frames, and stops at a bad one. */
static uint32_t drain(struct pair *p, size_t limit, uint32_t got)
{
    struct frame f;
    const char *why;
    int fds[FRAME_MAX_FDS];
    while (wire_fill(&p->b, limit) == WIRE_FRAME) {
        while (wire_next(&p->b, FRAME_MAX, &f, fds, &why) == WIRE_FRAME) {
            if (!is_sent(&f, fds, got, 1))
                return UINT32_MAX;
            got++;
        }
    }
    return got;
}

static void check_partial_writes(void)
{
    struct pair p;
    int before = count_fds();
    bool pending = true;
    uint32_t got = 0, turns = 0;
    pair_init(&p, 1); /* the kernel's least */
    for (uint32_t i = 0; i < 12; i++)
        send_numbered(&p.a, i, 100000 + i, 1);
    ok(!TAILQ_EMPTY(&p.a.out) && p.a.out_bytes > 1000000, "1.2 MB wait for a slow reader");
    ok(wire_flush(&p.a, &pending) == 0 && pending, "the socket is full");
    while (pending && got < 12 && ++turns) {
        got = drain(&p, turns % 3 ? 700 : 50000, got);
        if (wire_flush(&p.a, &pending) < 0)
            break;
    }
    got = drain(&p, 50000, got);
    ok(got == 12, "all arrive whole, in order, with their descriptors");
    ok(turns > 50, "in many pieces");
    ok(p.a.out_bytes == 0 && !pending, "and nothing is queued any more");
    pair_deinit(&p);
    ok(count_fds() == before, "no descriptor is left open");
}

static void check_dropped_queue(void)
{
    struct pair p;
    int before = count_fds();
    pair_init(&p, 1);
    for (uint32_t i = 0; i < 40; i++)
        send_numbered(&p.a, i, 5000, FRAME_MAX_FDS);
    ok(count_fds() > before + 20, "queued frames hold their descriptors");
    wire_fill(&p.b, 4096);
    pair_deinit(&p);
    ok(count_fds() == before, "and give them up with the wire");
    wire_deinit(&p.a);
    ok(p.a.fd == -1 && send_numbered(&p.a, 0, 1, 0) < 0, "a closed wire sends nothing");
}

/* --- wrong peers --- */

/* One message of `len` bytes with n descriptors, more than wire_write would send. */
static bool send_raw(int socket, const void *data, size_t len, size_t n)
{
    char control[CMSG_SPACE(64 * sizeof(int))] __attribute__((aligned(8))) = {0};
    struct iovec iov = {(void *)data, len};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control};
    struct cmsghdr *c = (struct cmsghdr *)control;
    msg.msg_controllen = CMSG_SPACE(n * sizeof(int));
    *c = (struct cmsghdr){
        .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(n * sizeof(int))};
    int fd = numbered_fd(7);
    for (size_t i = 0; i < n; i++)
        memcpy(CMSG_DATA(c) + i * sizeof(int), &fd, sizeof(fd));
    bool good = sendmsg(socket, &msg, MSG_NOSIGNAL) == (ssize_t)len;
    close(fd);
    return good;
}

static void check_too_many_fds(void)
{
    struct pair p;
    int before = count_fds();
    pair_init(&p, 0);
    ok(send_raw(p.a.fd, "x", 1, 40) && wire_fill(&p.b, 100) == WIRE_FRAME, "40 in one message");
    ok(p.b.fds_len == WIRE_FDS && count_fds() == before + 2 + WIRE_FDS, "16 are kept, 24 closed");
    ok(send_raw(p.a.fd, "x", 1, 10) && wire_fill(&p.b, 100) == WIRE_FRAME, "10 more");
    ok(p.b.fds_len == WIRE_FDS && count_fds() == before + 2 + WIRE_FDS, "are closed");
    pair_deinit(&p);
    ok(count_fds() == before, "and the 16 with the wire");
}

static void check_missing_fds(void)
{
    struct pair p;
    struct frame f = {.type = FRAME_REPLY, .nfds = 2};
    uint8_t header[FRAME_HEADER];
    const char *why = NULL;
    int fds[FRAME_MAX_FDS];
    int before = count_fds();
    pair_init(&p, 0);
    frame_put_header(header, &f);
    ok(send_raw(p.a.fd, header, sizeof(header), 1) && wire_fill(&p.b, 100) == WIRE_FRAME,
       "two descriptors are announced, one comes");
    ok(wire_next(&p.b, FRAME_MAX, &f, fds, &why) == WIRE_BAD, "that is an error");
    is_str(why, "announced file descriptors did not come", "and why");
    pair_deinit(&p);
    ok(count_fds() == before, "the one that came is closed");
}

static void check_nonsense(void)
{
    struct pair p;
    struct frame f;
    const char *why = NULL;
    int fds[FRAME_MAX_FDS];
    pair_init(&p, 0);
    ok(write(p.a.fd, "GET / HTTP/1.1\r\n", 16) == 16 && wire_fill(&p.b, 100) == WIRE_FRAME, "HTTP");
    ok(wire_next(&p.b, FRAME_MAX, &f, fds, &why) == WIRE_BAD, "is no frame");
    is_str(why, "unknown protocol version", "and why");
    pair_deinit(&p);
    pair_init(&p, 0);
    send_numbered(&p.a, 1, 101, 0);
    wire_fill(&p.b, 4096);
    ok(wire_next(&p.b, 100, &f, fds, &why) == WIRE_BAD, "a frame over the reader's limit");
    is_str(why, "payload longer than the limit", "and why");
    pair_deinit(&p);
}

static void check_peer_gone(void)
{
    struct pair p;
    struct frame f;
    const char *why;
    bool pending;
    int fds[FRAME_MAX_FDS];
    pair_init(&p, 0);
    send_numbered(&p.a, 1, 10, 1);
    wire_deinit(&p.a);
    ok(wire_fill(&p.b, 4096) == WIRE_FRAME &&
           wire_next(&p.b, FRAME_MAX, &f, fds, &why) == WIRE_FRAME,
       "the last words of a peer are read");
    ok(is_sent(&f, fds, 1, 1), "with their descriptor");
    ok(wire_fill(&p.b, 4096) == WIRE_CLOSED, "then it is gone");
    ok(send_numbered(&p.b, 1, 10, 1) < 0 && wire_flush(&p.b, &pending) < 0,
       "sending says so, without a signal");
    pair_deinit(&p);
}

static void check_bad_fd(void)
{
    struct pair p;
    struct frame f = {.type = FRAME_REPLY, .nfds = 2};
    int fds[2] = {numbered_fd(1), -1};
    pair_init(&p, 0);
    int before = count_fds();
    ok(wire_send(&p.a, &f, fds) < 0, "a descriptor that is none cannot be sent");
    ok(TAILQ_EMPTY(&p.a.out) && p.a.out_bytes == 0 && count_fds() == before, "nothing is queued");
    ok(fcntl(fds[0], F_GETFD) >= 0, "the good one stays the caller's");
    close(fds[0]);
    ok(wire_fill(&p.b, 100) == WIRE_EMPTY, "and nothing has been sent");
    pair_deinit(&p);
}

int main(void)
{
    check_order();
    check_byte_by_byte();
    check_read_ahead();
    check_partial_writes();
    check_dropped_queue();
    check_too_many_fds();
    check_missing_fds();
    check_nonsense();
    check_peer_gone();
    check_bad_fd();
    return tap_done();
}
