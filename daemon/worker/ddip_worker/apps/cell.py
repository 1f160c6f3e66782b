# SPDX-License-Identifier: Apache-2.0
"""The cell that is running: its ranks, what fastai takes from the environment, random numbers.

fastai asks RANK and WORLD_SIZE whether it is distributed, at every loss it records. In a cell that
does not run on all ranks it must not be: there the first rank is the only one that counts.

Ranks draw the same random numbers outside of `fit`, so that splits and vocabularies made at random
are the same: they start from one seed, and nothing that one of them does alone moves it on.
"""

import os
import random

import numpy as np
import torch
import torch.distributed as dist

from ddip_worker.apps import agree

_ranks = []
_before = None  # (environment, random states) to put back after a cell of some ranks


def start():
    """A new process group: every rank starts from the same seed. Collective."""
    seed_all(agree.from_rank_0(random.SystemRandom().getrandbits(63)))


def begin(ranks):
    global _ranks, _before
    _ranks = ranks
    if not is_shared():
        names = ("RANK", "WORLD_SIZE")
        _before = {name: os.environ[name] for name in names}, _random_state()
        os.environ.update(RANK=str(ranks.index(dist.get_rank())), WORLD_SIZE="1")


def end():
    global _before
    if _before:
        environment, state = _before
        os.environ.update(environment)
        _set_random_state(state)
    _before = None


def is_shared():
    """True if there are several ranks and the cell runs on all of them."""
    return 1 < len(_ranks) == dist.get_world_size()


def is_alone():
    return len(_ranks) == 1


def is_first():
    """The rank that shows bars and tables."""
    return not _ranks or dist.get_rank() == _ranks[0]


def ranks():
    return list(_ranks)


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def _random_state():
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_random_state(state):
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
