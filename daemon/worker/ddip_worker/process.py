# SPDX-License-Identifier: Apache-2.0
"""What a worker process is told at its start, and which role it then plays.

A process that cannot play its role prints one plain line to stderr and exits; ddipd puts that line
into the answer to whoever asked for the group.
"""

import json
import os
import socket
import stat
import sys

EXIT_CANNOT_START = 3
NEEDED = ("IPython", "cloudpickle", "torch")


def main():
    """Reads fd 0 and becomes a rank, a store or a template."""
    if stat.S_ISSOCK(os.fstat(0).st_mode):
        from ddip_worker import template

        channel = socket.socket(fileno=os.dup(0))
        close_stdin()
        template.end_with_parent()
        import_needed()
        config = template.serve(channel)  # returns in each process forked from here
    else:
        with os.fdopen(os.dup(0), "rb") as f:
            config = json.load(f)
        close_stdin()
        import_needed()
    play(config)


def close_stdin():
    """Nobody types into a worker: reads from fd 0 see the end of file."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def import_needed():
    """Imports what every role needs, or says in one line what this interpreter lacks."""
    import importlib

    for name in NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as e:
            cannot_start(f"the Python interpreter {sys.executable} cannot import {name}: {e}")
        except Exception as e:
            cannot_start(
                f"importing {name} with the Python interpreter {sys.executable} failed: "
                f"{type(e).__name__}: {e}"
            )


def cannot_start(why):
    print(why, file=sys.stderr, flush=True)
    os._exit(EXIT_CANNOT_START)


def play(config):
    """Runs the role to its end; never returns."""
    if config["role"] == "store":
        from ddip_worker import store

        store.run(config)
    else:
        from ddip_worker import rank

        rank.run(config)
