# SPDX-License-Identifier: Apache-2.0
"""The quickstart's DDP training through ddipd against torchrun: samples per second on two ranks.

.venv/bin/python tests/bench/bench_training.py [--rounds 40] [--epochs 2]
"""

import argparse
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/e2e")]

import quickstart  # noqa: E402
from conftest import fresh_daemon  # noqa: E402

BUDGET = 0.98


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=2, help="of each side in a round")
    parser.add_argument("--build", default="build")
    options = parser.parse_args()
    with fresh_daemon(ROOT / options.build) as daemon:
        daemon.create(name="race")

        def run(code):
            return daemon.run("race", code)

        by_torchrun, by_ddipd = quickstart.race(run, options.rounds, options.epochs)
        daemon.delete("race")
    for name, results in (("torchrun", by_torchrun), ("ddipd", by_ddipd)):
        low, middle, high = statistics.quantiles((each["speed"] for each in results), n=4)
        print(f"{name:8}  {middle:.0f} samples/s (quartiles {low:.0f}, {high:.0f})")
    ratio = median(by_ddipd, "speed") / median(by_torchrun, "speed")
    print(f"throughput of ddipd to torchrun's, medians: {ratio:.3f} (budget: at least {BUDGET})")
    ratio = median(by_ddipd, "cpu") / median(by_torchrun, "cpu")
    print(f"processor time per sample likewise: {ratio:.3f}")
    print(f"{options.rounds} rounds: {' '.join(sys.argv)}")


def median(results, what):
    return statistics.median(each[what] for each in results)


if __name__ == "__main__":
    main()
