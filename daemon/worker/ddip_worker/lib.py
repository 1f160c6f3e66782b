# SPDX-License-Identifier: Apache-2.0
"""libddipworker.so through ctypes. Names and meanings are those of daemon/worker/ddipworker.h."""

import contextlib
import ctypes
import json
import os

# enum frame_type of proto/frame.h
EVENT, DONE, REPLY, STATE = 3, 4, 5, 6
EXECUTE, INTERRUPT, REQUEST, JOIN, EXIT = 18, 19, 20, 21, 22


class _Message(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32),
        ("cell", ctypes.c_uint32),
        ("arg", ctypes.c_uint32),
        ("fd", ctypes.c_int32),
        ("length", ctypes.c_uint64),
        ("payload", ctypes.c_void_p),
        ("handle", ctypes.c_void_p),
    ]


class Message:
    """One frame from the daemon: type, cell, arg, fd (-1, or yours to close), payload as a dict."""

    __slots__ = ("type", "cell", "arg", "fd", "payload")

    def __init__(self, raw):
        self.type, self.cell, self.arg, self.fd = raw.type, raw.cell, raw.arg, raw.fd
        text = ctypes.string_at(raw.payload, raw.length)
        self.payload = json.loads(text) if text else {}


class Library:
    """The one connection of this process to the daemon."""

    def __init__(self, path):
        c = ctypes.CDLL(path)
        u32, u64, ptr = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_char_p
        c.ddw_start.argtypes = (ptr, ptr, u32)
        c.ddw_stream.argtypes = (ctypes.c_int, ptr, u64)
        c.ddw_stream.restype = None
        c.ddw_stream_flush.restype = None
        c.ddw_post.argtypes = (u32, u32, u32, ptr, u64, ctypes.c_int)
        c.ddw_wait.argtypes = (ctypes.c_int, ctypes.POINTER(_Message))
        c.ddw_wait_question.argtypes = (ctypes.POINTER(_Message),)
        c.ddw_wait_question.restype = None
        c.ddw_message_free.argtypes = (ctypes.c_void_p,)
        c.ddw_message_free.restype = None
        c.ddw_begin.argtypes = (u32,)
        c.ddw_end.restype = None
        c.ddw_interrupt_swallowed.restype = None
        c.ddw_bracket.restype = None
        c.ddw_stacks.argtypes = (ctypes.c_int, ctypes.c_int)
        c.ddw_stacks_thread.argtypes = (ptr,)
        c.ddw_stacks_thread.restype = None
        c.ddw_flush.argtypes = (u32,)
        c.ddw_flush.restype = None
        c.ddw_end_children.argtypes = (u32,)
        c.ddw_end_children.restype = None
        c.getenv.argtypes = (ptr,)
        c.getenv.restype = ptr
        self._c = c
        self.stream = c.ddw_stream  # (fd, bytes, length); hot, so without a wrapper
        self.stream_flush = c.ddw_stream_flush
        self.begin = c.ddw_begin
        self.end = c.ddw_end
        self.interrupt_seen = c.ddw_interrupt_seen
        self.interrupt_swallowed = c.ddw_interrupt_swallowed
        self.flush = c.ddw_flush
        self.watch_thread = c.ddw_stacks_thread  # (name) when it begins, (None) when it ends
        self.end_children = c.ddw_end_children
        self.abort = c.ddw_abort
        self.abort_fd = c.ddw_abort_fd
        self.aborted = c.ddw_aborted

    def start(self, socket_path, hello, orphan_timeout_s):
        """Takes fd 1 and 2 and connects. Raises OSError."""
        rc = self._c.ddw_start(
            os.fsencode(socket_path), json.dumps(hello).encode(), orphan_timeout_s
        )
        if rc:
            raise OSError(rc, os.strerror(rc))
        # what Python starts is marked too when it is given a copy of os.environ
        os.environ["DDIP_SCOPE"] = os.fsdecode(self._c.getenv(b"DDIP_SCOPE"))

    def watch_stacks(self, signum, fd):
        """faulthandler writes a thread's stack to fd on that signal. Raises OSError."""
        rc = self._c.ddw_stacks(signum, fd)
        if rc:
            raise OSError(rc, os.strerror(rc))

    def post(self, type, content, cell=0, arg=0, fd=-1):
        """Queues a JSON frame. Raises OSError(EMSGSIZE) when it is larger than the wire allows."""
        # compact and "type" first: the daemon reads an event's type from the text
        text = json.dumps(content, default=str, ensure_ascii=False, separators=(",", ":"))
        text = text.encode(errors="replace")
        rc = self._c.ddw_post(type, cell, arg, text, len(text), fd)
        if rc:
            raise OSError(rc, os.strerror(rc))

    @contextlib.contextmanager
    def bracket(self):
        """TCP sockets made inside are the process group's: those that an abort shuts."""
        self._c.ddw_bracket(1)
        try:
            yield
        finally:
            self._c.ddw_bracket(0)

    def wait(self, signal_fd):
        """The next Message, or None when a signal came first."""
        raw = _Message()
        return self._taken(raw) if self._c.ddw_wait(signal_fd, raw) else None

    def wait_question(self):
        """The next Message that is answered beside the cell; not in the main thread."""
        raw = _Message()
        self._c.ddw_wait_question(raw)
        return self._taken(raw)

    def _taken(self, raw):
        try:
            return Message(raw)
        finally:
            self._c.ddw_message_free(raw.handle)
