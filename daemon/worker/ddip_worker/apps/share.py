# SPDX-License-Identifier: Apache-2.0
"""DataLoaders of which each rank reads its share, in rank 0's order.

What is shared out is an epoch: in equal parts, in batches of the size that was given; or, with
`split`, each batch, so that all ranks together take the very steps that one process would. The
order is filled up with items from its start, or the last batch from its own, until it can be
divided.
"""

import itertools
import math

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from ddip_worker.apps import agree

OF_LOADERS = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn")
OF_LOADERS += ("multiprocessing_context", "persistent_workers", "prefetch_factor")


class Share(DataLoader):
    """This rank's share of a DataLoader, `whole`. To read it is collective."""

    def __init__(self, dl, split):
        given = {name: getattr(dl, name) for name in OF_LOADERS}
        super().__init__(dl.dataset, batch_sampler=_Batches(dl.batch_sampler, split), **given)
        self.whole = dl
        if hasattr(dl, "device"):
            self.device = dl.device


class _Batches:
    """A batch sampler: this rank's part of what another one gives on rank 0."""

    def __init__(self, whole, split):
        self.whole, self.split = whole, split
        self.size = part_of_batch(whole.batch_size) if split else whole.batch_size

    def __len__(self):
        if self.split:
            return len(self.whole)
        mine = math.ceil(len(self.whole.sampler) / dist.get_world_size())
        return mine // self.size if self.whole.drop_last else math.ceil(mine / self.size)

    def __iter__(self):
        if self.split:
            order = agree.numbers_from_rank_0([item for batch in self.whole for item in batch])
        else:
            order = agree.numbers_from_rank_0(list(self.whole.sampler))
        mine = part_of_order(order, self.whole.batch_size if self.split else None)
        for start in range(0, len(mine), self.size):
            batch = mine[start : start + self.size]
            if len(batch) == self.size or not self.whole.drop_last:
                yield batch


def of_loader(dl, split):
    """The share of torch's DataLoader; None of what has no batches of a known size."""
    if isinstance(dl, Share):
        dl = dl.whole
    if not isinstance(dl, DataLoader):
        return None
    if isinstance(dl.sampler, DistributedSampler):
        return dl  # it is one already
    return Share(dl, split) if isinstance(dl.batch_sampler, BatchSampler) else None


def part_of_batch(size):
    """How many items of a batch each rank gets."""
    world_size = dist.get_world_size()
    if size % world_size:
        raise ValueError(
            f"batches of {size} cannot be split in {world_size} equal parts: take a multiple of "
            f"{world_size}, or leave split_batches out"
        )
    return size // world_size


def part_of_order(order, batch_size=None):
    """This rank's part of the order, or of each of its batches."""
    if not batch_size:
        return _part(order)
    batches = (order[i : i + batch_size] for i in range(0, len(order), batch_size))
    return [item for batch in batches for item in _part(batch)]


def _part(items):
    size = math.ceil(len(items) / dist.get_world_size())
    start = dist.get_rank() * size
    return list(itertools.islice(itertools.cycle(items), start, start + size))
