# SPDX-License-Identifier: Apache-2.0
"""The daemon is killed or stopped and started again: ranks, cells and events are still there."""

import json
import os
import random
import resource
import signal
import subprocess
import time

import psutil
import pytest
from conftest import printed

CHATTER = """
import ctypes, os, subprocess, time
libc = ctypes.CDLL(None)
for i in range({lines}):
    print(f"py {{i}}")
    os.write(1, b"fd %d\\n" % i)
    libc.printf(b"c %d\\n", i)
    if i % 50 == 0:
        subprocess.run(["echo", f"child {{i}}"])
    if i % 10 == 0:
        print(f"err {{i}} \\u20ac", file=sys.stderr)
    time.sleep({pause})
total = rank * 1000 + {lines}
total
"""


def events_of(daemon, group, cell=None, after=0):
    where = f"/cells/{cell}" if cell else ""
    reply = daemon.request(
        "GET", f"/v1/groups/{group}{where}/events?after={after}&follow=false", timeout=60
    )
    assert reply.status == 200, reply.text
    return reply.events


def detached(daemon, group, code, **body):
    reply = daemon.request(
        "POST",
        f"/v1/groups/{group}/cells",
        {"code": code, **body},
        {"Prefer": "respond-async"},
    )
    assert reply.status == 202, reply.text
    return reply.json["cell"]


def wait_done(daemon, group, cell, timeout=60):
    """All events of the cell, once it is done."""
    reply = daemon.request(
        "GET", f"/v1/groups/{group}/cells/{cell}/events?after=0", timeout=timeout
    )
    return reply.events


def pids(daemon, group):
    ranks = daemon.request("GET", f"/v1/groups/{group}").json["ranks"]
    return [r["pid"] for r in ranks]


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(daemon):
    daemon.process.kill()
    daemon.process.wait()


def lines_of(events, rank, name="stdout"):
    return printed(events, rank, name).split("\n")


def check_chatter(events, ranks, lines):
    seqs = [e["seq"] for e in events]
    assert sorted(set(seqs)) == seqs
    for rank in ranks:
        out = lines_of(events, rank)
        for way in ("py", "fd", "c"):
            got = [line for line in out if line.startswith(way + " ")]
            assert got == [f"{way} {i}" for i in range(lines)], (rank, way)
        children = [line for line in out if line.startswith("child ")]
        assert children == [f"child {i}" for i in range(0, lines, 50)]
        errors = [line for line in lines_of(events, rank, "stderr") if line]
        assert errors == [f"err {i} \u20ac" for i in range(0, lines, 10)]
        results = [e for e in events if e["type"] == "execute_result" and e["rank"] == rank]
        assert [e["data"]["text/plain"] for e in results] == [str(rank * 1000 + lines)]
        assert [e["rank"] for e in events if e["type"] == "rank_done"].count(rank) == 1
    assert [e["type"] for e in events].count("done") == 1
    assert events[-1]["type"] == "done" and events[-1]["status"] == "ok"


@pytest.mark.parametrize("seed", range(int(os.environ.get("DDIP_RESTARTS", "2"))))
def test_killed_daemon_comes_back_in_mid_cell(start_daemon, seed):
    dice = random.Random(seed)
    daemon = start_daemon()
    daemon.create(2)
    daemon.run("default", "import torch; kept = torch.arange(3)")
    before = pids(daemon, "default")
    cell = detached(daemon, "default", "import sys" + CHATTER.format(lines=600, pause=0.004))
    second = detached(daemon, "default", "import torch.distributed as dist\nkept + 1")
    for _ in range(4):
        time.sleep(dice.random())
        kill(daemon)
        time.sleep(dice.random() / 2)
        daemon.start()
    events = wait_done(daemon, "default", cell)
    check_chatter(events, (0, 1), 600)
    assert wait_done(daemon, "default", second)[-1]["status"] == "ok"
    assert pids(daemon, "default") == before
    assert "6." in daemon.run(
        "default", "x = torch.ones(1) * 3\ndist.all_reduce(x)\nprint(x.item())"
    )
    everything = events_of(daemon, "default")
    assert [e["seq"] for e in everything] == list(range(1, len(everything) + 1))
    daemon.delete("default")
    assert not any(alive(pid) for pid in before)


