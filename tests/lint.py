#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks form: formatting, floors, homes, names, licences, warnings, strings and links.

Each check is a function that yields findings, `path:line: message`; CHECKS lists them in order.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from size import ROOT, functions, sources, tool

# A file of daemon/ includes files of its own floor or of lower ones.
FLOORS = {
    6: "main server",
    5: "listener http ws",
    4: "api api_cell api_daemon api_group api_namespace api_stacks auth record stream",
    3: "pool group job cell rank request start store ladder release stacks roster recall adopt",
    2: "output blob once",
    1: "worker channel pipe hub sweep kin wire launch template journal line gpu nccl probe dl json "
    "frame systemd oom",
    0: "config log err util trace",
}
# On one floor nothing goes in circles, but for these: one noun in several files.
TOGETHER = [
    set(FLOORS[3].split()),
    set("hub worker channel".split()),
    set("api api_cell api_daemon api_group api_namespace api_stacks".split()),
]
FLOOR = {name: floor for floor, names in FLOORS.items() for name in names.split()}

# Third-party headers of daemon/ and the one file that includes them.
HOMES = {
    r"microhttpd\.h": "http.c",
    r"libwebsockets\.h": "ws.c",
    r"(cjson/)?cJSON\.h": "json.c",
    r"dlfcn\.h": "dl.c",
    r"cuda\w*\.h": "probe.c",
    r"nvml\.h": "gpu.c",
    r"nccl\.h": "nccl.c",
}

# Prefixes of functions that other files see, besides the file's own name.
PREFIXES = {
    "util.c": ("buf_",),
    "json.c": ("jw_",),
    "main.c": ("main",),
    "template.c": ("templates_",),
}

LICENCE = "SPDX-License-Identifier: Apache-2.0"
C_ROOMS = ("daemon/", "proto/")
C_FLAGS = ["-std=c17", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]
# -iquote: daemon/nccl.h must not stand in for NVIDIA's <nccl.h>.
C_FLAGS += ["-iquote", "daemon", "-iquote", "proto"]
C_PACKAGES = ["libmicrohttpd", "libwebsockets", "libuv", "libcjson"]

HOME_PATH = r"(?<![\w.])(?:/(?:home|Users)/[a-z][\w.-]*|/root)(?=/)"
REGISTRY = r"\b(?:pypi(?:\.python)?|pythonhosted|(?:deb|ftp)\.debian|npmjs)\.(?:org|com)\b"
FORBIDDEN = re.compile(f"{HOME_PATH}|{REGISTRY}")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
LINK = re.compile(r"\]\(<?([^)<>\s]+)>?(?:\s+\"[^\"]*\")?\)|^\[[^\]]+\]:\s*(\S+)", re.M)
FENCE = re.compile(r"^```.*?^```", re.M | re.S)

Findings = Iterator[str]


