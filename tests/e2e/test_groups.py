# SPDX-License-Identifier: Apache-2.0
"""Groups: start, stop, restart, death of a rank, several at once, and nothing left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import fresh_daemon, wait_until

ALL_REDUCE = (
    "import torch, torch.distributed as dist\n"
    "x = torch.ones(4) * (rank + 1); dist.all_reduce(x); print(x.sum().item())"
)
CYCLES = int(os.environ.get("DDIP_CYCLES", "20"))


def leftovers(daemon, pids):
    """What a daemon holds: descendants, descriptors, sockets; and shared memory of those pids."""
    process = psutil.Process(daemon.pid)
    return {
        "processes": len(daemon.processes()),
        "fds": process.num_fds(),
        "shared memory": [
            name for name in os.listdir("/dev/shm") if pids & set(re.findall(r"\d+", name))
        ],
        "state": len(list((daemon.state_dir / "groups").iterdir())),
        "threads": process.num_threads(),
    }


@pytest.mark.timeout(900)
def test_create_run_delete_leaves_nothing(start_daemon):
    """DDIP_CYCLES=100 is the long form."""
    daemon = start_daemon()
    daemon.create()  # the template that is kept warm is there from here on
    assert daemon.run("default", ALL_REDUCE) == "12.0\n"
    daemon.delete("default")
    pids = set()
    before = leftovers(daemon, pids)
    while time.sleep(0.3) or (now := leftovers(daemon, pids)) != before:
        before = now  # a connection that is closing
    for _ in range(CYCLES):
        pids |= {str(rank["pid"]) for rank in daemon.create()["ranks"]}
        assert daemon.run("default", ALL_REDUCE) == "12.0\n"
        daemon.delete("default")
    wait_until(lambda: leftovers(daemon, pids) == before, 5)
    assert len(pids) == 2 * CYCLES
    assert daemon.request("GET", "/v1/groups").json == {"groups": []}


def test_the_template_is_single_threaded(start_daemon):
    """Forking a process with threads is a gamble; this one also never had any."""
    daemon = start_daemon()
    daemon.create()
    ranks = {r["pid"] for r in daemon.request("GET", "/v1/groups/default").json["ranks"]}
    template = psutil.Process(daemon.pid).children()[0]
    assert template.pid not in ranks
    for _ in range(10):  # while it imports what may be needed later, and after
        assert template.num_threads() == 1
        time.sleep(0.5)
    daemon.create(name="later")
    code = "import torch; torch.mm(torch.ones(300, 300), torch.ones(300, 300)).sum().item()"
    assert daemon.cell("later", code).events[-1]["status"] == "ok"


def test_two_groups_at_once_and_port_29500_taken(start_daemon):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 29500))
        taken.listen()
        daemon = start_daemon()
        daemon.create(name="a")
        daemon.create(name="b", ranks=3)
        assert daemon.run("a", ALL_REDUCE) == "12.0\n"
        assert daemon.run("b", ALL_REDUCE) == "24.0\n"
        daemon.run("a", "only_here = 1")
        assert daemon.cell("b", "only_here").events[-1]["status"] == "error"


def test_two_daemons_side_by_side(start_daemon, build):
    first, second = start_daemon(), start_daemon()
    first.create()
    second.create()
    assert first.run("default", ALL_REDUCE) == second.run("default", ALL_REDUCE) == "12.0\n"
    again = subprocess.run(first.command, capture_output=True, text=True, timeout=20)
    assert again.returncode == 1
    assert f"another ddipd (pid {first.pid}) runs in {first.runtime_dir}" in again.stderr
    assert first.run("default", ALL_REDUCE) == "12.0\n"  # nothing of the first was touched
    assert first.request("GET", "/v1/info").json["url"] == first.url


def test_files_are_private(start_daemon):
    daemon = start_daemon()
    daemon.create()
    daemon.run("default", "print(1)")
    for root, folders, files in os.walk(daemon.folder):
        for name in folders + files:
            path = Path(root) / name
            if path != daemon.log:
                assert path.stat().st_mode & 0o077 == 0, path
    assert len(daemon.token) == 64


def test_no_secret_in_sight(start_daemon):
    daemon = start_daemon("--log-level", "debug")
    token = daemon.token
    daemon.create()
    daemon.run("default", "import os; print(os.environ)")
    texts = [daemon.log.read_text()]
    files = [p for p in daemon.state_dir.rglob("*") if p.is_file()]
    assert all(p.stat().st_mode & 0o077 == 0 for p in files)
    texts += [p.read_text() for p in files if p.name != "group.json"]  # ranks' secrets are there
    for process in [psutil.Process(daemon.pid), *daemon.processes()]:
        texts += [" ".join(process.cmdline()), str(process.environ())]
    assert not any(token in text for text in texts)
    assert not any('"secret"' in text for text in texts)


def test_async_creation(daemon):
    reply = daemon.request(
        "POST", "/v1/groups", {"ranks": 2, "name": "later"}, {"Prefer": "respond-async"}
    )
    assert reply.status == 202 and reply.headers["location"] == "/v1/groups/later"
    assert reply.json["state"] == "starting"
    assert daemon.run("later", "print(rank)") == "0\n"  # a cell may wait for the start
    assert daemon.request("GET", "/v1/groups/later").json["state"] == "ready"
    daemon.delete("later")


def test_environment_and_folder(daemon, tmp_path):
    daemon.create(name="env", env={"A_VARIABLE": "a value"}, cwd=str(tmp_path))
    code = "import os, sys; print(os.environ['A_VARIABLE'], os.getcwd(), sys.path[0] == '')"
    assert daemon.run("env", code) == f"a value {tmp_path} True\n"
    daemon.delete("env")


def test_killed_rank_ends_the_cell_and_comes_back(daemon, group):
    daemon.run(group, "kept = rank + 100")
    path = f"/v1/groups/{group}"
    reply = daemon.cell(group, "import time; time.sleep(30)", Prefer="respond-async")
    time.sleep(0.2)
    pids = [r["pid"] for r in daemon.request("GET", path).json["ranks"]]
    started = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    events = daemon.request("GET", reply.headers["location"] + "/events").events
    assert time.monotonic() - started < 1
    assert events[-1]["status"] == "lost" and events[-1]["ranks"]["1"] == "lost"
    error = next(e for e in events if e["type"] == "error" and e["rank"] == 1)
    assert "signal 9" in error["evalue"]
    state = daemon.request("GET", path).json
    assert state["state"] == "degraded" and "signal 9" in state["reason"]
    refused = daemon.cell(group, "1")
    assert refused.status == 409 and "restart" in refused.json["hint"]

    state = daemon.request("POST", f"{path}/restart?ranks=1", timeout=60).json
    assert state["state"] == "ready" and state["generation"] == 2
    assert state["ranks"][0]["pid"] == pids[0] and state["ranks"][1]["pid"] != pids[1]
    events = daemon.cell(group, f"print(globals().get('kept'))\n{ALL_REDUCE}").events
    text = {r: "".join(e.get("text", "") for e in events if e["rank"] == r) for r in (0, 1)}
    assert text == {0: "100\n12.0\n", 1: "None\n12.0\n"}


def test_restart_of_all(daemon, group):
    before = daemon.request("GET", f"/v1/groups/{group}").json
    daemon.run(group, "x = 1")
    after = daemon.request("POST", f"/v1/groups/{group}/restart", timeout=60).json
    assert after["state"] == "ready" and after["generation"] == 2
    assert not {r["pid"] for r in before["ranks"]} & {r["pid"] for r in after["ranks"]}
    assert daemon.run(group, f"print('x' in globals())\n{ALL_REDUCE}") == "False\n12.0\n"


def test_delete_while_busy(daemon):
    daemon.create(name="busy")
    code = (
        "import subprocess, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen(['sleep', '1000'])\n"
        "while True:\n    try: time.sleep(1)\n    except BaseException: pass"
    )
    reply = daemon.cell("busy", code, Prefer="respond-async")
    time.sleep(0.5)
    follow, connection = daemon.open("GET", reply.headers["location"] + "/events?after=0")
    started = time.monotonic()
    daemon.delete("busy")
    assert time.monotonic() - started < 10
    assert b'"status":"lost"' in follow.read().splitlines()[-1]
    connection.close()
    assert not [p for p in daemon.processes() if p.name() == "sleep"]


def test_sigterm_leaves_the_ranks_alone(build, start_daemon):
    daemon = start_daemon("--orphan-timeout-s", "2")
    daemon.create()
    marker = daemon.folder / "marker"
    daemon.cell(
        "default",
        f"import time; time.sleep(1); open({str(marker)!r} + str(rank), 'w').close()",
        Prefer="respond-async",
    )
    ranks = [p for p in daemon.processes() if p.pid in _pids(daemon)]
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(5) == 0
    daemon.process = None
    assert all(p.is_running() for p in ranks)
    deadline = time.monotonic() + 10
    while any(p.is_running() for p in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(p.is_running() for p in ranks)  # nobody came within the orphan timeout
    assert sorted(p.name for p in daemon.folder.glob("marker*")) == ["marker0", "marker1"]


def _pids(daemon):
    return {r["pid"] for r in daemon.request("GET", "/v1/groups/default").json["ranks"]}


def test_shutdown_by_request(start_daemon):
    daemon = start_daemon()
    daemon.create()
    below = daemon.processes()
    assert daemon.request("POST", "/v1/shutdown").status == 202
    assert daemon.process.wait(10) == 0
    assert not psutil.wait_procs(below, timeout=5)[1]
    assert not list(daemon.runtime_dir.glob("*.sock"))
    assert not list((daemon.state_dir / "groups").iterdir())
    daemon.process = None


def test_a_group_is_ready_when_its_processes_are_known(build, tmp_path):
    """A template tells a pid late: the rank has long been there."""
    late = "import os, time\nreal = os.waitpid\ndef waitpid(*args):\n    time.sleep(0.7)\n"
    late += "    return real(*args)\nos.waitpid = waitpid\n"
    (tmp_path / "sitecustomize.py").write_text(late)
    with fresh_daemon(build, env={"PYTHONPATH": str(tmp_path)}) as daemon:
        made = daemon.create(2)
        assert all(rank["pid"] for rank in made["ranks"])
        [roster] = (json.loads(f.read_text()) for f in daemon.state_dir.glob("groups/*/group.json"))
        assert all(rank["pid"] for rank in roster["ranks"])
