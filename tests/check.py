#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs every check in order and ends with one line of counts: what `make check` and CI run.

With --asan the daemon, the worker library and the unit tests are built with AddressSanitizer and
UndefinedBehaviorSanitizer, and the unit and end-to-end tests run against those. With --fastai-v1
only the tests of that app run, with the interpreter that runs this.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHAOS_STEPS, CHAOS_SEEDS = 40, (1, 2, 3)
# Files of tests/e2e that run side by side with the others: most tests wait more than they compute.
LANES = {
    "e2e-apps": (
        *("apps", "contract", "fastai", "lessons", "libraries", "parallel", "quickstart"),
        "leftovers",  # waits, where the others compute
    ),
    "e2e-restarts": (
        *("deaths", "idempotency", "reconnect", "record", "restart"),
        *("feel", "jupyterlab", "magics"),  # notebooks
    ),
}
LOCK = threading.Lock()  # of results, and of the output of one run after another
UNIT_SECONDS = 300  # one test program; one that takes longer hangs
REAL_LIBRARIES = {"DDIP_REAL_CUDART": "libcudart.so.*", "DDIP_REAL_NCCL": "libnccl.so.*"}
ASAN_BUILD = {
    "SANITIZE": "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
    "OPT": "-O1 -g -fno-omit-frame-pointer",
}
TAP = re.compile(r"(not )?ok\b\s*\d*\s*-?\s*(.*?)\s*(?:#\s*(SKIP|TODO)\b\s*(.*))?$", re.I)
TAP_PLAN = re.compile(r"1\.\.(\d+)\s*(?:#\s*SKIP\b\s*(.*))?$", re.I)


class Results:
    """Counts. A skip is accepted only for what the machine lacks, said as `needs ...`."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []
        self.skipped: list[str] = []

    def add(self, name: str, good: bool, why: str = "") -> None:
        if good:
            self.passed += 1
        else:
            self.failed.append(f"{name}: {why}" if why else name)

    def skip(self, name: str, reason: str) -> None:
        if reason.startswith("needs "):
            self.skipped.append(f"{name}: {reason}")
        else:
            self.add(name, False, f'skipped, and not because of a lack: "{reason}"')

    def close(self) -> int:
        for title, names in (("skipped", self.skipped), ("failed", self.failed)):
            for name in names:
                print(f"{title}: {name}")
        print(f"{self.passed} passed, {len(self.failed)} failed, {len(self.skipped)} skipped")
        return 1 if self.failed or not self.passed else 0


def call(*command: object, **options) -> int:
    """Runs a command whose output goes straight through."""
    return subprocess.run([str(word) for word in command], cwd=ROOT, **options).returncode


@contextmanager
def section(name: str, results: Results):
    print(f"\n===== {name} =====", flush=True)
    passed, failed, skipped = results.passed, len(results.failed), len(results.skipped)
    start = time.monotonic()
    yield
    failed, skipped = len(results.failed) - failed, len(results.skipped) - skipped
    counts = f"{results.passed - passed} good, {failed} bad, {skipped} left out"
    print(f"----- {name}: {counts} in {time.monotonic() - start:.1f} s", flush=True)


# --- unit: TAP programs and fuzz replays ----------------------------------------------------------


def stream(command: list[object], on_line: Callable[[str], None]) -> str:
    """Feeds each line of output to on_line; returns what was wrong with the end, or nothing."""
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    alarm = threading.Timer(UNIT_SECONDS, os.killpg, (process.pid, signal.SIGKILL))
    alarm.start()
    for line in process.stdout:
        on_line(line.rstrip("\n"))
    status = process.wait()
    late = not alarm.is_alive()
    alarm.cancel()
    return f"killed after {UNIT_SECONDS} s" if late else f"exit status {status}" if status else ""


def run_tap(program: Path, results: Results) -> None:
    count, plan, failed = 0, None, len(results.failed)

    def on_line(line: str) -> None:
        nonlocal count, plan
        if match := TAP_PLAN.match(line):
            plan = int(match[1])
            if match[2]:
                results.skip(program.name, match[2])
        elif match := TAP.match(line):
            count += 1
            name = f"{program.name}: {match[2] or count}"
            if (match[3] or "").upper() == "SKIP":
                results.skip(name, match[4])
            else:
                results.add(name, not match[1])
        if not line.startswith("ok ") and not TAP_PLAN.match(line):
            print(f"  {line}", flush=True)

    start = time.monotonic()
    trouble = stream([program], on_line)
    if trouble and len(results.failed) == failed or trouble.startswith("killed"):
        results.add(program.name, False, f"{trouble} after {count} results")
    elif plan != count:
        planned = "no plan was printed" if plan is None else f"{plan} results were planned"
        results.add(program.name, False, f"{planned}, {count} came")
    print(f"{program.name}: {count} in {time.monotonic() - start:.2f} s", flush=True)


def run_replay(program: Path, results: Results) -> None:
    corpus = ROOT / "tests/fuzz/corpus" / program.name.removeprefix("fuzz_")
    inputs = len(list(corpus.glob("*")))
    trouble = stream([program, corpus], lambda line: print(f"  {line}", flush=True))
    results.add(program.name, not trouble and inputs > 0, trouble or f"{corpus} is empty")
    print(f"{program.name}: {inputs} inputs", flush=True)


def name_libraries(build: Path) -> None:
    """Where test_gpu and test_nccl find the fakes, and NVIDIA's own libraries in their wheels."""
    os.environ["DDIP_FAKES"] = str(ROOT / build / "fakes")
    wheels = sorted(ROOT.glob(".venv/lib/python3*/site-packages/nvidia"))
    for variable, pattern in REAL_LIBRARIES.items():
        found = [lib for folder in wheels for lib in folder.glob(f"*/lib/{pattern}")]
        if found:
            os.environ.setdefault(variable, str(found[0]))


