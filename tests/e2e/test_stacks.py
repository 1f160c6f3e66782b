# SPDX-License-Identifier: Apache-2.0
"""Where ranks are, whatever they do: answered within the deadline, with the line of the cell."""

import concurrent.futures
import contextlib
import json
import os
import signal
import threading
import time

import pytest
import websocket
from conftest import printed

DEADLINE_S = 2.0
SETUP = "import ctypes, os, re, subprocess, threading, time, torch, torch.distributed as dist\n"


def stacks(daemon, group, query=""):
    """The answer, and seconds it took."""
    started = time.monotonic()
    reply = daemon.request("GET", f"/v1/groups/{group}/stacks{query}")
    assert reply.status == 200, reply.text
    return reply.json, time.monotonic() - started


@contextlib.contextmanager
def running(daemon, group, code, settle=0.4):
    """The cell runs; afterwards it is interrupted, twice, so that no grace is waited for."""
    where = daemon.cell(group, code, Prefer="respond-async").headers["location"]
    time.sleep(settle)
    try:
        yield where
    finally:
        for pause in (0.2, 0):
            daemon.request("POST", f"/v1/groups/{group}/interrupt")
            time.sleep(pause)
        daemon.request("GET", f"{where}/events?after=0")


@pytest.fixture
def pair(daemon, group):
    daemon.run(group, SETUP)
    return group


STATES = {
    "sleep": "time.sleep(60)",
    "python loop": "while True: pass",
    "gil held in C": "ctypes.PyDLL(None).sleep(3)",
    "big power": "x = 3 ** 30_000_000",
    "backtracking": "re.match('(a*)*b', 'a' * 28)",
    "lock": "threading.Lock().acquire() and threading.Event().wait()",
    "subprocess": "subprocess.run(['sleep', '60'])",
    "os.read": "os.read(os.pipe()[0], 1)",
    "collective": "dist.all_reduce(torch.ones(3)) if rank == 0 else time.sleep(60)",
}


@pytest.mark.parametrize("state", STATES)
def test_the_line_is_known_in_every_state(daemon, pair, state):
    code = f"\n\ndef work():\n    {STATES[state]}\n\nwork()"
    with running(daemon, pair, code):
        got, took = stacks(daemon, pair)
    assert took < 1, took
    for rank in got["ranks"]:
        assert rank["problem"] is None and rank["state"] == "busy"
        user = rank["user"]
        assert (user["function"], user["line"]) == ("work", 2)
        assert user["source"] == STATES[state]
        assert rank["where"] == f"Cell In[{user['execution_count']}], line 2"
        main = rank["threads"][0]
        assert main["current"] and main["name"] == "MainThread"
        mine = [f for f in main["frames"] if f["file"].startswith("Cell In[")]
        assert [(f["function"], f["line"]) for f in mine] == [("work", 2), ("<module>", 4)]
        assert mine[0]["cell"] == user["cell"]
    assert [s["ranks"] for s in got["summary"]] == [[0, 1]] and got["differ"] == []
    if state == "collective":
        assert "all_reduce" in [f["function"] for f in got["ranks"][0]["threads"][0]["frames"]]


def test_idle_ranks(daemon, pair):
    got, took = stacks(daemon, pair)
    assert took < 1
    assert {r["where"] for r in got["ranks"]} == {"idle"}
    assert got["summary"] == [{"where": "idle", "user": None, "ranks": [0, 1]}]
    assert daemon.run(pair, "print('still here')") == "still here\n"


def befores(events):
    return {e["before"]: e for e in events if e.get("before")}


@pytest.fixture
def three(daemon):
    daemon.create(ranks=3, name="three", grace_s=1)
    daemon.run("three", SETUP)
    yield "three"
    daemon.delete("three")


def test_a_failed_rank_leaves_word_where_the_others_waited(daemon, three):
    code = "if rank == 1:\n    raise ValueError('x')\ndist.all_reduce(torch.ones(3))"
    events = daemon.cell(three, code).events
    assert events[-1]["type"] == "done" and events[-1]["status"] == "error"
    rungs = [e.get("rung") or e.get("before") for e in events if e.get("reason") or "before" in e]
    assert rungs == ["interrupt", "interrupt", "abort", "abort"]
    for event in befores(events).values():
        (place,) = event["stacks"]
        assert place["ranks"] == [0, 2] and event["differ"] == []
        assert place["user"]["source"] == "dist.all_reduce(torch.ones(3))"
        assert place["where"].endswith(", line 3")
    assert [e["rank"] for e in events if e["type"] == "error" and not e.get("released")][0] == 1


