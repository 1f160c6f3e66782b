# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's accelerate: `Accelerator()` in a cell takes the group that the rank is in.

It does so by itself on GPUs; on CPU ranks it has to be told that it may use the CPU.
"""

import os

import torch

requires = {"accelerate": "accelerate"}


def initializer():
    if not torch.cuda.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
