# SPDX-License-Identifier: Apache-2.0
"""NCCL's abort: what the shutting of sockets is for gloo.

A rank that waits for a GPU does so without the GIL, so a thread can abort the communicators under
it. All of them within one NCCL group: aborting one after the other can wait for a peer that has
aborted another first.
"""

import os
import threading

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_lock = threading.Lock()  # the thread and the main thread may both want to


def watch(library):
    """Starts the thread that aborts when ddipd says so."""
    fd = library.abort_fd()
    threading.Thread(target=_run, args=(fd,), name="ddip-abort", daemon=True).start()


def abort():
    """Aborts every communicator; whoever waits in one gets an exception. Again: does nothing."""
    with _lock:
        groups = sorted(c10d._world.pg_names, key=c10d._world.pg_names.get, reverse=True)
        together = _nccl_backend(groups)
        if together:
            together._group_start()
        for group in groups:
            group.abort()
        if together:
            together._group_end()


def _run(fd):
    while os.read(fd, 8):
        abort()


def _nccl_backend(groups):
    for group in groups:
        try:
            backend = group._get_backend(torch.device("cuda"))
        except RuntimeError:
            continue
        if dist.is_nccl_available() and isinstance(backend, c10d.ProcessGroupNCCL):
            return backend
    return None
