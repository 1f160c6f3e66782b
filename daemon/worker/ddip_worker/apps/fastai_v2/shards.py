# SPDX-License-Identifier: Apache-2.0
"""DataLoaders of which each rank reads its share, and those that it reads alone."""

import copy
import math

import torch.distributed as dist
from fastai.data.core import TfmdDL
from fastai.data.load import DataLoader, _FakeLoader
from fastai.torch_core import apply, find_bs, to_detach

from ddip_worker.apps import agree, ddp, share


def shard(dl):
    """The same DataLoader, reading this rank's share only; or itself, if that is not to be had."""
    if isinstance(dl, (ShardedDL, share.Share, Alone)):
        return dl
    own = share_of(dl, ddp.split_batches)
    return dl if own is None else own  # an empty one counts as false


def share_of(dl, split):
    """The share of a DataLoader; None of what has no known length."""
    if isinstance(dl, ShardedDL):
        dl = dl.dl
    if isinstance(dl, DataLoader) and dl.n is not None:
        return ShardedDL(dl, split)
    return share.of_loader(dl, split)


class ShardedDL(TfmdDL):
    """Each rank reads its part of rank 0's order, as share.py says.

    What is gathered from all ranks is cut where the order had to be filled up. (fastai's
    DistributedDL shares an epoch out in the same way, but for CUDA only.)
    """

    def __init__(self, dl, split):
        self.dl, self.dataset, self.split = dl, dl.dataset, bool(split and dl.bs)
        self.bs = share.part_of_batch(dl.bs) if self.split else dl.bs
        self.drop_last, self.pin_memory = dl.drop_last, dl.pin_memory
        self.num_workers, self.offs, self.device = dl.num_workers, dl.offs, dl.device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        fake = dl.fake_l
        self.fake_l = _FakeLoader(
            self,
            fake.pin_memory,
            fake.num_workers,
            fake.timeout,
            persistent_workers=fake.persistent_workers,
            pin_memory_device=fake.pin_memory_device,
        )

    def __len__(self):
        if self.split:
            return len(self.dl)
        if type(self.dl).__len__ is not DataLoader.__len__:  # its own idea of a batch
            return math.ceil(len(self.dl) / self.world_size)
        mine = math.ceil(self.dl.n / self.world_size)
        if self.bs is None:
            return mine
        return mine // self.bs if self.drop_last else math.ceil(mine / self.bs)

    def new(self, *args, **options):
        return self.dl.new(*args, **options)  # not shared out: whoever asks wants all of it

    def get_idxs(self):
        order = agree.numbers_from_rank_0(list(self.dl.get_idxs()))
        self.n = len(order)
        self.share = math.ceil(self.n / self.world_size)
        return share.part_of_order(order, self.dl.bs if self.split else None)

    def before_iter(self):
        self.i = 0
        self.dl.before_iter()

    def randomize(self):
        self.dl.randomize()

    def after_batch(self, b):
        self.i += find_bs(b)
        return self.dl.after_batch(b)

    def after_iter(self):
        self.dl.after_iter()

    def create_batches(self, samps):
        dl = self.dl
        if self.split:
            dl = copy.copy(dl)
            dl.chunkify = self.chunkify
        return dl.create_batches(samps)

    def to_detach(self, b, cpu=True, gather=True):
        b = to_detach(b, cpu, gather)
        return apply(self._cut, b) if gather and hasattr(self, "n") else b

    def _cut(self, b):
        """What all ranks gave for a batch, without the items that fill up the order."""
        if not b.ndim:
            return b
        return b[: len(b) - self._extra(len(b) // self.world_size)]

    def _extra(self, part):
        if self.split:
            return max(0, self.i * self.world_size - self.n)
        read = (self.i + rank * self.share for rank in range(self.world_size))
        return sum(min(part, max(0, each - self.n)) for each in read)


class Alone:
    """A DataLoader, or a list of batches, that every rank reads as a whole: nothing is gathered."""

    def __init__(self, dl):
        self.dl = dl

    def __len__(self):
        return len(self.dl)

    def __iter__(self):
        return iter(self.dl)

    def __getattr__(self, name):
        if name == "dl":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.dl, name)

    def to_detach(self, b, cpu=True, gather=True):
        return to_detach(b, cpu, gather=False)