def test_an_interrupt_tells_which_rank_differs(daemon, three):
    code = "if rank == 2:\n    time.sleep(60)\ndist.all_reduce(torch.ones(3))"
    with running(daemon, three, code) as where:
        pass
    told = befores(daemon.request("GET", f"{where}/events?after=0").events)["interrupt"]
    assert told["differ"] == [2]
    assert [(p["ranks"], p["user"]["line"]) for p in told["stacks"]] == [([0, 1], 3), ([2], 2)]


def test_a_rank_is_not_killed_before_its_stack_is_recorded(daemon, three):
    code = "def stuck():\n    sum(range(10**13))\nif rank == 1: stuck()\ndist.barrier()"
    with running(daemon, three, code) as where:
        pass
    events = daemon.request("GET", f"{where}/events?after=0").events
    kill = next(e for e in events if e.get("rung") == "kill")
    told = befores(events)["kill"]
    assert told["seq"] < kill["seq"]
    (place,) = told["stacks"]
    assert place["ranks"] == [1] and place["user"]["source"] == "sum(range(10**13))"
    assert place["user"]["function"] == "stuck"


def test_a_stopped_process_is_named_when_it_is_killed(daemon, three):
    pid = daemon.request("GET", f"/v1/groups/{three}").json["ranks"][2]["pid"]
    with running(daemon, three, "time.sleep(60)") as where:
        os.kill(pid, signal.SIGSTOP)
    events = daemon.request("GET", f"{where}/events?after=0").events
    problem = befores(events)["kill"]["stacks"][0]["where"]
    assert problem.endswith("the process is stopped (state T)")
    assert events[-1]["ranks"]["2"] == "lost"


def test_a_stopped_process_does_not_hold_up_the_answer(daemon, pair):
    ranks = daemon.request("GET", f"/v1/groups/{pair}").json["ranks"]
    with running(daemon, pair, "time.sleep(60)"):
        os.kill(ranks[1]["pid"], signal.SIGSTOP)
        try:
            got, took = stacks(daemon, pair)
        finally:
            os.kill(ranks[1]["pid"], signal.SIGCONT)
        assert DEADLINE_S <= took < DEADLINE_S + 1
        assert got["ranks"][0]["user"]["source"] == "time.sleep(60)"
        stopped = got["ranks"][1]
        assert stopped["problem"] == "no answer within 2 s: the process is stopped (state T)"
        assert stopped["where"] == stopped["problem"] and stopped["threads"] == []
        assert got["differ"] == [0, 1]  # one each: neither is most of them
        again, took = stacks(daemon, pair)  # it goes on, and its late answer confuses nobody
        assert took < 1 and again["differ"] == []