def unit(build: Path, results: Results) -> None:
    name_libraries(build)
    made = call("make", "--no-print-directory", "-s", f"-j{os.cpu_count()}", "unit", f"B={build}")
    results.add("make unit", made == 0, f"exit status {made}")
    if made:
        return
    for source in sorted(ROOT.glob("tests/unit/test_*.c")):
        run_tap(ROOT / build / "tests" / source.stem, results)
    for source in sorted(ROOT.glob("tests/fuzz/fuzz_*.c")):
        run_replay(ROOT / build / "tests" / source.stem, results)


# --- pytest ---------------------------------------------------------------------------------------


def read_junit(xml: Path, results: Results) -> None:
    for case in ET.parse(xml).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}".removeprefix("::")
        broken = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        if broken is not None:
            first = (broken.get("message") or "").splitlines()
            results.add(name, False, first[0] if first else "")
        elif skipped is not None:
            whole_file = re.search(r"'Skipped: (.*)'\)", skipped.text or "")
            alone = skipped.get("message") != "collection skipped"
            results.skip(name, skipped.get("message") if alone or not whole_file else whole_file[1])
        else:
            results.add(name, True)


def pytest(name: str, paths: list[str], build: Path, results: Results, *options: str) -> None:
    xml = ROOT / build / "check" / f"{name}.xml"
    xml.parent.mkdir(parents=True, exist_ok=True)
    xml.unlink(missing_ok=True)
    flags = ["-q", "--durations=10", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    flags += [f"--junitxml={xml}", *options]
    log = xml.with_suffix(".log")
    with open(log, "w") as out:
        command = [sys.executable, "-m", "pytest", *flags, *paths]
        status = call(*command, stdout=out, stderr=subprocess.STDOUT)
    with LOCK:
        print(log.read_text(errors="replace"), flush=True)
        before = len(results.failed)
        if xml.exists():
            read_junit(xml, results)
        if status and len(results.failed) == before:
            results.add(name, False, f"pytest ended with status {status}")


def e2e(build: Path, results: Results, *options: str) -> None:
    """In lanes; then those tests that time something, when nothing else runs."""
    left = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/e2e/test_*.py")}
    lanes = {lane: [f"tests/e2e/test_{n}.py" for n in names] for lane, names in LANES.items()}
    lanes["e2e"] = sorted(left.difference(*lanes.values()))
    with ThreadPoolExecutor() as pool:
        options = ["-m", "not alone", *options]
        runs = [pool.submit(pytest, n, p, build, results, *options) for n, p in lanes.items()]
    for run in runs:
        run.result()
    pytest("e2e-alone", ["tests/e2e"], build, results, *options, "-m", "alone")


# --- chaos ----------------------------------------------------------------------------------------


def chaos(build: Path, results: Results, *options: str) -> None:
    for seed in CHAOS_SEEDS:
        steps = ["--steps", CHAOS_STEPS, "--seed", seed]
        status = call(sys.executable, "tests/chaos.py", "--build", build, *steps, *options)
        results.add(f"chaos, seed {seed}", status == 0, f"exit status {status}")


# --- sanitizers -----------------------------------------------------------------------------------


def prepare_asan(build: Path) -> Path:
    """Sets the environment of all that follows; returns the folder that reports will lie in."""
    reports = (ROOT / build / "check/reports").absolute()
    reports.mkdir(parents=True, exist_ok=True)
    for old in reports.iterdir():
        old.unlink()
    asan, cxx = (library_of_gcc(name) for name in ("libasan.so", "libstdc++.so"))
    log = f"log_path={reports}/report"
    os.environ.update(ASAN_BUILD)
    os.environ["ASAN_OPTIONS"] = f"detect_leaks=1:abort_on_error=0:exitcode=99:{log}"
    os.environ["UBSAN_OPTIONS"] = f"print_stacktrace=1:{log}"
    # Ranks are an ordinary Python that loads a sanitized library: the daemon preloads this there.
    # ASan looks for C++ when it is loaded, and ends a process that throws without it.
    os.environ["DDIP_WORKER_PRELOAD"] = f"{asan} {cxx}"
    return reports


def library_of_gcc(name: str) -> Path:
    find = ["gcc", f"-print-file-name={name}"]
    path = Path(subprocess.run(find, check=True, capture_output=True, text=True).stdout.strip())
    if not path.is_absolute():
        sys.exit(f"{name} is missing: apt-get install g++")
    return path.resolve()


def read_reports(reports: Path, results: Results) -> None:
    """A process that a test meant to kill may have died of something else: nothing gets lost."""
    found = sorted(reports.iterdir())
    for report in found:
        print(report.read_text(errors="replace"))
    results.add("sanitizers", not found, f"{len(found)} reports, see above")


# --- the order ------------------------------------------------------------------------------------


def plain(build: Path, results: Results) -> None:
    for script in ("lint", "size"):
        with section(script, results):
            status = call(sys.executable, f"tests/{script}.py")
            results.add(script, status == 0, f"exit status {status}")
    with section("unit", results):
        unit(build, results)
    with section("client", results):
        pytest("client", ["tests/client"], build, results)
    with section("e2e", results):
        e2e(build, results)
    with section("chaos", results):
        chaos(build, results)


def asan(build: Path, results: Results) -> None:
    reports = prepare_asan(build)
    with section("build with sanitizers", results):
        made = call("make", "--no-print-directory", f"-j{os.cpu_count()}", "build", f"B={build}")
        results.add("make build", made == 0, f"exit status {made}")
    if made:
        return
    with section("unit", results):
        unit(build, results)
    with section("e2e", results):
        e2e(build, results, "--timeout=600")
    with section("sanitizers", results):
        read_reports(reports, results)


def fastai_v1(build: Path, results: Results) -> None:
    with section("fastai-v1", results):
        pytest("fastai-v1", ["tests/fastai_v1"], build, results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=Path("build"), help="the build folder")
    parser.add_argument("--asan", action="store_true", help="build and test with sanitizers")
    parser.add_argument("--fastai-v1", action="store_true", help="test the app fastai_v1")
    options = parser.parse_args()
    os.environ["DDIP_BUILD"] = str((ROOT / options.build).absolute())
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # of the make that runs this script
        os.environ.pop(name, None)
    results = Results()
    order = asan if options.asan else fastai_v1 if options.fastai_v1 else plain
    order(options.build, results)
    print()
    return results.close()


if __name__ == "__main__":
    sys.exit(main())
