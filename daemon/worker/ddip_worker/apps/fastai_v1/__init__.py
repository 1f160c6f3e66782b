# SPDX-License-Identifier: Apache-2.0
"""fastai 1: `learn.fit_one_cycle(1)` and the rest, in DistributedDataParallel, unedited.

shims.py makes fastai 1 run on current libraries; it has to be there before anything of it is
imported. Modules of fastai copy names from each other, so a function is replaced in all of them.
"""

from ddip_worker.apps.fastai_v1 import shims  # noqa: F401

# of the modules named, only fastai 1 has the first, and only old versions of setuptools the second
requires = {"fastai.version": "fastai==1.0.61", "pkg_resources": "setuptools<81"}


def initializer():
    import torch._dynamo  # noqa: F401  DDP does at its first use, and an import must not be interrupted

    from ddip_worker.apps import bars, cell
    from ddip_worker.apps.fastai_v1 import functions

    functions.install()
    from ddip_worker.apps.fastai_v1 import learner

    learner.install()
    bars.install(cell.is_first)
    cell.start()


def rejoined(generation):
    from ddip_worker.apps import cell

    cell.start()


def before_cell(ranks):
    from ddip_worker.apps import cell

    cell.begin(ranks)


def after_cell(ranks, status):
    from ddip_worker.apps import cell

    cell.end()


def ddp(*names, **options):
    """%dip -a "ddp split_batches=True": for every fit from here on.

    "ddp model train_dl": also these variables, for a loop that was written by hand.
    """
    from ddip_worker.apps import ddp
    from ddip_worker.apps.fastai_v1 import shards

    ddp.command(names, options, shards.share_of)
