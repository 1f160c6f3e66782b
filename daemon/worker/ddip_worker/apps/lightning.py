# SPDX-License-Identifier: Apache-2.0
"""Lightning: `Trainer(...)` in a cell trains on all ranks, in the group that they are in.

Lightning asks the environment for defaults of Trainer's arguments, and whether somebody else has
made the processes; that torchrun did is what it believes.
"""

import os

import torch
import torch.distributed as dist

requires = {"lightning": "lightning"}


def before_cell(ranks):
    """On all ranks Trainer finds them all; in the cell of one rank it trains there alone."""
    names = ("PL_TRAINER_DEVICES", "PL_TRAINER_STRATEGY", "TORCHELASTIC_RUN_ID")
    if len(ranks) == dist.get_world_size() > 1:
        os.environ.update(zip(names, (str(len(ranks)), "ddp", "ddip"), strict=True))
    else:
        for name in names:
            os.environ.pop(name, None)
        os.environ["PL_TRAINER_DEVICES"] = "1"
    os.environ["PL_TRAINER_ACCELERATOR"] = "gpu" if torch.cuda.is_available() else "cpu"
