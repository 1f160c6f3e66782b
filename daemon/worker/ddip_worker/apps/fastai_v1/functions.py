# SPDX-License-Identifier: Apache-2.0
"""Functions of fastai 1 that are others on ranks: what it asks about them, and its downloads."""

import functools
import sys

import torch.distributed as dist
import torch.hub

from ddip_worker.apps import cell
from ddip_worker.apps.first import in_turn, rank0_first, turns


def install():
    import fastai.torch_core as torch_core

    # before other modules copy them
    torch_core.num_distrib, torch_core.distrib_barrier = lambda: 0, _barrier
    import fastai.basics  # noqa: F401  so that its copies are replaced, too
    from fastai import basic_train, core, datasets

    _replace(core.download_url, _fetched(core.download_url, "overwrite"))
    _replace(datasets.download_data, _fetched(datasets.download_data))
    _replace(datasets.untar_data, _fetched(datasets.untar_data, "force_download"))
    _replace(basic_train.load_learner, _after_export(basic_train.load_learner))
    torch.hub.load_state_dict_from_url = in_turn(torch.hub.load_state_dict_from_url)


def _barrier():
    if cell.is_shared():
        dist.barrier()


def _fetched(function, again=None):
    """Rank 0 downloads, then the others find the files. Asked to do it again, only rank 0 does."""

    @functools.wraps(function)
    def fetched(*args, **kwargs):
        if turns.shared() and dist.get_rank() != 0:
            kwargs.pop(again, None)
        return rank0_first(function, *args, **kwargs)

    return fetched


def _after_export(load_learner):
    """Learner.load and load_data wait for rank 0 by themselves."""

    @functools.wraps(load_learner)
    def loaded(*args, **kwargs):
        _barrier()
        return load_learner(*args, **kwargs)

    return loaded


def _replace(old, new):
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fastai":
            for key in [key for key, value in vars(module).items() if value is old]:
                setattr(module, key, new)
