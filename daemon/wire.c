/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire.c - frames and file descriptors over one Unix stream socket, non-blocking.
 *
 * The kernel keeps descriptors with the first byte of the sendmsg that carried them, so a frame and
 * its descriptors are queued and sent as one message, and received descriptors are handed out in
 * order to the frames that announce them.
 */
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

struct wire_out {
    TAILQ_ENTRY(wire_out) link;
    int fds[FRAME_MAX_FDS];
    size_t nfds; /* 0 once sent: they go with the first byte */
    size_t len, off;
    uint8_t data[];
};

void wire_init(struct wire *w, int fd)
{
    *w = (struct wire){.fd = fd};
    TAILQ_INIT(&w->out);
}

static void wire_out_free(struct wire *w, struct wire_out *o)
{
    TAILQ_REMOVE(&w->out, o, link);
    w->out_bytes -= o->len;
    for (size_t i = 0; i < o->nfds; i++)
        close(o->fds[i]);
    free(o);
}

void wire_deinit(struct wire *w)
{
    if (w->fd >= 0)
        close(w->fd);
    w->fd = -1;
    for (size_t i = 0; i < w->fds_len; i++)
        close(w->fds[i]);
    w->fds_len = 0;
    struct wire_out *o;
    while ((o = TAILQ_FIRST(&w->out)) != NULL)
        wire_out_free(w, o);
    buf_deinit(&w->in);
    w->used = 0;
}

/* Takes the descriptors out of a control message; more than there is room for are closed. */
static void wire_take_fds(struct wire *w, struct msghdr *msg)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
            if (w->fds_len < WIRE_FDS)
                w->fds[w->fds_len++] = fd;
            else
                close(fd);
        }
    }
}

enum wire_status wire_fill(struct wire *w, size_t limit)
{
    buf_consume(&w->in, w->used);
    w->used = 0;
    if (!w->in.len)
        buf_reset(&w->in);
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(WIRE_FDS * sizeof(int))];
    } control;
    struct iovec iov = {buf_room(&w->in, limit), limit};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = &control,
                         .msg_controllen = sizeof(control)};
    ssize_t n;
    do {
        n = recvmsg(w->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? WIRE_EMPTY : WIRE_CLOSED;
    if (n == 0)
        return WIRE_CLOSED;
    wire_take_fds(w, &msg);
    w->in.len += (size_t)n;
    return WIRE_FRAME;
}

enum wire_status wire_next(struct wire *w, uint32_t max, struct frame *f, int fds[FRAME_MAX_FDS],
                           const char **why)
{
    size_t size;
    if (w->used == w->in.len)
        return WIRE_EMPTY;
    enum frame_status st = frame_get(w->in.data + w->used, w->in.len - w->used, max, f, &size, why);
    if (st == FRAME_BAD)
        return WIRE_BAD;
    if (st == FRAME_MORE)
        return WIRE_EMPTY;
    if (f->nfds > w->fds_len) {
        *why = "announced file descriptors did not come";
        return WIRE_BAD;
    }
    for (size_t i = 0; i < f->nfds; i++)
        fds[i] = w->fds[i];
    w->fds_len -= f->nfds;
    memmove(w->fds, w->fds + f->nfds, w->fds_len * sizeof(int));
    w->used += size;
    return WIRE_FRAME;
}

ssize_t wire_write(int fd, const void *data, size_t len, const int *fds, size_t nfds)
{
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(FRAME_MAX_FDS * sizeof(int))];
    } control;
    struct iovec iov = {(void *)data, len};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (nfds) {
        memset(&control, 0, sizeof(control));
        msg.msg_control = &control;
        msg.msg_controllen = CMSG_SPACE(nfds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(nfds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, nfds * sizeof(int));
    }
    ssize_t n;
    do {
        n = sendmsg(fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
    return n;
}

int wire_flush(struct wire *w, bool *pending)
{
    struct wire_out *o;
    *pending = false;
    while ((o = TAILQ_FIRST(&w->out)) != NULL) {
        ssize_t n = wire_write(w->fd, o->data + o->off, o->len - o->off, o->fds, o->nfds);
        if (n < 0)
            return -1;
        if (n == 0) {
            *pending = true;
            return 0;
        }
        while (o->nfds)
            close(o->fds[--o->nfds]);
        o->off += (size_t)n;
        if (o->off == o->len)
            wire_out_free(w, o);
    }
    return 0;
}

int wire_send(struct wire *w, const struct frame *f, const int *fds)
{
    if (w->fd < 0)
        return -1;
    struct wire_out *o = util_malloc(sizeof(*o) + FRAME_HEADER + f->length);
    o->off = 0;
    o->len = FRAME_HEADER + (size_t)f->length;
    o->nfds = 0;
    for (size_t i = 0; i < f->nfds; i++) {
        int copy = fcntl(fds[i], F_DUPFD_CLOEXEC, 0);
        if (copy < 0) {
            while (o->nfds)
                close(o->fds[--o->nfds]);
            free(o);
            return -1;
        }
        o->fds[o->nfds++] = copy;
    }
    frame_put_header(o->data, f);
    if (f->length)
        memcpy(o->data + FRAME_HEADER, f->payload, f->length);
    TAILQ_INSERT_TAIL(&w->out, o, link);
    w->out_bytes += o->len;
    bool pending;
    return wire_flush(w, &pending);
}
