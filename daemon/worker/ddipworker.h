/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ddipworker.h - what the Python half of a rank calls, through ctypes.
 *
 * The library owns what must work while the interpreter is stuck or holds the GIL: the control
 * socket and its thread, the backlog of frames the daemon has not acknowledged, delivery of SIGINT,
 * and fd 1 and 2. One instance per process. Every function may be called from any thread unless it
 * says otherwise; ctypes releases the GIL around each call.
 */
#ifndef DDIPWORKER_H
#define DDIPWORKER_H

#include <stdint.h>

#define DDW_API __attribute__((visibility("default")))

struct ddw_message {
    uint32_t type; /* enum frame_type */
    uint32_t cell;
    uint32_t arg;
    int32_t fd; /* -1: none; otherwise the caller's to close */
    uint64_t length;
    const char *payload;
    void *handle; /* for ddw_message_free */
};

/*
 * Makes fd 1 and 2 pipes of the daemon's, and starts the thread that connects to socket_path and
 * says HELLO with hello_json. orphan_timeout_s: how long to do without a daemon before the rank is
 * told to exit. Marks this process and so all it will start (kin.h). Call once, from the main
 * thread. Returns 0, or an errno.
 */
DDW_API int ddw_start(const char *socket_path, const char *hello_json, uint32_t orphan_timeout_s);

/* Text for fd 1 or 2 of the current cell. A line goes out at once, an unfinished one within 10 ms.
 */
DDW_API void ddw_stream(int fd, const char *text, uint64_t len);

/* Sends an unfinished line now. */
DDW_API void ddw_stream_flush(void);

/*
 * Queues a frame for the daemon (FRAME_EVENT, _DONE, _REPLY, _STATE); fd -1: none, otherwise it
 * stays the caller's. Waits while the daemon is slow. Returns 0; EMSGSIZE when longer than the wire
 * allows; EPIPE in a forked child, which has no connection.
 */
DDW_API int ddw_post(uint32_t type, uint32_t cell, uint32_t arg, const char *json, uint64_t len,
                     int fd);

/*
 * Main thread: waits for the next frame from the daemon. 1: *m is filled, give it to
 * ddw_message_free. 0: a signal came (a byte on signal_fd, Python's wakeup fd): return to Python so
 * its handlers run.
 */
DDW_API int ddw_wait(int signal_fd, struct ddw_message *m);
DDW_API void ddw_message_free(void *handle);
/* A thread other than the main one: waits for the next question (FRAME_QUESTION), which is to be
 * answered while a cell runs. */
DDW_API void ddw_wait_question(struct ddw_message *m);

/* Main thread: user code of a cell starts. 1: the cell was interrupted before it started. */
DDW_API int ddw_begin(uint32_t cell);
/* Main thread: user code is over: C's stdio is flushed, and no SIGINT is sent for this cell after
 * the call has returned. */
DDW_API void ddw_end(void);

/* Python's SIGINT handler runs: the signal is not sent again. Returns 1 if the handler is to raise,
 * 0 if this is the echo of an interrupt that has raised already. */
DDW_API int ddw_interrupt_seen(void);
/* What the handler raised has been ignored by Python: the signal is sent again, a little later. */
DDW_API void ddw_interrupt_swallowed(void);

/*
 * Around everything that makes sockets of the process group (nests): TCP sockets that are new when
 * the bracket closes are the ones FRAME_ABORT and ddw_abort shut.
 */
DDW_API void ddw_bracket(int open);
/* Shuts the process group's connections: whoever waits in a collective gets an exception. Returns
 * how many there were. */
DDW_API int ddw_abort(void);
/* An eventfd that becomes readable whenever the daemon aborts: for what only Python can abort. */
DDW_API int ddw_abort_fd(void);
/* 1: the process group was aborted by the daemon while the present cell was running. */
DDW_API int ddw_aborted(void);

/*
 * Main thread: faulthandler writes the stack of the thread that gets this signal to fd. From now on
 * the daemon can ask where threads are. Returns 0, or an errno.
 */
DDW_API int ddw_stacks(int signal, int fd);
/* The calling thread, started by Python, begins under this name; NULL: it ends. */
DDW_API void ddw_stacks_thread(const char *name);
/* Ends whatever this process has started, directly or not, whether it wants to or not. */
DDW_API void ddw_end_children(uint32_t timeout_ms);

/* Flushes C's stdio and held text, and waits until everything has been sent, at most timeout_ms. */
DDW_API void ddw_flush(uint32_t timeout_ms);

#endif
