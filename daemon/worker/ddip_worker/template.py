# SPDX-License-Identifier: Apache-2.0
"""The template: a warm process, torch and IPython imported, that ranks and stores are forked from.

It stays single-threaded and never touches CUDA or a parallel torch operation: a forked child
inherits neither threads nor a usable CUDA context. Requests come over a SOCK_SEQPACKET socket, one
JSON object each, with the descriptor that becomes the child's fd 1 and 2 until it makes its own;
the end of the socket is the end of the template.
"""

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import warnings

REQUEST_MAX = 1 << 20
# What a first traceback, inspection, DDP model or optimizer imports for seconds: taken in while
# nothing is asked.
LATER = (
    "stack_data",
    "pygments.formatters.terminal256",
    "pygments.formatters.html",
    "pygments.lexers.python",
    "IPython.core.guarded_eval",
    "numpy",
    "torch._dynamo",
)
IDLE_S = 1.0
PR_SET_PDEATHSIG = 1


def end_with_parent():
    """Ends with the daemon also while it is importing; what is forked later does not inherit it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(channel):
    """Answers {"pid": N} per request. Returns only in the forked children: their configuration."""
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*")
    import torch.distributed  # noqa: F401  what every child needs, imported once

    from ddip_worker import rank, store  # noqa: F401

    channel.send(
        json.dumps({"ready": True, "threads": len(os.listdir("/proc/self/task"))}).encode()
    )
    later = list(LATER)
    while True:
        if later and not select.select([channel], [], [], IDLE_S)[0]:
            import_quietly(later.pop(0))
            continue
        request, fds, _, _ = socket.recv_fds(channel, REQUEST_MAX, 1)
        if not request:
            os._exit(0)
        config = json.loads(request)
        pid = fork_orphan(channel, config, fds[0])
        if pid is None:
            return config
        os.close(fds[0])
        channel.send(json.dumps({"pid": pid}).encode())


def import_quietly(name):
    with contextlib.suppress(Exception):  # not installed, or not importable: then ranks will see
        importlib.import_module(name)


def fork_orphan(channel, config, output):
    """Forks twice: the child's parent becomes ddipd. Returns its pid, or None in the child."""
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        child = os.fork()
        if child:
            os.write(write_end, b"%d" % child)
            os._exit(0)
        become_child(channel, config, output, (read_end, write_end))
        return None
    os.close(write_end)
    with os.fdopen(read_end, "rb") as f:
        pid = int(f.read())
    os.waitpid(middle, 0)
    return pid


def become_child(channel, config, output, pipe_ends):
    """What a fresh interpreter would have: its own session, folder, output and signals."""
    os.setsid()
    channel.close()
    for fd in pipe_ends:
        os.close(fd)
    sys.stdout.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.chdir(config["cwd"])
    except OSError as e:
        from ddip_worker.process import cannot_start

        cannot_start(f"the working folder {config['cwd']}: {e.strerror}")
