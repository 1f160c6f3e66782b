# SPDX-License-Identifier: Apache-2.0
"""Fake: a torch that believes in the GPUs of CUDA_VISIBLE_DEVICES, where there are none.

For ranks of GPU groups on machines without a GPU: put this folder on PYTHONPATH. Tensors stay on
the CPU and `nccl` is gloo underneath, so what is tested is who gets which device, not CUDA.
"""

import os

import torch
import torch.distributed as dist

_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
_init, _full = dist.init_process_group, torch.full
current = None


def _set_device(device):
    global current
    if not 0 <= device < len(_devices):
        raise RuntimeError(f"CUDA error: invalid device ordinal {device} of {len(_devices)}")
    current = device


def _init_process_group(backend, device_id=None, **options):
    assert backend == "nccl" and device_id == torch.device("cuda", current)
    _init("gloo", **options)


def _full_on_cpu(*args, device=None, **options):
    assert str(device) == f"cuda:{current}"
    return _full(*args, **options)


class _Aborts:
    """Counts how often a process group was aborted."""

    def __init__(self, abort):
        self.count, self._abort = 0, abort

    def __get__(self, group, owner):
        return lambda: self.abort(group)

    def abort(self, group):
        self.count += 1
        self._abort(group)


aborts = _Aborts(dist.ProcessGroup.abort)
dist.ProcessGroup.abort = aborts
torch.cuda.set_device = _set_device
torch.cuda.current_device = lambda: current
dist.init_process_group = _init_process_group
torch.full = _full_on_cpu