def test_stopped_daemon_leaves_ranks_and_takes_them_back(start_daemon):
    daemon = start_daemon()
    daemon.create(2, name="a", grace_s=2)
    daemon.create(1, name="b", env={"NOTE": "kept"})
    before = {name: pids(daemon, name) for name in "ab"}
    token = daemon.token
    cell = detached(daemon, "a", "import time\nfor i in range(40):\n print(i)\n time.sleep(0.05)")
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(10) == 0
    assert all(alive(pid) for name in "ab" for pid in before[name])
    daemon.start()
    assert daemon.token == token
    events = wait_done(daemon, "a", cell)
    for rank in (0, 1):
        assert lines_of(events, rank) == [str(i) for i in range(40)] + [""]
    shown = daemon.request("GET", "/v1/groups/a").json
    assert shown["grace_s"] == 2 and shown["generation"] == 1 and shown["state"] == "ready"
    assert {name: pids(daemon, name) for name in "ab"} == before
    assert daemon.run("b", "import os; print(os.environ['NOTE'], rank, world_size)") == "kept 0 1\n"
    assert detached(daemon, "a", "1") == cell + 1


def test_rank_that_died_meanwhile(start_daemon):
    daemon = start_daemon()
    daemon.create(3, grace_s=1)
    daemon.run("default", "here = rank")
    before = pids(daemon, "default")
    code = (
        "import torch, torch.distributed as dist\ndist.all_reduce(torch.ones(1)) if rank else None"
    )
    cell = detached(daemon, "default", code + "\nimport time; time.sleep(60 if rank == 0 else 0)")
    time.sleep(0.3)
    kill(daemon)
    os.kill(before[0], signal.SIGKILL)
    daemon.start()
    events = wait_done(daemon, "default", cell)
    assert events[-1]["status"] == "lost"
    assert events[-1]["ranks"] == {"0": "lost", "1": "interrupted", "2": "interrupted"}
    (death,) = [e for e in events if e["type"] == "error" and e["rank"] == 0]
    assert "ended while no daemon was there" in death["evalue"]
    assert daemon.request("GET", "/v1/groups/default").json["state"] == "degraded"
    assert daemon.request("POST", "/v1/groups/default/restart?ranks=0").status == 200
    events = daemon.cell("default", "here").events
    results = {e["rank"]: e["data"]["text/plain"] for e in events if e["type"] == "execute_result"}
    assert results == {1: "1", 2: "2"}
    after = pids(daemon, "default")
    assert after[1:] == before[1:] and after[0] != before[0]


def test_rank_killed_after_adoption(start_daemon):
    daemon = start_daemon()
    daemon.create(2, grace_s=1)
    kill(daemon)
    daemon.start()
    cell = detached(daemon, "default", "import time; time.sleep(60 if rank else 0)")
    time.sleep(0.3)
    os.kill(pids(daemon, "default")[1], signal.SIGKILL)
    started = time.monotonic()
    events = wait_done(daemon, "default", cell)
    assert time.monotonic() - started < 3
    assert events[-1]["ranks"] == {"0": "ok", "1": "lost"}
    (death,) = [e for e in events if e["type"] == "error"]
    assert death["rank"] == 1 and "an earlier daemon started it" in death["evalue"]


def test_failure_under_way_is_carried_on(start_daemon):
    daemon = start_daemon()
    daemon.create(2, grace_s=3)
    daemon.run("default", "import torch, torch.distributed as dist; kept = 5")
    before = pids(daemon, "default")
    cell = detached(daemon, "default", "if rank: 1/0\ndist.all_reduce(torch.ones(1))")
    time.sleep(1)
    kill(daemon)
    daemon.start()
    events = wait_done(daemon, "default", cell)
    assert events[-1]["ranks"] == {"0": "interrupted", "1": "error"}
    assert [e["ename"] for e in events if e["type"] == "error"][0] == "ZeroDivisionError"
    code = "x = torch.ones(1)\ndist.all_reduce(x)\nprint(int(x.item()), kept)"
    assert daemon.run("default", code) == "2 5\n"
    assert pids(daemon, "default") == before
    assert daemon.request("GET", "/v1/groups/default").json["generation"] == 2


