# SPDX-License-Identifier: Apache-2.0
"""Empty cell through the WebSocket client: seconds from execute() to `done`, per number of ranks.

.venv/bin/python tests/bench/bench_cell.py [--cells 2000] [--ranks 2,4]
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))

import ddip  # noqa: E402
from conftest import fresh_daemon  # noqa: E402


def quantile(times, share):
    return sorted(times)[int(share * len(times))]


def measure(client, code, group, count):
    times = []
    for _ in range(count):
        started = time.perf_counter()
        for _event in client.execute(code, group):
            pass
        times.append(time.perf_counter() - started)
    return times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--build", default="build")
    parser.add_argument("--code", default="pass")
    options = parser.parse_args()
    with fresh_daemon(ROOT / options.build) as daemon, ddip.connect(daemon.socket) as client:
        for ranks in map(int, options.ranks.split(",")):
            name = f"r{ranks}"
            daemon.create(ranks=ranks, name=name)
            measure(client, options.code, name, 100)
            times = measure(client, options.code, name, options.cells)
            p50, p90 = (quantile(times, share) * 1e3 for share in (0.5, 0.9))
            mean = statistics.mean(times) * 1e3
            print(f"{ranks} ranks: p50 {p50:.3f} ms, p90 {p90:.3f} ms, mean {mean:.3f} ms")
            daemon.delete(name)


if __name__ == "__main__":
    main()
