# SPDX-License-Identifier: Apache-2.0
"""SIGINT raises KeyboardInterrupt in user code only, never in the loop around it.

The library sends SIGINT only while a cell is running, but Python runs handlers later, at the next
bytecode: that may be after the cell. `running` is false from the first statement after user code.
"""

import contextlib
import os
import signal


class Gate:
    def __init__(self, seen):
        """seen(): called when the handler runs; false if this interrupt has been raised already."""
        self.running = False
        self._seen = seen
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.arm()

    def arm(self):
        """Takes SIGINT back from user code. (asyncio, for one, leaves the wakeup fd at -1.)"""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    @property
    def fd(self):
        """Readable after a signal."""
        return self._read_fd

    def _on_signal(self, signum, frame):
        __tracebackhide__ = True  # IPython leaves such frames out
        if self._seen() and self.running:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def user_code(self):
        """KeyboardInterrupt may come inside, and does not outside."""
        self.running = True
        try:
            yield
        finally:
            self.running = False
