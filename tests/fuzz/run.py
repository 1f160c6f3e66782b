#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fuzzes each target with clang's libFuzzer and sanitizers; what is found lies in build-fuzz/.

Inputs that reach new code are added to build-fuzz/corpus/NAME, those that crash a target to
build-fuzz/finds; tests/fuzz/corpus/NAME is read and never changed. Ends with 1 when one crashed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path("tests/fuzz")
BUILD = Path("build-fuzz")
FLAGS = {
    "CC": "clang",
    "SANITIZE": "-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined",
    "OPT": "-O1 -g -fno-omit-frame-pointer",
}
LIMITS = ["-timeout=20", "-rss_limit_mb=2048", "-max_len=4096", "-print_final_stats=1"]
STATS = re.compile(r"^stat::(\w+):\s*(\d+)", re.M)
COVERAGE = re.compile(r"\bcov: (\d+)")


def require_fuzzer() -> None:
    """Ends with the name of the Debian package when clang or its libFuzzer is missing."""
    if not shutil.which("clang"):
        sys.exit("clang is missing: apt-get install clang")
    probe = "#include <stdint.h>\n#include <stddef.h>\n"
    probe += "int LLVMFuzzerTestOneInput(const uint8_t *d, size_t n) { return d && n ? 0 : 0; }\n"
    command = ["clang", "-fsanitize=fuzzer,address", "-x", "c", "-", "-o", os.devnull]
    tried = subprocess.run(command, input=probe, capture_output=True, text=True)
    if tried.returncode:
        version = subprocess.run(["clang", "-dumpversion"], capture_output=True, text=True).stdout
        package = f"libclang-rt-{version.partition('.')[0]}-dev"
        sys.exit(f"{tried.stderr}clang has no libFuzzer: apt-get install {package}")


def build(names: list[str]) -> None:
    targets = [f"{BUILD}/fuzz/fuzz_{name}" for name in names]
    settings = [f"{key}={value}" for key, value in {**FLAGS, "B": str(BUILD)}.items()]
    command = ["make", "--no-print-directory", "-s", f"-j{os.cpu_count()}", *settings, *targets]
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit("the targets could not be built")


def fuzz(name: str, seconds: int) -> bool:
    """Runs one target; prints a line of what it did, or all of it when it crashed."""
    found, finds, log = BUILD / "corpus" / name, BUILD / "finds", BUILD / f"{name}.log"
    for folder in (found, finds):
        (ROOT / folder).mkdir(parents=True, exist_ok=True)
    before = len(list((ROOT / found).iterdir()))
    command = [BUILD / "fuzz" / f"fuzz_{name}", f"-max_total_time={seconds}", *LIMITS]
    command += [f"-artifact_prefix={finds}/{name}-", found, HERE / "corpus" / name]
    with open(ROOT / log, "w", encoding="utf-8") as out:
        status = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out).returncode
    text = (ROOT / log).read_text(encoding="utf-8", errors="replace")
    if status:
        print(text[-8000:], f"{name}: CRASHED (status {status}), see {finds} and {log}", sep="\n")
        return False
    stats = dict(STATS.findall(text))
    coverage = (COVERAGE.findall(text) or ["?"])[-1]
    new = len(list((ROOT / found).iterdir())) - before
    runs = f"{stats.get('number_of_executed_units', '?')} runs"
    rate = f"{stats.get('average_exec_per_sec', '?')}/s"
    print(f"{name}: {runs}, {rate}, coverage {coverage}, {new} new inputs, no crash", flush=True)
    return True


def main() -> int:
    names = sorted(p.stem.removeprefix("fuzz_") for p in (ROOT / HERE).glob("fuzz_*.c"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"targets: {', '.join(names)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default 60)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="targets at once")
    options = parser.parse_args()
    chosen = options.names or names
    if unknown := set(chosen) - set(names):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    require_fuzzer()
    build(chosen)
    with ThreadPoolExecutor(options.jobs) as pool:
        good = list(pool.map(lambda name: fuzz(name, options.seconds), chosen))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