def test_interrupt_after_a_restart(start_daemon):
    daemon = start_daemon()
    daemon.create(2, grace_s=1)
    cell = detached(daemon, "default", "import time\nprint('on')\ntime.sleep(60)")
    time.sleep(0.5)
    kill(daemon)
    daemon.start()
    assert daemon.request("POST", "/v1/groups/default/interrupt").status == 200
    assert wait_done(daemon, "default", cell, 10)[-1]["status"] == "interrupted"
    assert daemon.run("default", "print('idle')") == "idle\n"


def test_daemon_killed_while_a_group_starts(start_daemon):
    daemon = start_daemon()
    reply = daemon.request("POST", "/v1/groups", {"ranks": 2}, {"Prefer": "respond-async"})
    assert reply.status == 202
    kill(daemon)
    daemon.start()
    state = daemon.request("GET", "/v1/groups/default").json
    for _ in range(100):
        if state["state"] == "failed":
            break
        time.sleep(0.1)
        state = daemon.request("GET", "/v1/groups/default").json
    assert state["state"] == "failed" and "restarted" in state["reason"]
    daemon.delete("default")
    daemon.create(2)
    assert daemon.run("default", "print(rank)") == "0\n"


def rewrite(path, **members):
    roster = json.loads(path.read_text())
    path.write_text(json.dumps(roster | members))
    return roster


@pytest.mark.parametrize("change", [{"format": 99}, {"protocol": 99}])
def test_groups_of_another_version_are_left_alone(start_daemon, change):
    daemon = start_daemon()
    daemon.create(2)
    daemon.run("default", "kept = 7")
    before = pids(daemon, "default")
    kill(daemon)
    (path,) = daemon.state_dir.glob("groups/*/group.json")
    roster = rewrite(path, **change)
    with open(daemon.log, "ab") as log:
        code = subprocess.run(daemon.command, stderr=log, env=daemon.env, timeout=20).returncode
    assert code == 1
    last = daemon.log.read_text().splitlines()[-1]
    assert "another version of ddipd" in last and "ranks were left alone" in last
    assert all(alive(pid) for pid in before)
    path.write_text(json.dumps(roster))
    daemon.start()
    assert daemon.run("default", "print(kept)") == "7\n"


def test_torn_last_line_is_cut(start_daemon):
    daemon = start_daemon()
    daemon.create(1)
    daemon.run("default", "print('whole')")
    kill(daemon)
    (path,) = daemon.state_dir.glob("groups/*/journal/*.ndjson")
    with open(path, "ab") as journal:
        journal.write(b'{"seq":9999,"group":"default","cell":1,"ra')
    daemon.start()
    assert daemon.run("default", "print('goes on')") == "goes on\n"
    events = events_of(daemon, "default")
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))
    assert "cutting" in daemon.log.read_text()


def test_orphaned_ranks_leave_in_the_end(start_daemon):
    daemon = start_daemon("--orphan-timeout-s", "2")
    daemon.create(2)
    before = pids(daemon, "default")
    kill(daemon)
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in before)
    daemon.start()
    state = {"state": "starting"}
    while state["state"] == "starting" and time.monotonic() < deadline + 10:
        state = daemon.request("GET", "/v1/groups/default").json
    assert state["state"] == "degraded" and "no daemon was there" in state["reason"]
    reply = daemon.request("POST", "/v1/groups/default/restart", timeout=120)
    assert reply.status == 200, reply.text
    assert daemon.run("default", "print(world_size)") == "2\n"


def limit_files(daemon, size):
    """What the daemon may write to files: like a full disk."""
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_accepted_is_what_is_in_the_journal(start_daemon):
    daemon = start_daemon()
    daemon.create(1)
    limit_files(daemon, 1)
    for headers in ({}, {"Prefer": "respond-async"}):
        reply = daemon.request("POST", "/v1/groups/default/cells", {"code": "1"}, headers)
        assert reply.status == 503 and "journal" in reply.json["detail"], reply.text
    assert daemon.request("POST", "/v1/groups", {"name": "b", "ranks": 1}).status == 500
    assert daemon.request("GET", "/v1/groups/default/cells").json["cells"] == []
    limit_files(daemon, resource.RLIM_INFINITY)
    assert detached(daemon, "default", "1") == 1
    kill(daemon)
    daemon.start()
    assert wait_done(daemon, "default", 1)[-1]["status"] == "ok"
    assert [g["name"] for g in daemon.request("GET", "/v1/groups").json["groups"]] == ["default"]
    events = events_of(daemon, "default")
    assert [e["seq"] for e in events] == list(range(1, len(events) + 1))


