#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints how long the files and functions are, and fails when a limit is broken.

Whatever is longer than these budgets has taken on a second job: split it by noun.
"""

import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_BUDGET, FILE_HARD = 400, 600
MEDIAN_BUDGET, P90_BUDGET, FUNCTION_HARD, MAIN_HARD = 15, 45, 80, 60
LANGUAGES = {
    "C": [("daemon/", ".c"), ("daemon/", ".h"), ("proto/", ".c"), ("proto/", ".h")],
    "Python": [("client/", ".py"), ("daemon/worker/ddip_worker/", ".py")],
}


@dataclass
class Function:
    name: str
    path: str
    line: int
    length: int
    static: bool


def tool(name: str, package: str) -> str:
    """Path of a program; ends with a message that says how to get it."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        sys.exit(f"{name} is missing: {package}")
    return found


def sources() -> list[str]:
    """Files of the project: tracked, or new and not ignored; no symlinks."""
    options = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    command = [tool("git", "apt-get install git"), *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"a git checkout is needed to know the project's files: {run.stderr}")
    paths = (ROOT / name for name in sorted(set(run.stdout.split("\0"))) if name)
    return [str(p.relative_to(ROOT)) for p in paths if p.is_file() and not p.is_symlink()]


def functions(paths: list[str]) -> list[Function]:
    if not paths:
        return []
    options = ["--output-format=json", "--languages=C,Python", "--langmap=C:+.h", "--fields=+ne"]
    kinds = ["--kinds-C=f", "--kinds-Python=fm"]
    ctags = tool("ctags", "apt-get install universal-ctags")
    command = [ctags, *options, *kinds, "-f", "-", *paths]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"ctags failed, universal-ctags with JSON output is needed:\n{run.stderr}")
    tags = [json.loads(line) for line in run.stdout.splitlines()]
    return [
        Function(t["name"], t["path"], t["line"], t["end"] - t["line"] + 1, t.get("file", False))
        for t in tags
        if t["_type"] == "tag" and "end" in t and t["kind"] in ("function", "member")
    ]


def percentile(lengths: list[int], share: float) -> int:
    ordered = sorted(lengths)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def file_lengths(paths: list[str]) -> dict[str, int]:
    return {p: len((ROOT / p).read_bytes().splitlines()) for p in paths}


def broken_files(lengths: dict[str, int]) -> list[str]:
    return [f"{p}:1: {n} lines, at most {FILE_HARD}" for p, n in lengths.items() if n > FILE_HARD]


def broken_functions(found: list[Function]) -> list[str]:
    broken = []
    for f in found:
        limit = MAIN_HARD if f.name == "main" else FUNCTION_HARD
        if f.length > limit:
            broken.append(f"{f.path}:{f.line}: {f.name} has {f.length} lines, at most {limit}")
    return broken


def report(language: str, paths: list[str]) -> list[str]:
    """Prints one language's tables; returns what breaks a limit."""
    lengths, found = file_lengths(paths), functions(paths)
    counts = [f.length for f in found] or [0]
    median, p90 = statistics.median(counts), percentile(counts, 0.9)
    total, longest = sum(lengths.values()), max(lengths.values(), default=0)
    print(
        f"{language:<8}{len(paths):>6}{total:>8}{longest:>9}"
        f"{len(found):>11}{median:>8g}{p90:>6}{max(counts):>9}"
    )
    broken = broken_files(lengths) + broken_functions(found)
    if median > MEDIAN_BUDGET:
        broken.append(f"{language}: functions have a median of {median:g}, at most {MEDIAN_BUDGET}")
    if p90 > P90_BUDGET:
        broken.append(f"{language}: 90% of functions have {p90} lines or less, {P90_BUDGET} wanted")
    return broken


def print_longest(paths: list[str]) -> None:
    print("\nlongest functions")
    for f in sorted(functions(paths), key=lambda f: -f.length)[:10]:
        print(f"{f.length:>6}  {f.path}:{f.line} {f.name}")
    print(f"\nfiles over {FILE_BUDGET} lines")
    over = {p: n for p, n in file_lengths(paths).items() if n > FILE_BUDGET}
    for path, count in sorted(over.items(), key=lambda item: -item[1]):
        print(f"{count:>6}  {path}")
    if not over:
        print("  none")


def main() -> int:
    every, broken, counted = sources(), [], []
    print("lines      files   total  longest  functions  median   p90  longest")
    for language, rooms in LANGUAGES.items():
        paths = [p for p in every if any(p.startswith(d) and p.endswith(e) for d, e in rooms)]
        broken += report(language, paths)
        counted += paths
    print_longest(counted)
    print("", *broken, sep="\n")
    print(f"size: {len(broken)} limits broken" if broken else "size: within every limit")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
