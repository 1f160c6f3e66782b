# SPDX-License-Identifier: Apache-2.0
"""Kernels that are reached over Unix sockets.

Jupyter's own way is to look for free TCP ports and to let the kernel bind them a moment later; on a
machine where much goes on, something else has one of them by then, and the kernel dies.
"""

import secrets
import tempfile

from jupyter_client import AsyncKernelManager, KernelManager


def _sockets():
    """Where they lie: Jupyter's default is one name in the working folder, for all kernels."""
    path = f"{tempfile.gettempdir()}/ddip-kernel-{secrets.token_hex(8)}"
    return {"transport": "ipc", "ip": path}


class UnixKernelManager(AsyncKernelManager):
    """For NotebookClient(kernel_manager_class=...)."""

    def __init__(self, **options):
        super().__init__(**_sockets(), **options)


def start(env, seconds=60):
    """(manager, client) of a new kernel that is ready."""
    manager = KernelManager(kernel_name="python3", **_sockets())
    manager.start_kernel(env=env)
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=seconds)
    except RuntimeError:
        client.stop_channels()
        manager.shutdown_kernel()
        raise
    return manager, client
