# SPDX-License-Identifier: Apache-2.0
"""DataLoader's worker processes when a cell is interrupted.

They are the iterator's to end. One that dies of the interrupt itself leaves its rank waiting for
data for seconds, if the rank's own interrupt came where Python drops exceptions (in a __del__).
And KeyboardInterrupt may come between the start of a worker and the line that writes it down; then
nobody tells it to end, and it waits for work for as long as the rank lives.
"""

import contextlib
import functools
import gc
import os
import signal

from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

WORKER_NAME = "pt_data_worker"  # what torch calls these processes
JOIN_S = 0.5  # that an iterator gives a worker to end by itself; torch's own: 5


def spare_workers():
    """Interrupts do not reach workers; their iterator ends them."""
    loop = _utils.worker._worker_loop

    @functools.wraps(loop)
    def spared(*args, **kwargs):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return loop(*args, **kwargs)

    _utils.worker._worker_loop = spared
    _utils.MP_STATUS_CHECK_INTERVAL = JOIN_S


def end_workers():
    """Ends the workers of iterators that are no more, and of those that never knew them."""
    if _workers():
        gc.collect()  # iterators end their workers themselves
    pids = _workers()
    if pids:
        pids -= {worker.pid for each in _iterators() for worker in getattr(each, "_workers", ())}
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _workers():
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            with open(f"/proc/self/task/{thread}/children") as children:
                found.update(map(int, children.read().split()))
    return {pid for pid in found if _name(pid) == WORKER_NAME}


def _name(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as comm:
        return comm.read().strip()


def _iterators():
    return [o for o in gc.get_objects() if type(o) is _MultiProcessingDataLoaderIter]
