/* SPDX-License-Identifier: Apache-2.0 */
/* ddw.h - the one instance and its parts; internal to the library. ddw.lock guards all of it. */
#ifndef DDIPD_DDW_H
#define DDIPD_DDW_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "ddipworker.h"
#include "frame.h"
#include "util.h"
#include "wire.h"

/* A frame on its way to the daemon, kept until acknowledged. */
struct backlog_frame {
    TAILQ_ENTRY(backlog_frame) link;
    uint64_t number;
    int fd;           /* -1: none; kept, since it may have to be sent again */
    size_t len, sent; /* bytes of data; sent over the present connection */
    uint8_t data[];
};

struct backlog {
    TAILQ_HEAD(backlog_list, backlog_frame) frames;
    struct backlog_frame *unsent; /* first one not sent completely; NULL: all sent */
    size_t bytes;
    uint64_t last_number;
    struct buf held; /* unfinished line of fd held_fd, not a frame yet */
    int held_fd;
    uint32_t held_cell;
    uint64_t held_since_ns;
    bool watched; /* the thread looks at `held` every 10 ms, no need to kick it */
    uint64_t dropped_frames, dropped_bytes; /* since the last FRAME_GAP */
    uint64_t dropped_until[2];              /* positions in the pipes */
    pthread_cond_t room;                    /* frames were acknowledged or sent */
};

struct inbox_message {
    TAILQ_ENTRY(inbox_message) link;
    struct ddw_message m;
    char payload[];
};

TAILQ_HEAD(inbox, inbox_message);

struct abort_set {
    uint64_t *inodes;
    size_t len, cap;
};

struct stacks_thread {
    pid_t tid;
    uint64_t id; /* pthread_self, which Python calls ident */
    char name[48];
};

struct stacks_watch {
    int signal, fd;                /* the dump goes to fd; 0: stacks are not watched */
    void (*dump)(int);             /* faulthandler's own handler: dumps the calling thread */
    _Atomic int state, tid;        /* enum stacks_state, and whose turn it is */
    uint32_t asked, from;          /* the newest FRAME_STACKS; the one that is being answered */
    bool asked_all;                /* all threads, or the main thread alone */
    size_t left;                   /* how many are still to be dumped */
    uint64_t check_ns, until_ns;   /* when to look why there is no answer, 0: not; to give up */
    struct stacks_thread *threads; /* the main thread first, then those that Python started */
    size_t len, cap, next;
};

struct ddw {
    pthread_mutex_t lock;
    bool forked; /* this is a child of the rank: no thread, no connection */
    pthread_t main, thread;

    /* link.c */
    char *path, *hello;
    struct wire wire;
    bool welcomed;     /* the daemon has said from which number to send */
    int kick;          /* eventfd that wakes the thread */
    uint64_t lost_ns;  /* since when there is no daemon; 0: there is one, or none was tried yet */
    uint64_t retry_ns; /* no connection is tried before; 0: at once */
    uint64_t orphan_timeout_ns;
    bool orphaned;

    struct backlog backlog;

    /* ddipworker.c */
    struct inbox inbox;
    int inbox_kick;         /* eventfd the main thread waits on */
    struct inbox questions; /* FRAME_QUESTION: for a thread beside the main one */
    size_t questions_len;
    pthread_cond_t asked;       /* there is a question */
    uint32_t cell;              /* the newest cell begun: stray output belongs to it */
    uint32_t newest;            /* the newest cell received */
    bool running;               /* user code of `cell` is running */
    uint64_t interrupt_next_ns; /* when SIGINT is sent again; 0: not */
    uint64_t interrupt_wait_ns, interrupt_seen_ns;
    int interrupt_tries;
    uint32_t interrupted;           /* a cell that was interrupted before it began */
    bool aborted;                   /* the process group was aborted while `cell` was running */
    int abort_kick;                 /* eventfd: FRAME_ABORT came */
    struct abort_set known, before; /* abort.c: the group's sockets; those before the bracket */
    int bracket_depth;
    int pipe_read[2]; /* read ends of fd 1 and 2; the daemon has copies */
    int pipes_fd;     /* memory file of `pipes`, shared with the daemon */
    struct frame_pipes *pipes;
    struct stacks_watch stacks;
};

extern struct ddw ddw;

/* backlog.c: callers hold ddw.lock. backlog_add may wait for room, and gives the lock up meanwhile.
 */
int backlog_add(uint8_t type, uint32_t cell, uint32_t arg, const void *payload, size_t len, int fd,
                bool may_wait);
void backlog_text(int fd, const char *text, size_t len, bool may_wait);
void backlog_pipe_text(int which, const char *bytes, size_t len); /* read from fd which + 1 */
void backlog_flush_held(bool may_wait);
int backlog_send(void);              /* -1: the daemon is gone */
void backlog_acked(uint64_t number); /* forget frames up to number */
void backlog_restart(uint64_t seen); /* a new connection: send again what comes after `seen` */

/* capture.c: fd 1 and 2. */
int capture_start(void);                             /* 0, or an errno */
void capture_position(uint32_t *out, uint32_t *err); /* bytes ever written, modulo 2^32 */
ssize_t capture_read(int which, void *out, size_t cap);

/* link.c */
void *link_run(void *unused);
void link_kick(void);       /* the thread has something to do */
void link_read_pipes(void); /* without a daemon: takes what is in them into the backlog */

/* abort.c: callers hold ddw.lock. */
void abort_bracket_open(void);
void abort_bracket_close(void);
int abort_now(void); /* how many connections were shut */

/* stacks.c: callers hold ddw.lock. */
void stacks_ask(uint32_t id, bool all); /* answered by a FRAME_TRACE with this id, or a later one */
void stacks_turn(uint64_t now);         /* goes on with the answer, sends it when it is complete */

/* interrupt.c: callers hold ddw.lock. */
void interrupt_begin(void);
void interrupt_later(uint64_t now); /* the same, in a moment */
void interrupt_end(void);
bool interrupt_seen(uint64_t now);  /* Python's handler runs: is it to raise? */
void interrupt_again(uint64_t now); /* sends again if it is time to */

/* ddipworker.c: called by the thread, with the lock held. */
void ddw_received(const struct frame *f, int fd);
void ddw_orphaned(void);

#endif
