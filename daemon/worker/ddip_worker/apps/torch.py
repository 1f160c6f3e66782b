# SPDX-License-Identifier: Apache-2.0
"""torch: the process group is all that a cell needs. For loops that know of none there is `ddp`."""

requires = {"torch": "torch"}


def ddp(*names, **options):
    """%dip -a "ddp model train_dl split_batches=True": these variables, from here on."""
    from ddip_worker.apps import ddp, share

    ddp.command(names, options, share.of_loader)
