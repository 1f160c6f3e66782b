# SPDX-License-Identifier: Apache-2.0
"""Stand-in: torchvision's operators, where its library does not load beside a torch for CPUs.

The package index has torchvision's build for CUDA only. Its Python code, which is all that fastai
uses, wants two operators to be declared. Put this folder on PYTHONPATH; with a torch for CUDA it
does nothing.
"""

import importlib.abc
import sys

OPERATORS = ("nms", "qnms")
declared = []  # they last as long as their library object


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare()


def _declare():
    import torch

    if torch.version.cuda is None:
        declared.append(torch.library.Library("torchvision", "DEF"))
        for name in OPERATORS:
            declared[0].define(f"{name}() -> ()")


sys.meta_path.insert(0, _BeforeTorchvision())
