# SPDX-License-Identifier: Apache-2.0
"""The lessons' metrics, plain and on two ranks, with several seeds: what the noise is.

.venv/bin/python tests/bench/bench_lessons.py [--seeds 42,43,44] [--lessons text,sgd]
.venv-fastai-v1/bin/python tests/bench/bench_lessons.py --v1        those for fastai 1
"""

import argparse
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))

sys.path.insert(0, str(ROOT / "tests/fastai_v1"))

import lessons  # noqa: E402
from conftest import fresh_daemon  # noqa: E402


def measure(lesson, version, seed, metric, env):
    notebook = lessons.read(f"{lesson}-{version}")
    [cell] = [cell for cell in notebook.cells if "seed(42)" in cell.source]
    cell.source = cell.source.replace("seed(42)", f"seed({seed})")
    with tempfile.TemporaryDirectory(prefix="ddip-") as folder:
        return lessons.metric(lessons.run(notebook, folder, env), metric)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="42,43,44")
    parser.add_argument("--lessons")
    parser.add_argument("--build", default="build")
    parser.add_argument("--v1", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddip-") as site:
        if options.v1:
            from test_lessons_v1 import METRICS, environments_in

            envs = environments_in(Path(site))
        else:
            from test_lessons import METRICS

            envs = lessons.ENVIRONMENT, lessons.ENVIRONMENT
        names = options.lessons.split(",") if options.lessons else list(METRICS)
        seeds = [int(seed) for seed in options.seeds.split(",")]
        print(f"seeds {options.seeds}; mean, and the spread: largest less smallest")
        print("| lesson | metric | plain | on two ranks | largest difference at one seed |")
        print("|---|---|---|---|---|")
        with fresh_daemon(ROOT / options.build, env=envs[1]) as daemon:
            here, there = envs[0], {**envs[1], "DDIP_RUNTIME_DIR": str(daemon.runtime_dir)}
            for lesson in names:
                metric = METRICS[lesson][0]
                with ThreadPoolExecutor(1) as other:
                    plain = [other.submit(measure, lesson, "plain", s, metric, here) for s in seeds]
                    ranks = [measure(lesson, "ddip", seed, metric, there) for seed in seeds]
                print(row(lesson, metric, [each.result() for each in plain], ranks), flush=True)


def row(lesson, metric, plain, ranks):
    sides = [
        f"{statistics.mean(side):.3f} ({max(side) - min(side):.3f})" for side in (plain, ranks)
    ]
    apart = max(abs(a - b) for a, b in zip(plain, ranks, strict=True))
    cells = [lesson, metric, *sides, f"{apart:.3f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
