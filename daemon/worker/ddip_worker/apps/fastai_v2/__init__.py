# SPDX-License-Identifier: Apache-2.0
"""fastai 2: `learn.fit_one_cycle(1)` and the rest, in DistributedDataParallel, unedited.

fastai is imported by the initializer only: its modules copy names from each other, so the progress
bars and downloads must be in place before.
"""

requires = {"fastai": "fastai"}


def initializer():
    from ddip_worker.apps import bars, cell
    from ddip_worker.apps.fastai_v2 import downloads

    bars.install(cell.is_first)
    downloads.install()
    import torch._dynamo  # noqa: F401  DDP does at its first use, and an import must not be interrupted

    from ddip_worker.apps.fastai_v2 import learner

    learner.install()
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
    from ddip_worker.apps.fastai_v2 import shards

    ddp.command(names, options, shards.share_of)
