/* SPDX-License-Identifier: Apache-2.0 */
/* pipe.c - one of a rank's fds 1 and 2, read so that no byte is lost or told twice. */
#include "pipe.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

int pipe_tools_open(struct pipe_tools *t, struct err *err)
{
    *t = (struct pipe_tools){{-1, -1}, -1};
    if (pipe2(t->scratch, O_CLOEXEC | O_NONBLOCK) < 0)
        return err_errno(err, ERR_IO, errno, "pipe");
    t->null_fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (t->null_fd < 0) {
        err_errno(err, ERR_IO, errno, "/dev/null");
        pipe_tools_close(t);
        return -1;
    }
    return 0;
}

void pipe_tools_close(struct pipe_tools *t)
{
    int fds[] = {t->scratch[0], t->scratch[1], t->null_fd};
    for (size_t i = 0; i < UTIL_COUNT(fds); i++) {
        if (fds[i] >= 0)
            close(fds[i]);
    }
}

uint64_t pipe_at(const struct pipe *p)
{
    return p->got - p->held.len;
}

void pipe_resume(struct pipe *p, uint64_t at, const struct frame_pipes *shared, int num)
{
    const struct frame_carry *c = &shared->carry[num - 1];
    buf_reset(&p->held);
    p->got = at;
    p->taken = shared->taken[num - 1];
    if (c->pos == at && c->len && c->len <= sizeof(c->bytes) && p->taken >= at + c->len) {
        buf_add(&p->held, c->bytes, c->len);
        p->got += c->len;
    }
}

enum pipe_status pipe_look(struct pipe *p, const struct pipe_tools *t, size_t max)
{
    if (p->fd < 0 || p->got < p->taken || p->held.len >= max)
        return PIPE_EMPTY;
    ssize_t n = tee(p->fd, t->scratch[1], max, SPLICE_F_NONBLOCK);
    if (n <= 0)
        return n == 0 ? PIPE_END : PIPE_EMPTY;
    size_t known = (size_t)(p->got - p->taken), before = p->held.len, seen = 0;
    uint8_t *room = buf_room(&p->held, (size_t)n);
    while (seen < (size_t)n) {
        ssize_t k = read(t->scratch[0], room + seen, (size_t)n - seen);
        if (k <= 0 && errno != EINTR)
            break;
        seen += k > 0 ? (size_t)k : 0;
    }
    if (seen <= known)
        return PIPE_EMPTY;
    memmove(room, room + known, seen - known);
    p->held.len = before + seen - known;
    p->got += seen - known;
    return PIPE_MORE;
}

uint64_t pipe_add(struct pipe *p, uint32_t end, const uint8_t *text, size_t len)
{
    uint64_t stop = p->got + (uint64_t)(int64_t)(int32_t)(end - (uint32_t)p->got);
    uint64_t start = stop - len, lost = 0;
    if (stop <= p->got)
        return 0;
    if (start > p->got)
        lost = pipe_skip(p, start);
    size_t known = (size_t)(p->got - start);
    buf_add(&p->held, text + known, len - known);
    p->got = stop;
    return lost;
}

uint64_t pipe_skip(struct pipe *p, uint64_t end)
{
    if (end <= p->got)
        return 0;
    uint64_t lost = end - pipe_at(p);
    buf_reset(&p->held);
    p->got = end;
    return lost;
}

void pipe_delivered(struct pipe *p, size_t len)
{
    buf_consume(&p->held, len);
    if (!p->held.len)
        buf_reset(&p->held);
}

/* Under the sequence lock that the rank's library looks at (see struct frame_pipes). */
static void pipe_drop(struct pipe *p, const struct pipe_tools *t, struct frame_pipes *shared,
                      int num, uint64_t until)
{
    shared->seq |= 1;
    while (p->taken < until) {
        ssize_t n =
            splice(p->fd, NULL, t->null_fd, NULL, (size_t)(until - p->taken), SPLICE_F_NONBLOCK);
        if (n <= 0 && errno != EINTR)
            break;
        p->taken += n > 0 ? (uint64_t)n : 0;
    }
    shared->taken[num - 1] = p->taken;
    shared->seq++;
}

void pipe_take(struct pipe *p, const struct pipe_tools *t, struct frame_pipes *shared, int num)
{
    struct frame_carry *c = &shared->carry[num - 1];
    uint64_t until = pipe_at(p);
    if (p->held.len && p->held.len <= sizeof(c->bytes)) {
        c->len = 0; /* never a length that fits other bytes */
        c->pos = until;
        memcpy(c->bytes, p->held.data, p->held.len);
        c->len = (uint32_t)p->held.len;
        until = p->got;
    }
    if (p->fd >= 0 && until > p->taken)
        pipe_drop(p, t, shared, num, until);
}
