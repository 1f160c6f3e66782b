# SPDX-License-Identifier: Apache-2.0
"""The fit of a ported lesson against the same fit by torchrun in fastai's own distrib_ctx.

.venv/bin/python tests/bench/bench_fastai.py [--lesson vision] [--rounds 12]

Both are on two CPU ranks, in turn in one run. fastai sends the order of the items through the GPU,
so there its DistributedDL is given a way without one; SyncBatchNorm, which needs a GPU too, is off.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/e2e")]

import lessons  # noqa: E402
import quickstart  # noqa: E402
from conftest import fresh_daemon  # noqa: E402
from test_lessons import METRICS  # noqa: E402

BUDGET = 0.95
# cells that come before the fit; those that only show something are left out
SETUP = ("imports", "data", "loaders", "learner")
OF_TORCHRUN = """
import os
os.environ["ACCELERATE_USE_CPU"] = "true"
from fastai.distributed import DistributedDL

def broadcast(self, numbers, rank):
    numbers = torch.tensor(numbers)
    dist.broadcast(numbers, rank)
    return numbers.tolist()

DistributedDL._broadcast = broadcast
"""
TIMED = """
import json, time
import torch.distributed as dist
dist.barrier()
began, cpu = time.perf_counter(), time.process_time()
{fit}
took, cpu = time.perf_counter() - began, time.process_time() - cpu
result = json.dumps(dict(took=took, cpu=cpu, steps=len(learn.recorder.losses)))
"""
IN_CONTEXT = """
with learn.distrib_ctx(sync_bn=False):
    {fit}
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lesson", default="vision", choices=METRICS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--build", default="build")
    options = parser.parse_args()
    cells = {cell.id: cell.source for cell in lessons.read(f"{options.lesson}-plain").cells}
    os.environ.update(lessons.ENVIRONMENT)
    with (
        tempfile.TemporaryDirectory(prefix="ddip-") as folder,
        fresh_daemon(ROOT / options.build, env=lessons.ENVIRONMENT) as daemon,
    ):
        os.chdir(folder)  # also torchrun's
        for files in ("files", "pictures"):
            exec(cells.get(files, ""), {})
        daemon.create(name="race", app="fastai_v2", cwd=folder)
        first = "\n".join(cells[name] for name in SETUP if name in cells)
        fit = cells["train"]
        by_torchrun, by_ddipd = quickstart.race_of(
            lambda code: daemon.run("race", code),
            options.rounds,
            (first + OF_TORCHRUN, TIMED.format(fit=IN_CONTEXT.format(fit=fit))),
            (first, TIMED.format(fit=fit)),
        )
        daemon.delete("race")
    report(by_torchrun, by_ddipd)
    print(f"{options.rounds} rounds: {' '.join(sys.argv)}")


def report(by_torchrun, by_ddipd):
    assert by_torchrun[0]["steps"] == by_ddipd[0]["steps"]
    for name, results in (("torchrun", by_torchrun), ("ddipd", by_ddipd)):
        low, middle, high = statistics.quantiles((each["took"] for each in results), n=4)
        print(f"{name:8}  {middle:.2f} s (quartiles {low:.2f}, {high:.2f})")
    for what, name in (("took", "throughput"), ("cpu", "the inverse of processor time")):
        pairs = zip(by_torchrun, by_ddipd, strict=True)
        ratio = statistics.median(one[what] / other[what] for one, other in pairs)
        print(f"{name}, ddipd's to torchrun's, median of rounds: {ratio:.3f}")
    print(f"{by_ddipd[0]['steps']} steps in a fit; budget: at least {BUDGET} of the throughput")


if __name__ == "__main__":
    main()
