/* SPDX-License-Identifier: Apache-2.0 */
/*
 * backlog.c - frames for the daemon: numbered at birth, kept until acknowledged, bounded.
 *
 * The sender's own thread tries the socket first, so a rank that dies right after a print has
 * handed the text to the kernel. Two bounds: with a daemon connected a full backlog makes the
 * sender wait (the daemon is busy, nothing is lost); without one it drops events and counts them,
 * so that training goes on, and a FRAME_GAP tells how much is missing. What ends a cell is never
 * dropped.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ddw.h"

#define BACKLOG_CONNECTED (8u * 1024 * 1024)
#define BACKLOG_ALONE (64u * 1024 * 1024)
#define BACKLOG_TEXT 8192 /* held text that is sent although its line is not finished */

static void backlog_forget(struct backlog_frame *f)
{
    struct backlog *b = &ddw.backlog;
    if (b->unsent == f)
        b->unsent = TAILQ_NEXT(f, link);
    TAILQ_REMOVE(&b->frames, f, link);
    b->bytes -= f->len;
    if (f->fd >= 0)
        close(f->fd);
    free(f);
}

void backlog_acked(uint64_t number)
{
    struct backlog_frame *f;
    while ((f = TAILQ_FIRST(&ddw.backlog.frames)) != NULL && f->number <= number)
        backlog_forget(f);
    pthread_cond_broadcast(&ddw.backlog.room);
}

int backlog_send(void)
{
    struct backlog *b = &ddw.backlog;
    while (ddw.welcomed && b->unsent) {
        struct backlog_frame *f = b->unsent;
        size_t nfds = f->sent == 0 && f->fd >= 0;
        ssize_t n = wire_write(ddw.wire.fd, f->data + f->sent, f->len - f->sent, &f->fd, nfds);
        if (n <= 0)
            return (int)n;
        f->sent += (size_t)n;
        if (f->sent == f->len)
            b->unsent = TAILQ_NEXT(f, link);
    }
    if (!b->unsent)
        pthread_cond_broadcast(&b->room);
    return 0;
}

static void backlog_append(uint8_t type, uint8_t flags, uint32_t cell, uint32_t arg,
                           const void *payload, size_t len, int fd)
{
    struct backlog *b = &ddw.backlog;
    struct backlog_frame *f = util_malloc(sizeof(*f) + FRAME_HEADER + len);
    f->number = ++b->last_number;
    f->fd = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    f->len = FRAME_HEADER + len;
    f->sent = 0;
    struct frame header = {.type = type,
                           .flags = flags,
                           .nfds = f->fd >= 0,
                           .length = (uint32_t)len,
                           .number = f->number,
                           .cell = cell,
                           .arg = arg};
    if (flags & FRAME_FLAG_PIPE) {
        header.out = (uint32_t)ddw.pipes->taken[0];
        header.err = (uint32_t)ddw.pipes->taken[1];
    } else {
        capture_position(&header.out, &header.err);
    }
    frame_put_header(f->data, &header);
    if (len)
        memcpy(f->data + FRAME_HEADER, payload, len);
    TAILQ_INSERT_TAIL(&b->frames, f, link);
    b->bytes += f->len;
    if (!b->unsent)
        b->unsent = f;
}

/* Room for len more bytes. False: none, and no daemon to make some. */
static bool backlog_room(size_t len, bool may_wait)
{
    struct backlog *b = &ddw.backlog;
    while (b->bytes && b->bytes + len > BACKLOG_CONNECTED && ddw.welcomed && may_wait)
        pthread_cond_wait(&b->room, &ddw.lock);
    return ddw.welcomed || b->bytes + len <= BACKLOG_ALONE;
}

