/* SPDX-License-Identifier: Apache-2.0 */
/*
 * capture.c - fd 1 and 2 of the rank: pipes, and how much has ever been written to them.
 *
 * Frames say how far the pipes were when they were made, so that the daemon can put text from both
 * ways in order. Nobody can count what child processes write; but what has been taken out (a
 * counter shared with the reader) plus what is inside is what was written, if both are read while
 * no reader is at work: hence the sequence lock in struct frame_pipes.
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ddw.h"

#define CAPTURE_SPINS 1000 /* a reader that was stopped inside must not stop the rank */

static int capture_share(void)
{
    ddw.pipes_fd = memfd_create("ddip-pipes", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (ddw.pipes_fd < 0 || ftruncate(ddw.pipes_fd, sizeof(*ddw.pipes)) < 0 ||
        fcntl(ddw.pipes_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
        return errno;
    ddw.pipes = mmap(NULL, sizeof(*ddw.pipes), PROT_READ | PROT_WRITE, MAP_SHARED, ddw.pipes_fd, 0);
    return ddw.pipes == MAP_FAILED ? errno : 0;
}

int capture_start(void)
{
    int rc = capture_share();
    for (int i = 0; i < 2 && rc == 0; i++) {
        int ends[2];
        if (pipe2(ends, O_CLOEXEC) < 0)
            return errno;
        /* the open file is shared with the daemon: one setting for both readers */
        fcntl(ends[0], F_SETFL, O_NONBLOCK);
        if (dup2(ends[1], i + 1) < 0)
            return errno;
        close(ends[1]);
        ddw.pipe_read[i] = ends[0];
    }
    setvbuf(stdout, NULL, _IOLBF,
            0); /* C code's lines show when printed, not when a buffer fills */
    return rc;
}

void capture_position(uint32_t *out, uint32_t *err)
{
    for (int spins = 0;; spins++) {
        uint32_t before = ddw.pipes->seq;
        int held[2] = {0, 0};
        uint32_t taken[2];
        for (int i = 0; i < 2; i++) {
            taken[i] = (uint32_t)ddw.pipes->taken[i];
            ioctl(ddw.pipe_read[i], FIONREAD, &held[i]);
        }
        *out = taken[0] + (uint32_t)held[0];
        *err = taken[1] + (uint32_t)held[1];
        if ((before % 2 == 0 && ddw.pipes->seq == before) || spins == CAPTURE_SPINS)
            return;
        sched_yield();
    }
}

ssize_t capture_read(int which, void *out, size_t cap)
{
    ddw.pipes->seq |= 1;
    ssize_t n = read(ddw.pipe_read[which], out, cap);
    if (n > 0)
        ddw.pipes->taken[which] += (uint64_t)n;
    ddw.pipes->seq++;
    return n;
}
