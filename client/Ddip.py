# SPDX-License-Identifier: Apache-2.0
"""`%load_ext Ddip`, as notebooks written for Ddip say it. Everything is in the package `ddip`."""

from ddip import load_ipython_extension, unload_ipython_extension

__all__ = ["load_ipython_extension", "unload_ipython_extension"]
