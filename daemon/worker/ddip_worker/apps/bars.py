# SPDX-License-Identifier: Apache-2.0
"""Progress bars and the table of an epoch once, from the first rank of a cell."""

import sys

import fastprogress.fastprogress as bars

_master_bar, _progress_bar = bars.master_bar, bars.progress_bar


class _NoMasterBar(bars.MasterBar):
    def __init__(self, gen, total=None, **options):
        super().__init__(gen, bars.ProgressBar, total)

    def write(self, line, **options):
        pass

    def show_imgs(self, *args, **options):
        pass

    def update_graph(self, *args, **options):
        pass


def install(shows):
    """shows(): whether this rank shows bars now. Also where the names were copied to already."""
    bars.MAX_COLS = 80  # what a notebook has room for: a bar that wraps is hard to read

    def master_bar(*args, **options):
        return (_master_bar if shows() else _NoMasterBar)(*args, **options)

    def progress_bar(gen, *args, **options):
        if shows():
            return _progress_bar(gen, *args, **options)
        return bars.ProgressBar(gen, total=options.get("total"))

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("fastprogress", "fastai", "fastdownload"):
            for bar in (master_bar, progress_bar):
                if hasattr(module, bar.__name__):
                    setattr(module, bar.__name__, bar)