static void backlog_report_gap(void)
{
    struct backlog *b = &ddw.backlog;
    if (!b->dropped_frames)
        return;
    char json[192];
    int n =
        snprintf(json, sizeof(json),
                 "{\"dropped_events\":%llu,\"dropped_bytes\":%llu,\"out\":%llu,\"err\":%llu}",
                 (unsigned long long)b->dropped_frames, (unsigned long long)b->dropped_bytes,
                 (unsigned long long)b->dropped_until[0], (unsigned long long)b->dropped_until[1]);
    b->dropped_frames = b->dropped_bytes = 0;
    backlog_append(FRAME_GAP, 0, ddw.cell, 0, json, (size_t)n, -1);
}

void backlog_restart(uint64_t seen)
{
    struct backlog *b = &ddw.backlog;
    backlog_acked(seen);
    backlog_report_gap();
    struct backlog_frame *f;
    TAILQ_FOREACH(f, &b->frames, link)
    {
        f->sent = 0;
    }
    b->unsent = TAILQ_FIRST(&b->frames);
}

static int backlog_add_now(uint8_t type, uint8_t flags, uint32_t cell, uint32_t arg,
                           const void *payload, size_t len, int fd, bool may_wait)
{
    struct backlog *b = &ddw.backlog;
    bool droppable = type == FRAME_STREAM || type == FRAME_EVENT;
    if (!backlog_room(len + FRAME_HEADER, may_wait) && droppable) {
        b->dropped_frames++;
        b->dropped_bytes += len;
        if (flags & FRAME_FLAG_PIPE)
            b->dropped_until[arg == 2] = ddw.pipes->taken[arg == 2];
        return 0;
    }
    backlog_report_gap();
    backlog_append(type, flags, cell, arg, payload, len, fd);
    if (backlog_send() < 0 || b->unsent)
        link_kick();
    return 0;
}

void backlog_flush_held(bool may_wait)
{
    struct backlog *b = &ddw.backlog;
    if (!b->held.len)
        return;
    struct buf text = b->held; /* backlog_room may let another thread add text meanwhile */
    b->held = (struct buf)BUF_INIT;
    backlog_add_now(FRAME_STREAM, 0, b->held_cell, (uint32_t)b->held_fd, text.data, text.len, -1,
                    may_wait);
    if (b->held.len || text.cap > 4 * BACKLOG_TEXT) {
        buf_deinit(&text);
    } else {
        buf_deinit(&b->held);
        text.len = 0;
        b->held = text;
    }
}

int backlog_add(uint8_t type, uint32_t cell, uint32_t arg, const void *payload, size_t len, int fd,
                bool may_wait)
{
    if (len > FRAME_MAX)
        return EMSGSIZE;
    link_read_pipes();
    backlog_flush_held(may_wait);
    return backlog_add_now(type, 0, cell, arg, payload, len, fd, may_wait);
}

void backlog_pipe_text(int which, const char *bytes, size_t len)
{
    backlog_flush_held(false);
    backlog_add_now(FRAME_STREAM, FRAME_FLAG_PIPE, ddw.cell, (uint32_t)which + 1, bytes, len, -1,
                    false);
}

void backlog_text(int fd, const char *text, size_t len, bool may_wait)
{
    struct backlog *b = &ddw.backlog;
    while (len) {
        if (b->held.len && (b->held_fd != fd || b->held_cell != ddw.cell))
            backlog_flush_held(may_wait);
        if (!b->held.len) {
            link_read_pipes(); /* what was written before this text goes before it */
            b->held_fd = fd;
            b->held_cell = ddw.cell;
            b->held_since_ns = util_monotonic_ns();
        }
        size_t n = len < 64 * 1024 ? len : 64 * 1024;
        n -= n < len ? util_utf8_partial(text, n) : 0;
        buf_add(&b->held, text, n);
        bool line = memchr(text, '\n', n) || memchr(text, '\r', n);
        text += n;
        len -= n;
        if (line || b->held.len > BACKLOG_TEXT) {
            backlog_flush_held(may_wait);
        } else if (!b->watched) {
            b->watched = true;
            link_kick(); /* the thread sends it if no more comes */
        }
    }
}
