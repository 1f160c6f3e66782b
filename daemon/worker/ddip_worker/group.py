# SPDX-License-Identifier: Apache-2.0
"""torch.distributed of one rank: one process group per generation, over the group's own store.

Everything that makes sockets of a process group happens in the library's bracket, so that the
library's thread can shut them while the interpreter waits in a collective. That is the abort which
gloo lacks. NCCL has one, which a thread of nccl.py calls at the same moment.
"""

import datetime
import functools
import inspect
import os

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ddip_worker import nccl

# Joining is quick where everybody is there; a rank that waits for one that is not must not outlast
# the patience of whoever waits for the group. Collectives later get torch's own default.
DEFAULT_TIMEOUT = c10d.default_pg_timeout


class ProcessGroup:
    """Joins and leaves. Only the main thread may call it."""

    def __init__(self, config, library, participants):
        self.rank = config["rank"]
        self.world_size = config["world_size"]
        self.backend = config["backend"]
        self.device = config.get("gpu_index")  # index in CUDA_VISIBLE_DEVICES, or None
        self.generation = 0
        self._library = library
        if self.backend == "nccl":
            nccl.watch(library)
        self._bracket_new_groups()
        _guard_models(participants)

    def set_environment(self):
        """What torch and the libraries above it look for; MASTER_* do not fit: no fixed port."""
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(self.world_size),
        )

    def join(self, generation, nonce, host, port, timeout_s):
        """Leaves the old group, joins generation's, and proves it with an all_reduce.

        Raises what torch raises; nothing of a half-made group is left then.
        """
        self.leave()
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            with self._library.bracket():
                store = dist.TCPStore(
                    host, port, None, False, timeout=timeout, wait_for_workers=False
                )
                # A fresh prefix: keys of an earlier attempt would satisfy this one's barriers, and
                # name sockets that are no more. The nonce is for a generation whose number is used
                # again: a daemon that died on a full disk could not write down that it had begun.
                dist.init_process_group(
                    self.backend,
                    store=dist.PrefixStore(f"generation{generation}-{nonce}", store),
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=timeout,
                    **self._options(),
                )
                self._prove()
            c10d._set_pg_timeout(DEFAULT_TIMEOUT)
        except BaseException:
            self.leave()
            raise
        self.generation = generation

    def leave(self):
        """Leaves the group, if there is one.

        Its connections are shut first: a model that still holds the group would otherwise go on
        talking in it without a word.
        """
        self._library.abort()
        if dist.is_initialized():
            if self.backend == "nccl":  # destroying waits for what an abort has left unfinished
                nccl.abort()
            dist.destroy_process_group()
        # after an init that failed the count differs between ranks, and it is part of store keys
        c10d._world.group_count = 0

    def collectives(self):
        """How many this generation has begun."""
        if not dist.is_initialized():
            return None
        return c10d._get_default_group()._get_sequence_number_for_group()

    def _options(self):
        if self.device is None:
            return {}
        torch.cuda.set_device(self.device)
        return {"device_id": torch.device("cuda", self.device)}

    def _prove(self):
        where = "cpu" if self.device is None else f"cuda:{self.device}"
        probe = torch.full((1,), float(self.rank), device=where)
        dist.all_reduce(probe)
        expected = self.world_size * (self.world_size - 1) / 2
        if probe.item() != expected:
            raise RuntimeError(
                f"the first all_reduce gave {probe.item()} instead of {expected}: "
                "the ranks do not belong to the same process group"
            )

    def _bracket_new_groups(self):
        """new_group, init_device_mesh and the like all make their sockets in this one function."""
        make = c10d._new_process_group_helper

        @functools.wraps(make)
        def bracketed(*args, **kwargs):
            with self._library.bracket():
                return make(*args, **kwargs)

        c10d._new_process_group_helper = bracketed


def _guard_models(participants):
    """A DDP model of an earlier generation, or in a cell without all its ranks, says so."""
    model_class = torch.nn.parallel.DistributedDataParallel
    make, forward = model_class.__init__, model_class.forward
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        participants.check("DistributedDataParallel", given.get("process_group"))
        make(self, *args, **kwargs)

    @functools.wraps(forward)
    def guarded(self, *inputs, **kwargs):
        if self.process_group not in c10d._world.pg_map:
            raise RuntimeError(
                "this model was wrapped in DistributedDataParallel before the process group was "
                "rebuilt; wrap it again: model = DistributedDataParallel(model.module)"
            )
        participants.check("a model in DistributedDataParallel", self.process_group)
        return forward(self, *inputs, **kwargs)

    model_class.__init__, model_class.forward = made, guarded