def test_many_ask_at_once(daemon, pair):
    with (
        running(daemon, pair, "while True: pass"),
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        answers = list(pool.map(lambda _: stacks(daemon, pair), range(64)))
    assert all(len(a["ranks"]) == 2 and not a["ranks"][0]["problem"] for a, _ in answers)
    assert max(took for _, took in answers) < DEADLINE_S


def test_other_calls_go_on_meanwhile(daemon, pair):
    pid = daemon.request("GET", f"/v1/groups/{pair}").json["ranks"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        asked = threading.Thread(target=stacks, args=(daemon, pair))
        asked.start()
        started = time.monotonic()
        for _ in range(20):
            assert daemon.request("GET", "/healthz").status == 200
        assert time.monotonic() - started < 1 and asked.is_alive()
        asked.join()
    finally:
        os.kill(pid, signal.SIGCONT)


def test_who_asks_may_leave(daemon, pair):
    pid = daemon.request("GET", f"/v1/groups/{pair}").json["ranks"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            daemon.request("GET", f"/v1/groups/{pair}/stacks", timeout=0.3)
        time.sleep(DEADLINE_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert stacks(daemon, pair)[0]["differ"] == []


def test_group_that_is_deleted_meanwhile(daemon):
    daemon.create(name="brief", ranks=1)
    pid = daemon.request("GET", "/v1/groups/brief").json["ranks"][0]["pid"]
    os.kill(pid, signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(stacks, daemon, "brief")
        time.sleep(0.2)
        daemon.delete("brief")
        assert "problem" in asked.result()[0]["ranks"][0]


def test_as_text(daemon, pair):
    with running(daemon, pair, "def f():\n    time.sleep(60)\nf()"):
        reply = daemon.request(
            "GET", f"/v1/groups/{pair}/stacks?ranks=1", headers={"Accept": "text/plain"}
        )
        assert (
            daemon.request(
                "GET", f"/v1/groups/{pair}/stacks", headers={"Accept": "image/png"}
            ).status
            == 406
        )
    lines = reply.text.splitlines()
    n = lines[0].partition("In[")[2].partition("]")[0]
    assert lines[0] == f"[1] busy, Cell In[{n}], line 2: time.sleep(60)"
    assert lines[1].startswith("  thread MainThread (0x")
    assert lines[2:] == [
        f"    Cell In[{n}], line 2, in f",
        f"    Cell In[{n}], line 3, in <module>",
    ]


def test_over_the_websocket(daemon, pair):
    ws = websocket.create_connection(
        f"ws{daemon.url[4:].rstrip()}/v1/ws", header=[f"Authorization: Bearer {daemon.token}"]
    )
    with contextlib.closing(ws):
        ws.send(json.dumps({"id": 7, "op": "stacks", "group": pair, "ranks": [1]}))
        answer = json.loads(ws.recv())
    assert answer["id"] == 7 and answer["status"] == 200
    assert [r["rank"] for r in answer["body"]["ranks"]] == [1]


def test_while_ranks_start_and_when_one_is_dead(daemon, tmp_path):
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text("import time; time.sleep(4)")
    daemon.request(
        "POST",
        "/v1/groups",
        {"ranks": 2, "name": "late", "wait": False, "env": {"PYTHONPATH": str(tmp_path / "slow")}},
    )
    try:
        got, took = stacks(daemon, "late")
        assert took < 1
        assert {r["where"] for r in got["ranks"]} == {
            "the process is starting and has not reported yet"
        }
    finally:
        daemon.delete("late")


def test_dead_rank(daemon, pair):
    daemon.cell(pair, "if rank == 1: os._exit(3)")
    got, _ = stacks(daemon, pair)
    assert got["ranks"][1]["where"] == "the rank is dead" and got["ranks"][1]["pid"] is None
    assert got["ranks"][0]["where"] == "idle"


def test_joining_ranks_are_seen_too(daemon, three):
    """A rank that waits for another one to join is not idle, and says where it waits."""
    pid = daemon.request("GET", f"/v1/groups/{three}").json["ranks"][2]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        daemon.request("POST", f"/v1/groups/{three}/restart?ranks=1", headers=ASYNC)
        deadline, functions = time.monotonic() + 20, []
        while "init_process_group" not in functions and time.monotonic() < deadline:
            time.sleep(0.1)
            got, _ = stacks(daemon, three, "?ranks=0")
            rank = got["ranks"][0]
            functions = [f["function"] for f in rank["threads"][0]["frames"]]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert rank["where"] == "joining" and rank["state"] == "joining"
    assert "join" in functions and "init_process_group" in functions


ASYNC = {"Prefer": "respond-async"}


def test_threads_that_python_started_are_shown(daemon, pair):
    code = """
def worker():
    wake.wait()
wake = threading.Event()
threading.Thread(target=worker, name="loader").start()
time.sleep(.2)
"""
    daemon.run(pair, code)
    got, _ = stacks(daemon, pair)
    for rank in got["ranks"]:
        main, loader = rank["threads"]
        assert loader["name"] == "loader" and not loader["current"] and main["current"]
        assert "worker" in [f["function"] for f in loader["frames"]]
    daemon.run(pair, "wake.set(); time.sleep(.2)")
    assert [len(r["threads"]) for r in stacks(daemon, pair)[0]["ranks"]] == [1, 1]


def test_user_code_is_not_disturbed(daemon, pair):
    """Sleeps keep their length, reads and writes their bytes, while stacks are asked for."""
    code = """
import socket
a, b = socket.socketpair()
got = []
def feed():
    for i in range(200):
        a.sendall(bytes(5000)); time.sleep(.005)
    a.close()
t = threading.Thread(target=feed); t.start()
while data := b.recv(100_000): got.append(len(data))
t.join()
started = time.monotonic(); time.sleep(1); slept = time.monotonic() - started
done = subprocess.run(['sleep', '.3']).returncode
print(sum(got), round(slept, 1), done)
"""
    where = daemon.cell(pair, code, Prefer="respond-async").headers["location"]
    count = 0
    while daemon.request("GET", where).json["state"] != "done":
        assert not any(r["problem"] for r in stacks(daemon, pair)[0]["ranks"])
        count += 1
    assert count > 20
    events = daemon.request("GET", f"{where}/events?after=0").events
    assert events[-1]["status"] == "ok", events
    assert [printed(events, rank) for rank in (0, 1)] == ["1000000 1.0 0\n"] * 2


def test_users_own_handler_for_the_signal_is_left_alone(daemon, pair):
    """No signal is sent then: what the user's handler does with it is nobody's guess."""
    code = "import signal\nhits = []\nsignal.signal(signal.SIGRTMAX - 5, lambda *a: hits.append(a))"
    daemon.run(pair, code)
    got, took = stacks(daemon, pair)
    assert took < 1
    assert all("own handler" in r["problem"] for r in got["ranks"])
    assert daemon.run(pair, "print(hits)") == "[]\n"


def test_blocked_signal_is_named(daemon, pair):
    code = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMAX - 5])
time.sleep(1.5)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGRTMAX - 5])
"""
    where = daemon.cell(pair, code, Prefer="respond-async").headers["location"]
    time.sleep(0.3)
    got, took = stacks(daemon, pair)
    assert took < 1 and all("blocked the signal" in r["problem"] for r in got["ranks"])
    assert daemon.request("GET", f"{where}/events?after=0").events[-1]["status"] == "ok"
    assert not stacks(daemon, pair)[0]["ranks"][0]["problem"]


def test_faulthandler_of_the_users_and_forked_children(daemon, pair):
    code = """
import faulthandler, multiprocessing
faulthandler.enable(); faulthandler.disable()
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)); child.start()
time.sleep(60)
"""
    with running(daemon, pair, code):
        got, _ = stacks(daemon, pair)
        assert [p["user"]["source"] for p in got["summary"]] == ["time.sleep(60)"]
    assert daemon.run(pair, "child.kill(); child.join(); print(child.exitcode)") in ("-9\n", "1\n")


def test_code_that_a_cell_makes_and_recursion(daemon, pair):
    code = """
