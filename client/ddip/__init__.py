# SPDX-License-Identifier: Apache-2.0
"""PyTorch DDP, interactively: notebook magics (`%load_ext ddip`) and a Python API (`connect`)."""

from .api import Cell, Client, connect
from .errors import DdipError, NotRunning, RankError

__version__ = "0.1.0"
__all__ = ["Cell", "Client", "DdipError", "NotRunning", "RankError", "connect"]


def load_ipython_extension(shell):
    """`%load_ext ddip`. The import waits until here: the Python API needs no IPython."""
    from . import magics

    magics.load(shell)


def unload_ipython_extension(shell):
    """`%unload_ext ddip`."""
    from . import magics

    magics.unload(shell)
