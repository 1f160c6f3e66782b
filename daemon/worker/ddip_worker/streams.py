# SPDX-License-Identifier: Apache-2.0
"""sys.stdout and sys.stderr of a rank: text goes to the daemon as numbered frames.

fileno() is the real fd 1 or 2, so child processes that are given the stream write to the pipe the
daemon reads; the library keeps both in order.
"""

import io
import os
import sys
from _thread import get_ident

_muted = 0


def mute_this_thread():
    """What it prints belongs to no cell. A child's threads may get its number again."""
    global _muted
    _muted = get_ident()
    os.register_at_fork(after_in_child=_unmute)


def _unmute():
    global _muted
    _muted = 0


class _Raw(io.RawIOBase):
    def __init__(self, library, fd):
        self._stream = library.stream
        self._flush = library.stream_flush
        self._fd = fd

    def writable(self):
        return True

    def fileno(self):
        return self._fd

    def isatty(self):
        return False

    def flush(self):
        if not self.closed:
            self._flush()

    def write(self, data):
        if get_ident() == _muted:
            return len(data)
        data = bytes(data)
        self._stream(self._fd, data, len(data))
        return len(data)


def install(library):
    """Replaces sys.stdout and sys.stderr (and what was saved of them at start-up)."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = io.TextIOWrapper(
            _Raw(library, fd),
            encoding="utf-8",
            errors="backslashreplace",
            newline="",
            write_through=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
