# SPDX-License-Identifier: Apache-2.0
"""The quickstart notebook's cells by their ids, and its training as an ordinary script.

There is no second copy of the training: what torchrun and curl run are the notebook's own cells.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs/notebooks/quickstart.ipynb"
SETUP = ("data", "imports", "prepare")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
# what ddipd has done for its ranks before they run the first cell
PREAMBLE = """
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
"""
# a part of the training, and what came of it. speed: samples per second of all ranks; cpu: seconds
# of processor time of a rank per sample of its own, which other programs disturb less
TIMED = """
import json
epochs = {epochs}
dist.barrier()
before, began, cpu = samples, time.perf_counter(), time.process_time()
{loop}
done, took, cpu = samples - before, time.perf_counter() - began, time.process_time() - cpu
result = json.dumps(dict(speed=done * world_size / took, cpu=cpu / done, losses=losses))
"""
# runs TIMED whenever the next file go0, go1, ... appears, and answers with done0, done1, ...
ON_DEMAND = """
for turn in range({turns}):
    while not os.path.exists({folder!r} + f"/go{{turn}}"):
        time.sleep(0.02)
    exec({timed!r})
    if rank == 0:
        with open({folder!r} + "/answer", "w") as file:
            file.write(result)
        os.rename(file.name, {folder!r} + f"/done{{turn}}")
"""


def source(cell_id):
    """The code of a cell, without its %%dip line."""
    [cell] = [c for c in nbformat.read(NOTEBOOK, 4).cells if c["id"] == cell_id]
    first, _, rest = cell.source.partition("\n")
    return f"{rest if first.startswith('%%dip') else cell.source}\n"


def setup():
    """Code that makes the data, the model and all else that the loop needs."""
    return "\n".join(map(source, SETUP))


def training():
    """Code of the whole training, for the ranks of a ddipd group."""
    return f"{setup()}\n{source('train')}"


@contextlib.contextmanager
def torchrun(code, ranks=2):
    """The code as a script under torchrun: its Popen. Nothing of it is left at the end."""
    # as in ddipd's ranks: one thread each (torchrun's default, too), and a host without a name
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="ddip-") as folder:
        script = Path(folder, "train.py")
        script.write_text(f"{PREAMBLE}\n{code}")
        command = [*TORCHRUN, str(ranks), str(script)]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()  # it ends its ranks, then itself
            process.wait()


def race(run, rounds, epochs=2):
    """The training by torchrun and by ddipd in turn: each one's results, one of TIMED a round.

    run: runs code on the two ranks of a group and returns what rank 0 printed. Both sides keep
    their ranks, and one sleeps while the other trains, so that a slow moment of the machine meets
    both alike; who goes first alternates. The first turn of each is left out as a warm-up, but
    `losses` are those of all epochs so far.
    """
    timed = TIMED.format(epochs=epochs, loop=source("train"))
    return race_of(run, rounds, (setup(), timed), (setup(), timed))


def race_of(run, rounds, by_torchrun, by_ddipd):
    """The same of other code: of each side (what it runs first, timed, which sets `result`)."""
    first, timed = by_torchrun
    with tempfile.TemporaryDirectory(prefix="ddip-") as folder:
        on_demand = ON_DEMAND.format(turns=rounds + 1, folder=folder, timed=timed)
        run(by_ddipd[0])
        with torchrun(f"{first}\n{on_demand}") as process:
            sides = [
                lambda turn: json.loads(_by_torchrun(process, folder, turn)),
                lambda turn: json.loads(run(f"{by_ddipd[1]}\nprint(result)").splitlines()[-1]),
            ]
            results = [], []
            for turn in range(rounds + 1):
                for side in (0, 1) if turn % 2 else (1, 0):
                    results[side].append(sides[side](turn))
            process.wait(30)
    return results[0][1:], results[1][1:]


def _by_torchrun(process, folder, turn):
    Path(folder, f"go{turn}").touch()
    done = Path(folder, f"done{turn}")
    while not done.exists():
        if process.poll() is not None:
            raise RuntimeError(f"torchrun exited with status {process.returncode}")
        time.sleep(0.02)
    return done.read_text()
