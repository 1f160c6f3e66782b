# SPDX-License-Identifier: Apache-2.0
"""A group's rendezvous: torch's TCPStore in a process of its own, alive when rank 0 is not.

It listens on the loopback interface alone, on a port the kernel chooses: TCPStore has no notion of
who may connect, so it must not be reachable from elsewhere.
"""

import os
import socket

from ddip_worker import lib


def run(config):
    """Reports {"state": "store", "host", "port"} and stays until told to exit."""
    from torch.distributed import TCPStore

    library = lib.Library(config["library"])
    library.start(config["socket"], config["hello"], config["orphan_timeout_s"])
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    host, port = listener.getsockname()
    store = TCPStore(
        host, port, None, True, wait_for_workers=False, master_listen_fd=listener.fileno()
    )
    listener.detach()  # the store closes it
    library.post(lib.STATE, {"state": "store", "host": host, "port": store.port})
    while True:
        message = library.wait(-1)
        if message and message.type == lib.EXIT:
            os._exit(0)