def test_processes_are_remembered_once_they_can_be(start_daemon):
    daemon = start_daemon()
    daemon.create(2)
    daemon.run("default", "kept = rank")
    (folder,) = daemon.state_dir.glob("groups/default.*")
    (folder / "group.json.new").mkdir()  # in the way of the file that becomes group.json
    reply = daemon.request("POST", "/v1/groups/default/restart?ranks=1", timeout=60)
    assert reply.status == 200, reply.text
    before = pids(daemon, "default")
    (folder / "group.json.new").rmdir()
    time.sleep(0.5)
    kill(daemon)
    daemon.start()
    assert daemon.run("default", "print(globals().get('kept'))") == "0\n"
    assert pids(daemon, "default") == before


def test_a_cell_sent_to_a_degraded_group_that_is_being_adopted_ends(start_daemon):
    daemon = start_daemon()
    daemon.create(2)
    before = pids(daemon, "default")
    os.kill(before[1], signal.SIGKILL)
    while daemon.request("GET", "/v1/groups/default").json["state"] != "degraded":
        time.sleep(0.05)
    kill(daemon)
    os.kill(before[0], signal.SIGSTOP)  # the next daemon waits for it
    daemon.start()
    try:
        assert daemon.request("GET", "/v1/groups/default").json["state"] == "starting"
        cell = detached(daemon, "default", "1")
    finally:
        os.kill(before[0], signal.SIGCONT)
    assert wait_done(daemon, "default", cell, 10)[-1]["status"] == "lost"
    assert daemon.request("GET", "/v1/groups/default").json["state"] == "degraded"


@pytest.mark.parametrize("degraded", [False, True])
def test_several_ranks_that_died_meanwhile(start_daemon, degraded):
    daemon = start_daemon()
    daemon.create(3, grace_s=20)
    before = pids(daemon, "default")
    cell = detached(
        daemon,
        "default",
        "import time\nwhile True:\n  try: time.sleep(60)\n  except BaseException: pass",
    )
    time.sleep(0.3)
    if degraded:
        os.kill(before[2], signal.SIGKILL)
        while daemon.request("GET", "/v1/groups/default").json["state"] != "degraded":
            time.sleep(0.02)
    kill(daemon)
    for pid in before:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    daemon.start()
    done = wait_done(daemon, "default", cell, 10)[-1]
    assert done["ranks"] == {"0": "lost", "1": "lost", "2": "lost"}
    assert daemon.request("POST", "/v1/groups/default/restart", timeout=60).status == 200


def test_killed_between_the_start_of_a_restart_and_the_end_of_its_cell(start_daemon):
    daemon = start_daemon()
    daemon.create(2)
    cell = detached(daemon, "default", "import time; time.sleep(100)")
    time.sleep(0.3)
    kill(daemon)
    (path,) = daemon.state_dir.glob("groups/*/journal/*.ndjson")
    event = json.loads(path.read_bytes().splitlines()[-1])
    event = {"seq": event["seq"] + 1, "group": "default", "cell": None, "rank": None}
    event |= {"type": "status", "execution_state": "starting", "generation": 2, "time": time.time()}
    with open(path, "ab") as journal:
        journal.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
    daemon.start()
    assert wait_done(daemon, "default", cell, 10)[-1]["status"] == "lost"
    assert daemon.run("default", "print('goes on')") == "goes on\n"


def test_a_template_ends_with_the_daemon_while_it_imports(start_daemon):
    daemon = start_daemon()
    assert daemon.request("POST", "/v1/groups", {"ranks": 1, "wait": False}).status == 202
    (template,) = daemon.processes()
    while b"torch" not in maps_of(template):  # the import of torch goes on for long after that
        time.sleep(0.01)
    kill(daemon)
    time.sleep(0.3)
    assert not alive(template.pid)
    daemon.start()


def maps_of(process):
    with open(f"/proc/{process.pid}/maps", "rb") as maps:
        return maps.read()
