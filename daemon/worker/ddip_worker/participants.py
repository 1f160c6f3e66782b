# SPDX-License-Identifier: Apache-2.0
"""A collective in a cell that runs on some ranks only: an error at once, not an endless wait.

Only calls from Python are seen, which is where a cell's own collectives come from; what DDP does in
C++ is guarded at its construction and its forward pass (group.py).
"""

import functools
import inspect

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

COLLECTIVES = (
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce "
    "all_reduce_coalesced all_to_all all_to_all_single barrier broadcast broadcast_object_list "
    "gather gather_object monitored_barrier new_group reduce reduce_scatter reduce_scatter_tensor "
    "scatter scatter_object_list"
).split()


class Participants:
    """ranks: those of the cell that is running, in order."""

    def __init__(self, world_size):
        self.world = list(range(world_size))
        self.ranks = self.world
        for name in COLLECTIVES:
            if hasattr(dist, name):
                guarded = self._guard(getattr(dist, name))
                setattr(dist, name, guarded)
                setattr(c10d, name, guarded)

    def check(self, what, group=None):
        """Raises RuntimeError when `what` in that group would wait for ranks that are not here."""
        if len(self.ranks) == len(self.world):
            return
        # a group that this rank is not in waits for nobody: torch says so itself
        known = group is None or group in c10d._world.pg_map
        members = self.world if group is None else dist.get_process_group_ranks(group)
        missing = sorted(set(members) - set(self.ranks)) if known else []
        if missing:
            raise RuntimeError(
                f"{what} would wait for ranks {missing}, but this cell runs on {self.ranks} only; "
                "run it on all ranks, or give it a group of these ranks: "
                f"dist.new_group({self.ranks}, use_local_synchronization=True)"
            )

    def _guard(self, function):
        signature = inspect.signature(function)

        @functools.wraps(function)
        def guarded(*args, **kwargs):
            if len(self.ranks) != len(self.world):
                given = signature.bind(*args, **kwargs).arguments
                if not given.get("use_local_synchronization"):
                    self.check(function.__name__, given.get("group"))
            return function(*args, **kwargs)

        return guarded
