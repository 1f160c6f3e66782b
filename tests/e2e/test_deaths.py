# SPDX-License-Identifier: Apache-2.0
"""How a rank died, by name: the signal, the exit code, the line that crashed, out of memory."""

import re
import signal
import time
from pathlib import Path

import pytest
from conftest import printed

SETUP = "import ctypes, os, signal, time\n"


@pytest.fixture
def pair(daemon, group):
    daemon.run(group, SETUP)
    return group


def death(daemon, group, code):
    """What the cell says of rank 1, which dies in it; all events."""
    events = daemon.cell(group, code).events
    assert events[-1]["status"] == "lost" and events[-1]["ranks"]["1"] == "lost"
    (error,) = [e for e in events if e["type"] == "error" and e["rank"] == 1]
    assert error["ename"] == "RankDied"
    state = daemon.request("GET", f"/v1/groups/{group}").json
    assert state["state"] == "degraded" and state["reason"] == error["evalue"]
    return error["evalue"], events


def test_exit_code(daemon, pair):
    said, _ = death(daemon, pair, "if rank == 1: os._exit(7)")
    assert said == "rank 1 ended with exit code 7 (code called os._exit, or exit in C)"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGUSR2"])
def test_signal(daemon, pair, name):
    said, _ = death(
        daemon, pair, f"if rank == 1: os.kill(os.getpid(), signal.{name})\ntime.sleep(9)"
    )
    assert said == f"rank 1 was killed by signal {getattr(signal, name):d} ({name})"


@pytest.mark.parametrize(
    "crash, name",
    [("ctypes.string_at(0)", "SIGSEGV"), ("os.abort()", "SIGABRT")],
)
def test_crash_names_the_line(daemon, pair, crash, name):
    said, events = death(daemon, pair, f"def f():\n    {crash}\nif rank == 1: f()\ntime.sleep(9)")
    number = getattr(signal, name)
    pattern = rf"rank 1 was killed by signal {number:d} \({name}\) at Cell In\[\d+\], line 2: (.*)"
    assert re.fullmatch(pattern, said)[1] == crash
    text = printed(events, 1, "stderr")
    assert "Fatal Python error: " in text and "most recent call first" in text


def test_crash_of_a_child_is_not_the_ranks(daemon, pair):
    code = """
import faulthandler
if rank == 1:
    if os.fork() == 0: ctypes.string_at(0)
    os.wait(); os._exit(5)
"""
    said, events = death(daemon, pair, code)
    assert said.startswith("rank 1 ended with exit code 5")


def oom_file(root, count):
    """A count like the kernel's for the cgroup of this process, which ranks started here share."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        ident, controllers, path = line.split(":", 2)
        if ident == "0":
            file = root / path.lstrip("/") / "memory.events"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"low 0\nhigh 3\nmax 9\noom 2\noom_kill {count}\noom_group_kill 0\n")


def test_out_of_memory(start_daemon, tmp_path):
    """The kernel's count is the evidence; without a change of it a kill is just a kill."""
    oom_file(tmp_path, 3)
    daemon = start_daemon("--cgroup-dir", str(tmp_path))
    daemon.create(name="g", ranks=2)
    daemon.run("g", SETUP)
    kill = "time.sleep(1)\nif rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(9)"
    named = ": out of memory, for the kernel's count of such kills in its cgroup went from {} to {}"
    for count, more in ((4, named.format(3, 4)), (4, ""), (6, named.format(4, 6))):
        where = daemon.cell("g", kill, Prefer="respond-async").headers["location"]
        time.sleep(0.3)
        oom_file(tmp_path, count)
        events = daemon.request("GET", f"{where}/events?after=0").events
        said = next(e["evalue"] for e in events if e["type"] == "error" and e["rank"] == 1)
        assert said == f"rank 1 was killed by signal 9 (SIGKILL){more}"
        daemon.request("POST", "/v1/groups/g/restart?ranks=1", timeout=60)
        daemon.cell("g", SETUP)
