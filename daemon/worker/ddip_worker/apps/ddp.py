# SPDX-License-Identifier: Apache-2.0
"""A model in DistributedDataParallel for the time of its `fit`, of whatever library that is; or for
good, for a loop that was written by hand.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddip_worker.apps import agree, cell

options = {}  # of DistributedDataParallel, and sync_bn
split_batches = False


class Wrapped(DistributedDataParallel):
    """Also does what fastai asks of the model itself."""

    def reset(self):
        if hasattr(self.module, "reset"):
            self.module.reset()


def wrap(model, kind=Wrapped):
    given = dict(options)
    if given.pop("sync_bn", False):
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if not any(p.requires_grad for p in model.parameters()):
        return model
    device = next(model.parameters()).device
    if device.type == "cuda":
        given.setdefault("device_ids", [device.index])
    return kind(model, **given)


class Seeds:
    """Random numbers of a fit: every rank draws its own, and all draw the same again after it."""

    def __init__(self):
        self._seed = None

    def part(self):
        self._seed = agree.gather(torch.randint(2**62, ()).item())[0]
        cell.seed_all(self._seed + dist.get_rank())  # dropout and augmentation differ

    def join(self):
        if self._seed is not None:
            cell.seed_all(self._seed - 1)


def check_cell():
    """A fit that is not shared is of one rank, or it is refused."""
    world_size = dist.get_world_size()
    if world_size > 1 and not (cell.is_alone() or cell.is_shared()):
        raise RuntimeError(
            f"this cell runs on ranks {cell.ranks()} of {world_size}: fit trains on all ranks "
            "together, or on one rank alone (--ranks 0)"
        )


def check_share(steps, batch_size):
    if steps == 0:
        raise ValueError(
            f"each of {dist.get_world_size()} ranks gets fewer items than one batch of "
            f"{batch_size} to train on: take a smaller batch size"
        )


def command(names, given, share):
    """`ddp` of an app: options for all that is wrapped from here on, and names of variables of the
    cells, models and DataLoaders, to wrap now, also when they are.

    share(value, split): the share of a DataLoader, or None of anything else.
    """
    global split_batches
    split_batches = given.pop("split_batches", split_batches)
    options.update(given)
    if dist.get_world_size() == 1:
        return
    namespace = vars(sys.modules["__main__"])
    found = {name: _value(namespace, name, share) for name in names}
    for name, value in found.items():
        namespace[name] = wrap(value) if isinstance(value, torch.nn.Module) else value


def _value(namespace, name, share):
    if name not in namespace:
        raise NameError(f"there is no variable {name!r} on this rank")
    value = namespace[name]
    if isinstance(value, DistributedDataParallel):
        return value.module
    if isinstance(value, torch.nn.Module):
        return value
    shared = share(value, split_batches)
    if shared is None:
        raise TypeError(
            f"{name} is {type(value).__name__}: neither a torch.nn.Module nor a DataLoader with "
            "batches of a known size"
        )
    return shared
