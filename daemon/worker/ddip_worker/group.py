# SPDX-License-Identifier: Apache-2.0
"""torch.distributed of one rank: one process group per generation, over the group's own store."""

import datetime
import os

import torch
import torch.distributed as dist


class ProcessGroup:
    """Joins and leaves. Only the main thread may call it."""

    def __init__(self, config):
        self.rank = config["rank"]
        self.world_size = config["world_size"]
        self.backend = config["backend"]
        self.device = config.get("gpu_index")  # index in CUDA_VISIBLE_DEVICES, or None
        self.generation = 0

    def set_environment(self):
        """What torch and the libraries above it look for; MASTER_* do not fit: no fixed port."""
        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(self.world_size),
        )

    def join(self, generation, host, port, timeout_s):
        """Leaves the old group, joins generation's, and proves it with an all_reduce.

        Raises what torch raises; nothing of a half-made group is left then.
        """
        self.leave()
        timeout = datetime.timedelta(seconds=timeout_s)
        try:
            store = dist.TCPStore(host, port, None, False, timeout=timeout, wait_for_workers=False)
            # a fresh prefix: keys of an earlier generation would satisfy this one's barriers
            prefixed = dist.PrefixStore(f"generation{generation}", store)
            dist.init_process_group(
                self.backend,
                store=prefixed,
                rank=self.rank,
                world_size=self.world_size,
                **self._options(),
            )
            self._prove()
        except BaseException:
            self.leave()
            raise
        self.generation = generation

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

    def leave(self):
        if dist.is_initialized():
            dist.destroy_process_group()
