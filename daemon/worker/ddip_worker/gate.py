# SPDX-License-Identifier: Apache-2.0
"""SIGINT raises KeyboardInterrupt in user code only, never in the loop around it.

The library sends SIGINT only while a cell is running, but Python runs handlers later, at the next
bytecode: that may be before the cell's code begins, or after it. `running` is true in between only.
IPython's preparations count as before: it swallows what its pre_execute callbacks raise.

Python itself swallows what is raised while it destroys objects, and a long garbage collection is
where a signal is likely to come: it is then handled in the first `__del__` or weakref callback.
"""

import contextlib
import os
import signal
import sys


class Gate:
    def __init__(self, seen, swallowed):
        """seen(): called when the handler runs; false if this interrupt has been raised already.
        swallowed(): what it raised came to nothing; the interrupt is to be sent again."""
        self._seen, self._swallowed = seen, swallowed
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.arm()

    def arm(self):
        """Takes SIGINT back from user code. (asyncio, for one, leaves the wakeup fd at -1.)"""
        self.running = False
        signal.signal(signal.SIGINT, self._on_signal)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    @property
    def fd(self):
        """Readable after a signal."""
        return self._read_fd

    def _on_signal(self, signum, frame):
        __tracebackhide__ = True  # IPython leaves such frames out
        # before user code it stays unseen: the library sends it again until it finds some
        if self.running and self._seen():
            raise KeyboardInterrupt

    def _on_unraisable(self, unraisable):
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            self._swallowed()
        else:
            self._unraisable(unraisable)

    def open(self):
        """User code begins: KeyboardInterrupt may come from now on."""
        self.running = True

    @contextlib.contextmanager
    def closed_after(self):
        """It may come inside, once the gate has been opened there, and does not outside."""
        try:
            yield
        finally:
            self.running = False