def line_at(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def includes(path: str) -> Iterator[tuple[int, str, str]]:
    """(line, `<` or `"`, name) of each #include."""
    text = text_of(path)
    for match in INCLUDE.finditer(text):
        yield line_at(text, match.start(1)), match[1], match[2]


def daemon_files(paths: list[str]) -> list[Path]:
    return [Path(p) for p in paths if re.fullmatch(r"(daemon|proto)/\w+\.[ch]", p)]


def check_clang_format(paths: list[str]) -> Findings:
    files = [p for p in paths if p.endswith((".c", ".h"))]
    command = [tool("clang-format", "apt-get install clang-format"), "--dry-run", "--Werror"]
    if not files:
        return
    places = re.findall(r"^(.+?:\d+):\d+: error:", run(command + files).stderr, re.M)
    for place in dict.fromkeys(places):
        yield f"{place}: not formatted (`make format` mends it)"


def check_ruff(_paths: list[str]) -> Findings:
    ruff = tool("ruff", "pip install -r tests/requirements.txt")
    quiet = ["--quiet", "--no-cache", "--output-format=concise", "."]
    formatted = run([ruff, "format", "--check", *quiet])
    yield from (formatted.stdout + formatted.stderr).splitlines()
    checked = run([ruff, "check", *quiet])
    yield from (checked.stdout + checked.stderr).splitlines()


def check_floors(paths: list[str]) -> Findings:
    same_floor: dict[str, set[str]] = {}
    for path in daemon_files(paths):
        if path.stem not in FLOOR:
            yield f"{path}:1: on no floor: add it to FLOORS in tests/lint.py"
            continue
        for line, quote, name in includes(str(path)):
            below = Path(name).stem
            if quote == "<" or below == path.stem:
                continue
            if below not in FLOOR:
                yield f'{path}:{line}: "{name}" is on no floor of tests/lint.py'
            elif FLOOR[below] > FLOOR[path.stem]:
                floors = f"floor {FLOOR[below]}, above {path.stem}'s {FLOOR[path.stem]}"
                yield f'{path}:{line}: "{name}" is on {floors}'
            elif FLOOR[below] == FLOOR[path.stem] and not together(below, path.stem):
                same_floor.setdefault(path.stem, set()).add(below)
    for cycle in cycles(same_floor):
        yield f"daemon/{cycle[0]}.h:1: files include each other in a circle: {' -> '.join(cycle)}"


def together(one: str, other: str) -> bool:
    return any({one, other} <= room for room in TOGETHER)


def cycles(graph: dict[str, set[str]]) -> Iterator[list[str]]:
    """One path per circle found; each node is walked once."""
    done: set[str] = set()

    def walk(node: str, trail: list[str]) -> Iterator[list[str]]:
        if node in trail:
            yield trail[trail.index(node) :] + [node]
        elif node not in done:
            for following in sorted(graph.get(node, ())):
                yield from walk(following, trail + [node])
            done.add(node)

    for start in sorted(graph):
        yield from walk(start, [])


def check_homes(paths: list[str]) -> Findings:
    for path in daemon_files(paths):
        for line, quote, name in includes(str(path)):
            for header, home in HOMES.items():
                if quote == "<" and re.fullmatch(header, name) and path.name != home:
                    yield f"{path}:{line}: only {home} includes {name}"


def check_worker_homes(paths: list[str]) -> Findings:
    """The worker library has the same rule without a table: whoever includes it first owns it."""
    owners: dict[str, str] = {}
    for path in (p for p in paths if re.fullmatch(r"daemon/worker/\w+\.[ch]", p)):
        for line, quote, name in includes(path):
            if quote == "<" and any(re.fullmatch(header, name) for header in HOMES):
                owner = owners.setdefault(name, path)
                if owner != path:
                    yield f"{path}:{line}: {name} has its home in {owner}"


def check_names(paths: list[str]) -> Findings:
    files = [str(p) for p in daemon_files(paths) if p.suffix == ".c"]
    for f in functions(files):
        file = Path(f.path)
        allowed = (f"{file.stem}_", *PREFIXES.get(file.name, ()))
        if not f.static and not f.name.startswith(allowed):
            yield f"{f.path}:{f.line}: {f.name} is neither static nor named {file.stem}_*"


def check_licences(paths: list[str]) -> Findings:
    for path in paths:
        text = text_of(path)
        code = path.endswith((".c", ".h", ".py", ".sh")) or text.startswith("#!")
        if code and text and not any(LICENCE in line for line in text.splitlines()[:2]):
            yield f"{path}:1: one of the first two lines must say {LICENCE}"


def cuda_flags() -> list[str]:
    """What the last build used to compile the CUDA parts: nothing where it found no headers."""
    built = ROOT / "build/flags"
    words = shlex.split(built.read_text()) if built.exists() else []
    flags = [w for w in words if w.startswith("-DHAVE_")]
    return flags + [
        f"-isystem{path}" for w, path in zip(words, words[1:], strict=False) if w == "-isystem"
    ]


def compile_commands(paths: list[str]) -> Iterator[list[str]]:
    """gcc and clang on each file, with and without the parts that need CUDA's headers."""
    packages = run([tool("pkg-config", "apt-get install pkg-config"), "--cflags", *C_PACKAGES])
    if packages.returncode:
        sys.exit(f"{packages.stderr}missing headers: run `make deps-build`")
    compilers = [tool(name, f"apt-get install {name}") for name in ("gcc", "clang")]
    flags, cuda = C_FLAGS + shlex.split(packages.stdout), cuda_flags()
    for path in (p for p in paths if p.startswith(C_ROOMS) and p.endswith(".c")):
        variants = [[], cuda] if cuda and "HAVE_" in text_of(path) else [[]]
        for compiler in compilers:
            for extra in variants:
                yield [compiler, "-fsyntax-only", *flags, *extra, path]


def check_compilers(paths: list[str]) -> Findings:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in pool.map(run, compile_commands(paths)):
            compiler, shown = Path(done.args[0]).name, False
            for line in done.stderr.splitlines():
                if match := re.match(r"(.+?:\d+):(?:\d+:)? (?:fatal )?error: (.*)", line):
                    shown = True
                    yield f"{match[1]}: {match[2]} ({compiler})"
            if done.returncode and not shown:
                yield f"{done.args[-1]}:1: {compiler}: {done.stderr.strip() or done.returncode}"


def check_strings(paths: list[str]) -> Findings:
    for path in paths:
        text = text_of(path)
        if "\0" in text:
            continue
        for match in FORBIDDEN.finditer(text):
            yield f"{path}:{line_at(text, match.start())}: {match[0]} is of one machine only"


def blank(match: re.Match) -> str:
    return "\n" * match[0].count("\n")


def check_links(paths: list[str]) -> Findings:
    for path in (p for p in paths if p.endswith(".md")):
        text = FENCE.sub(blank, text_of(path))
        for match in LINK.finditer(text):
            target = (match[1] or match[2]).partition("#")[0]
            if not target or re.match(r"[a-z]+:", target):
                continue
            if not ((ROOT / path).parent / target).exists():
                yield f"{path}:{line_at(text, match.start())}: link to {target}, which is not there"


CHECKS = [
    check_clang_format,
    check_ruff,
    check_floors,
    check_homes,
    check_worker_homes,
    check_names,
    check_licences,
    check_strings,
    check_links,
    check_compilers,
]


def main() -> int:
    paths = sources()
    findings: Iterable[str] = [found for check in CHECKS for found in check(paths)]
    print(*findings, sep="\n", end="\n" if findings else "")
    state = f"{len(findings)} findings" if findings else "clean"
    print(f"lint: {len(paths)} files, {len(CHECKS)} checks, {state}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
