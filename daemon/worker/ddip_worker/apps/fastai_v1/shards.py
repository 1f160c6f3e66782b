# SPDX-License-Identifier: Apache-2.0
"""DataLoaders of which each rank reads its share.

Training shares are equal, filled up from the order's start, because each step of a rank needs those
of the others. Validation shares are not filled up: nothing there waits for another rank, and each
item counts once. With `split` it is each batch that is shared out, as share.py says.
"""

import contextlib
import math

import numpy as np
import torch.distributed as dist
from fastai.basics import DeviceDataLoader
from torch.utils.data import Sampler

from ddip_worker.apps import agree, share


def share_of(dl, split):
    """The share of a DataLoader of fastai's or torch's; None of anything else."""
    if isinstance(dl, DeviceDataLoader):
        return shard(dl, fill=True, split=split)
    return share.of_loader(dl, split)


def shard(dl, fill, split=False):
    """The same DeviceDataLoader, reading this rank's share only."""
    given = vars(dl.dl).get("init_kwargs")
    if given is None or given["batch_sampler"] is not None or not hasattr(dl.dl.sampler, "__len__"):
        return dl
    dataset = dl.dl.dataset
    if hasattr(dataset, "fill_row"):  # text for a language model
        return _shard_of_streams(dl, given, split)
    if len(dl.dl.sampler) < dist.get_world_size():
        return dl
    if not split:
        return dl.new(shuffle=False, sampler=Share(dl.dl.sampler, fill))
    parts = Parts(dl.dl.sampler, dl.batch_size, given["drop_last"])
    return dl.new(shuffle=False, sampler=parts, batch_size=parts.size)


class Share(Sampler):
    """This rank's part of the order of rank 0's sampler: every world_size-th item of it."""

    def __init__(self, sampler, fill):
        self.sampler, self.fill = sampler, fill
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def __len__(self):
        return len(range(0 if self.fill else self.rank, len(self.sampler), self.world_size))

    def __iter__(self):
        order = agree.numbers_from_rank_0([int(i) for i in self.sampler])
        if self.fill:
            order += order[: -len(order) % self.world_size]
        return iter(order[self.rank :: self.world_size])


class Parts(Sampler):
    """This rank's part of each batch of rank 0's sampler: `size` items."""

    def __init__(self, sampler, batch_size, drop_last):
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.size = share.part_of_batch(batch_size)

    def __len__(self):
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole * self.size + (
            0 if self.drop_last else math.ceil(rest / dist.get_world_size())
        )

    def __iter__(self):
        order = agree.numbers_from_rank_0([int(i) for i in self.sampler])
        if self.drop_last:
            order = order[: len(order) // self.batch_size * self.batch_size]
        return iter(share.part_of_order(order, self.batch_size))


class Rows(Sampler):
    """The rows of each step of a language model's text that are this rank's."""

    def __init__(self, streams, rows):
        self.streams, self.rows = streams, rows

    def __len__(self):
        return len(self.streams) // dist.get_world_size()

    def __iter__(self):
        first = dist.get_rank() * self.rows
        for step in range(0, len(self.streams), self.streams.bs):
            yield from range(step + first, step + first + self.rows)


def _shard_of_streams(dl, given, split):
    whole, kind = dl.dl.dataset, _streams_of(type(dl.dl.dataset))
    rows = share.part_of_batch(whole.bs) if split else whole.bs
    streams = kind(
        whole.dataset,
        lengths=whole.lengths,
        bs=rows * dist.get_world_size(),
        bptt=whole.bptt,
        backwards=whole.backwards,
        shuffle=whole.shuffle,
    )
    streams.seed = agree.from_rank_0(np.random.randint(2**31))
    streams.allocate_buffers()  # the first epoch is then shuffled, too, as it is in one process
    options = {**given, "sampler": Rows(streams, rows), "shuffle": False, "batch_size": rows}
    loader = type(dl.dl)(streams, **options)
    return DeviceDataLoader(loader, dl.device, dl.tfms, dl.collate_fn)


def _streams_of(kind):
    class Streams(kind):
        """The text cut into as many streams as all ranks have rows, in one order on all of them."""

        def on_epoch_begin(self, **kwargs):
            with _numpy_seed(self.seed):
                super().on_epoch_begin(**kwargs)
            self.seed += 1

    return Streams


@contextlib.contextmanager
def _numpy_seed(seed):
    state = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(state)
