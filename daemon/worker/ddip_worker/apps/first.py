# SPDX-License-Identifier: Apache-2.0
"""Something that rank 0 does first, such as a download: the others come when it has succeeded.

The outcome goes through the group's store and not through a collective: rank 0 waits for nobody,
the others can be interrupted while they wait, and no time limit of the backend counts.
"""

import functools
import os
import threading
import time

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

POLL_S = 0.05
DONE = b"ok"


class Turns:
    """Numbers the turns of a cell; every rank of it must come to the same ones, in order."""

    def __init__(self):
        self._ranks = ()
        self._cell = self._turn = self._pid = 0
        self._inside = False

    def begin_cell(self, cell, ranks):
        self._ranks, self._cell, self._turn, self._pid = ranks, cell, 0, os.getpid()

    def shared(self):
        """True where there are others to wait for: not in a cell of some ranks, not within a turn,
        and not in threads and forked children, whose order nobody knows."""
        return (
            1 < len(self._ranks) == dist.get_world_size()
            and not self._inside
            and threading.current_thread() is threading.main_thread()
            and os.getpid() == self._pid
        )

    def take(self, function):
        """function() in turn, or at once where nobody shares it."""
        if not self.shared():
            return function()
        self._turn += 1
        self._inside = True
        try:
            return _take(function, f"ddip/first/{self._cell}/{self._turn}")
        finally:
            self._inside = False


def _take(function, key):
    store = c10d._get_default_store()
    if dist.get_rank() == 0:
        try:
            result = function()
        except BaseException as e:
            store.set(key, f"{type(e).__name__}: {e}")
            raise
        store.set(key, DONE)
        return result
    while not store.check([key]):
        time.sleep(POLL_S)
    outcome = store.get(key)
    if outcome != DONE:
        raise RuntimeError(f"rank 0 failed: {outcome.decode()}")
    return function()


turns = Turns()


def rank0_first(function, *args, **kwargs):
    """Calls function on rank 0, then on the others; what it raises on rank 0 is raised on all."""
    return turns.take(functools.partial(function, *args, **kwargs))


def in_turn(function):
    """function, made to go to rank 0 first."""

    @functools.wraps(function)
    def taken(*args, **kwargs):
        return rank0_first(function, *args, **kwargs)

    return taken
