# SPDX-License-Identifier: Apache-2.0
"""faulthandler in a rank: stacks when the daemon asks, and the last one of a rank that crashes."""

import faulthandler
import functools
import os
import signal
import threading

# Nobody else's: the library sends it to one thread at a time, while the handler is its own.
SIGNAL = signal.SIGRTMAX - 5


def watch(library):
    """Lets the daemon see where the threads are. Main thread, once."""
    fd = os.memfd_create("ddip-stacks", os.MFD_CLOEXEC)
    # all_threads would walk the others while they run, and crash when one ends meanwhile
    faulthandler.register(SIGNAL, file=fd, all_threads=False, chain=False)
    library.watch_stacks(SIGNAL, fd)
    bootstrap = threading.Thread._bootstrap_inner

    @functools.wraps(bootstrap)
    def watched(self):
        library.watch_thread(self.name.encode(errors="replace"))
        try:
            bootstrap(self)
        finally:
            library.watch_thread(None)

    threading.Thread._bootstrap_inner = watched


def tell_crashes():
    """A fatal signal writes the stack to fd 2, which the daemon reads to its end."""
    faulthandler.enable(file=2)