def down(n):
    return down(n - 1) if n else time.sleep(60)
get_ipython().run_cell("pass\\ndown(300)")
"""
    with running(daemon, pair, code):
        got, _ = stacks(daemon, pair)
    assert {r["user"]["function"] for r in got["ranks"]} == {"down"}
    assert got["ranks"][0]["user"]["source"].startswith("return down(n - 1)")
    assert len(got["ranks"][0]["threads"][0]["frames"]) == 100  # faulthandler's bound


def test_code_of_an_earlier_cell_keeps_its_line(daemon, pair):
    daemon.run(pair, "def wait():\n    x = 1\n    time.sleep(60)")
    with running(daemon, pair, "wait()"):
        got, _ = stacks(daemon, pair)
    user = got["ranks"][0]["user"]
    assert user["source"] == "time.sleep(60)" and user["line"] == 3
    outer = [f for f in got["ranks"][0]["threads"][0]["frames"] if f["cell"]][-1]
    assert outer["cell"] == user["cell"] + 1


def test_what_a_rank_answers_is_bounded_and_made_printable(daemon, pair):
    """Code in a rank can write to the daemon's socket: here it answers before it is asked."""
    code = """
path = next(line.split()[-1] for line in open("/proc/self/maps") if "libddipworker.so" in line)
post = ctypes.CDLL(path).ddw_post
post.argtypes = (*[ctypes.c_uint32] * 3, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int)
frame = b'  File "' + b"x\\x1b[31m\\xff" * 40 + b'", line 1 in f\\n'
huge = b"Thread 0x1 [a] (most recent call first):\\n" + frame * 5000
end = time.monotonic() + 3
while time.monotonic() < end:
    post(8, 0, 0xffffffff, huge if rank else b"nonsense", len(huge) if rank else 8, -1)
"""
    where = daemon.cell(pair, code, Prefer="respond-async").headers["location"]
    time.sleep(0.5)
    seen = set()
    for _ in range(10):
        got, took = stacks(daemon, pair)
        assert took < DEADLINE_S + 1
        malformed, long = got["ranks"]
        assert malformed["problem"] in (None, "its answer was malformed")
        assert all(len(r["text"]) < 160 * 1024 for r in got["ranks"])
        assert "\\x1b" not in long["text"] and long["text"].isascii()
        seen |= {malformed["problem"], long["threads"][0]["thread"]}
    assert {"its answer was malformed", "0x1"} <= seen
    events = daemon.request("GET", f"{where}/events?after=0").events
    assert events[-1]["status"] == "ok", events[-1]


def test_many_questions_while_threads_come_and_go(daemon, pair):
    """Dumping threads from outside crashes here; they must dump themselves."""
    code = """
def f(depth):
    names = {}
    exec("def g(d):\\n return d and g(d - 1) or [x * x for x in range(20)]", names)
    names["g"](depth % 30)
def spawn():
    while time.monotonic() < end:
        threading.Thread(target=f, args=(12,)).start()
end = time.monotonic() + 4
threading.Thread(target=spawn).start()
while time.monotonic() < end: f(7)
"""
    where = daemon.cell(pair, code, Prefer="respond-async").headers["location"]
    asked = 0
    while daemon.request("GET", where).json["state"] != "done":
        got, _ = stacks(daemon, pair)
        assert not any(r["problem"] for r in got["ranks"])
        asked += 1
    assert daemon.request("GET", where).json["status"] == "ok" and asked > 50
