# SPDX-License-Identifier: Apache-2.0
"""Cells over HTTP: events, their order, formats, replay, subsets, interrupts."""

import contextlib
import json
import subprocess
import threading
import time

import pytest
from conftest import of_type, printed


def test_curl_runs_a_cell_on_all_ranks(daemon, group):
    url = f"http://d/v1/groups/{group}/cells"
    curl = ["curl", "-sN", "--unix-socket", daemon.socket, url]
    curl += ["-H", "Content-Type: text/x-python", "--data-binary", 'print("hi", rank)\nrank*10']
    out = subprocess.run(curl, capture_output=True, text=True, check=True).stdout
    events = [json.loads(line) for line in out.splitlines()]
    assert [printed(events, r) for r in (0, 1)] == ["hi 0\n", "hi 1\n"]
    results = {e["rank"]: e["data"]["text/plain"] for e in of_type(events, "execute_result")}
    assert results == {0: "0", 1: "10"}
    assert {e["rank"] for e in of_type(events, "rank_done")} == {0, 1}
    assert [e["type"] for e in events].count("done") == 1
    assert events[-1]["type"] == "done" and events[-1]["ranks"] == {"0": "ok", "1": "ok"}
    assert [e["seq"] for e in events] == list(
        range(events[0]["seq"], events[0]["seq"] + len(events))
    )

    out = subprocess.run([*curl, "-H", "Accept: text/plain"], capture_output=True, text=True).stdout
    assert sorted(out.splitlines()) == ["[0] 0", "[0] hi 0", "[1] 10", "[1] hi 1"]


def test_formats(daemon, group):
    record = daemon.cell(group, "print('x')\n1/0", "application/json").json
    assert record["events"][-1]["type"] == "done"
    assert record["cell"]["status"] == "error" and record["cell"]["code"].startswith("print")
    sse = daemon.cell(group, "print('x')", "text/event-stream")
    assert sse.headers["content-type"] == "text/event-stream"
    blocks = [b for b in sse.text.split("\n\n") if b]
    assert blocks[-1].split("\n")[1] == "event: done"
    assert json.loads(blocks[-1].split("\n")[2].removeprefix("data: "))["type"] == "done"
    plain = daemon.cell(group, "print('part', end=''); 1/0", "text/plain").text
    assert "[0] part\n" in plain
    assert "ZeroDivisionError: division by zero" in plain and "\x1b" not in plain
    assert plain.splitlines()[-1] == "-- error: [0] error [1] error"


def test_detached_cell_and_replay(daemon, group):
    reply = daemon.cell(group, "for i in range(5): print(i)", Prefer="respond-async")
    assert reply.status == 202
    accepted, where = reply.json, reply.headers["location"]
    replay = daemon.request("GET", f"{where}/events?after=0")
    again = daemon.request("GET", f"{where}/events?after=0")
    assert replay.body == again.body and replay.events[-1]["type"] == "done"
    assert printed(replay.events, 1) == "0\n1\n2\n3\n4\n"
    middle = replay.events[3]["seq"]
    assert daemon.request("GET", f"{where}/events?after={middle}").events == replay.events[4:]
    resumed = daemon.request("GET", f"{where}/events", headers={"Last-Event-ID": str(middle)})
    assert resumed.events == replay.events[4:]
    record = daemon.request("GET", where).json
    assert record["state"] == "done" and record["status"] == "ok"
    assert record["first_seq"] == accepted["first_seq"] == replay.events[0]["seq"]
    cells = daemon.request("GET", f"/v1/groups/{group}/cells").json["cells"]
    assert cells[-1]["cell"] == accepted["cell"]


def test_client_killed_in_mid_cell_loses_nothing(daemon, group):
    code = "import time\nfor i in range(20):\n    print(i)\n    time.sleep(.05)"
    response, connection = daemon.open(
        "POST", f"/v1/groups/{group}/cells", code.encode(), {"Content-Type": "text/x-python"}
    )
    first = json.loads(response.readline())
    response.readline()
    connection.sock.close()
    connection.close()
    where = f"/v1/groups/{group}/cells/{first['cell']}/events?after=0"
    events = daemon.request("GET", where).events
    assert events[0] == first and events[-1]["status"] == "ok"
    for rank in (0, 1):
        assert printed(events, rank) == "".join(f"{i}\n" for i in range(20))


@pytest.mark.alone
def test_first_line_comes_at_once(daemon, group):
    """Printed-to-received, by the rank's own clock, which is this machine's."""
    delays = []
    for code in ("print(time.time())", "print(time.time(), end='')", "os.system('date +%s.%N')"):
        response, connection = daemon.open(
            "POST",
            f"/v1/groups/{group}/cells",
            f"import time, os\n{code}\ntime.sleep(1)".encode(),
            {"Content-Type": "text/x-python"},
        )
        with contextlib.closing(connection):
            for line in response:
                event = json.loads(line)
                if event["type"] == "stream":
                    delays.append(time.time() - float(event["text"]))
                    break
            response.read()
    assert max(delays) < 0.2, delays


def test_order_of_everything_a_rank_writes(daemon, group):
    code = """
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None)
for i in range(20):
    print("python", i)
    libc.printf(b"c %d\\n", i)
    os.write(1, b"fd %d\\n" % i)
    subprocess.run(["echo", f"child {i}"])
    print("stderr", i, file=sys.stderr)
"""
    events = daemon.cell(group, code).events
    for rank in (0, 1):
        want = "".join(f"python {i}\nc {i}\nfd {i}\nchild {i}\n" for i in range(20))
        assert printed(events, rank) == want
        assert printed(events, rank, "stderr") == "".join(f"stderr {i}\n" for i in range(20))
    names = [e["name"] for e in of_type(events, "stream") if e["rank"] == 0]
    assert names.count("stderr") == 20  # each came where it belongs, not all at the end


def test_unusual_text(daemon, group):
    code = r"""
import os, sys
print("grüße \U0001f600 \x00 \x1b[31m \udc80")
os.write(1, "é".encode()[:1]); os.write(1, "é".encode()[1:] + b"\xff\n")
sys.stdout.buffer.write(b"bytes\n")
"a" * 100_000
"""
    events = daemon.cell(group, code).events
    assert printed(events, 0) == "grüße \U0001f600 \x00 \x1b[31m \\udc80\né\ufffd\nbytes\n"
    assert of_type(events, "execute_result")[0]["data"]["text/plain"].count("a") == 100_000
    broken = daemon.cell(
        group, "from IPython.display import display, HTML\ndisplay(HTML('\\x00\\ud800'))"
    )
    assert of_type(broken.events, "display_data")[0]["data"]["text/html"].startswith("\x00")


def test_ipython_semantics(daemon, group):
    events = daemon.cell(
        group,
        """
import asyncio
from IPython.display import display, clear_output, HTML
await asyncio.sleep(0.01)
handle = display(HTML("<b>1</b>"), display_id="x")
handle.update(HTML("<b>2</b>"))
clear_output(wait=True)
!echo shell $((20+1))
%time _ = sum(range(10))
1 + 1;
In[-1], __name__
""",
    ).events
    assert events[-1]["status"] == "ok", of_type(events, "error")
    shown, update = of_type(events, "display_data")[0], of_type(events, "update_display_data")[0]
    assert shown["data"]["text/html"] == "<b>1</b>" and update["data"]["text/html"] == "<b>2</b>"
    assert shown["transient"] == update["transient"] == {"display_id": "x"}
    assert of_type(events, "clear_output")[0]["wait"] is True
    assert "shell 21" in printed(events, 0) and "Wall time" in printed(events, 0)
    (result,) = (e for e in of_type(events, "execute_result") if e["rank"] == 0)
    assert "__main__" in result["data"]["text/plain"]


def test_figures_and_tables_are_rich(daemon, group):
    events = daemon.cell(
        group,
        "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\n"
        "class T:\n    def _repr_html_(self): return '<table>'\nT()",
    ).events
    assert any("image/png" in e["data"] for e in of_type(events, "display_data"))
    assert of_type(events, "execute_result")[0]["data"]["text/html"] == "<table>"


def test_traceback_has_the_cell_s_lines(daemon, group):
    events = daemon.cell(group, "def f():\n    raise ValueError('why')\nf()").events
    error = of_type(events, "error")[0]
    assert (error["ename"], error["evalue"]) == ("ValueError", "why")
    plain = daemon.cell(group, "def f():\n    raise ValueError('why')\nf()", "text/plain").text
    assert "line 2" in plain and "line 3" in plain
    for code, ename in (
        ("1 +", "SyntaxError"),
        ("%nomagic", "UsageError"),
        ("raise SystemExit", "SystemExit"),
    ):
        events = daemon.cell(group, code).events
        assert events[-1]["status"] == "error"
        assert {e["ename"] for e in of_type(events, "error")} == {ename}, events


def test_cells_are_called_as_the_front_end_calls_them(daemon, group):
    body = {"code": "1/0", "execution_count": 41}
    plain = {"Accept": "text/plain"}
    text = daemon.request("POST", f"/v1/groups/{group}/cells", body, plain).text
    assert "In[41]" in text.replace("In [", "In[")


def test_state_stays_and_env_is_torchrun_s(daemon, group):
    daemon.run(group, "a = rank + 1")
    assert daemon.run(group, "print(a)") == "1\n"
    code = (
        "import os, torch.distributed as dist, torch\n"
        "print([os.environ[k] for k in ('RANK','LOCAL_RANK','WORLD_SIZE','LOCAL_WORLD_SIZE')],"
        "dist.get_backend(), dist.get_rank(), rank, world_size)"
    )
    events = daemon.cell(group, code).events
    assert printed(events, 1) == "['1', '1', '2', '2'] gloo 1 1 2\n"


def test_subset_of_ranks(daemon, group):
    reply = daemon.request(
        "POST", f"/v1/groups/{group}/cells", {"code": "print(rank)", "ranks": [1]}
    )
    assert reply.events[0]["ranks"] == [1] and reply.events[-1]["ranks"] == {"1": "ok"}
    assert printed(reply.events, 1) == "1\n" and not printed(reply.events, 0)


def test_cells_queue_in_order(daemon, group):
    path = f"/v1/groups/{group}/cells"
    asynchronous = {"Prefer": "respond-async"}
    first = daemon.request("POST", path, {"code": "import time; time.sleep(.5)"}, asynchronous)
    second = daemon.request("POST", path, {"code": "x = 1"}, asynchronous).json
    assert second["position"] == 1
    third = daemon.request("POST", path, {"code": "print(x)"}).events
    queued = [e for e in of_type(third, "status") if e["execution_state"] == "queued"]
    assert queued[0]["position"] == 2
    assert printed(third, 0) == "1\n"
    assert daemon.request("GET", first.headers["location"]).json["state"] == "done"


@pytest.mark.alone
@pytest.mark.parametrize(
    "code",
    [
        "time.sleep(60)",
        "while True: pass",
        "for _ in range(60): os.system('sleep 60')",
        "!sleep 60",
        "import subprocess; subprocess.run(['sleep', '60'])",
    ],
)
def test_interrupt(daemon, group, code):
    daemon.run(group, "import os, time; kept = 42")
    reply = daemon.cell(group, code, Prefer="respond-async")
    where = reply.headers["location"]
    time.sleep(0.3)
    started = time.monotonic()
    answer = daemon.request("POST", f"/v1/groups/{group}/interrupt").json
    assert answer == {"cell": reply.json["cell"], "ranks": [0, 1]}
    events = daemon.request("GET", f"{where}/events?after=0", timeout=10).events
    assert time.monotonic() - started < 2
    if code[0] == "!":  # IPython ends the command and goes on, here as in a notebook
        assert events[-1]["status"] == "ok", events
    else:
        assert events[-1]["status"] == "interrupted", events
        assert {e["ename"] for e in of_type(events, "error")} == {"KeyboardInterrupt"}
    assert daemon.run(group, "print(kept)") == "42\n"


def test_interrupt_of_a_named_cell(daemon, group):
    """A waiting cell can be taken out of the queue; the running one is left alone."""
    later = {"Prefer": "respond-async"}
    path = f"/v1/groups/{group}/interrupt"
    first = daemon.cell(group, "import time; time.sleep(.5)", **later)
    second = daemon.cell(group, "never = 1", **later)
    number = second.json["cell"]
    assert daemon.request("POST", path, {"cell": number}).json == {"cell": number, "ranks": []}
    events = daemon.request("GET", second.headers["location"] + "/events").events
    assert events[-1]["status"] == "interrupted"
    assert daemon.request("POST", path, {"cell": number}).json["cell"] is None
    events = daemon.request("GET", first.headers["location"] + "/events").events
    assert events[-1]["status"] == "ok"
    assert daemon.run(group, "print('never' in globals())") == "False\n"


def test_interrupt_of_an_idle_group_changes_nothing(daemon, group):
    for _ in range(20):
        assert daemon.request("POST", f"/v1/groups/{group}/interrupt").json["cell"] is None
    assert daemon.run(group, "print(1)") == "1\n"


def test_no_interrupt_is_lost(daemon, group):
    """Interrupts at every moment of a cell's life: each ends the cell it named, and no other."""
    for i in range(30):
        reply = daemon.cell(group, "import time; time.sleep(30)", Prefer="respond-async")
        time.sleep(i * 0.0005)
        daemon.request("POST", f"/v1/groups/{group}/interrupt")
        where = reply.headers["location"]
        events = daemon.request("GET", f"{where}/events?after=0", timeout=5).events
        assert events[-1]["status"] == "interrupted", (i, events)
    assert daemon.run(group, "print('alive')") == "alive\n"


def check_interrupt_ends(daemon, group, code):
    """An interrupt 0.2 s after the start ends the cell, and the ranks go on. Returns its events."""
    reply = daemon.cell(group, code, Prefer="respond-async")
    time.sleep(0.2)
    daemon.request("POST", f"/v1/groups/{group}/interrupt")
    where = reply.headers["location"]
    started = time.monotonic()
    events = daemon.request("GET", f"{where}/events?after=0").events
    assert events[-1]["status"] == "interrupted" and time.monotonic() - started < 3
    assert daemon.run(group, "print('alive')") == "alive\n"
    return events


@pytest.mark.parametrize(
    "slow",
    [
        """
import time, torch
real = torch.is_grad_enabled
def once_slow():
    torch.is_grad_enabled = real
    time.sleep(0.5)
    return real()
torch.is_grad_enabled = once_slow
""",
        """
import time
def once_slow():
    get_ipython().events.unregister("pre_execute", once_slow)
    time.sleep(0.5)
get_ipython().events.register("pre_execute", once_slow)
""",
    ],
    ids=["in the rank's loop", "in a callback of IPython"],
)
def test_interrupt_between_a_cell_s_start_and_its_code(daemon, group, slow):
    """A rank has the cell and is still preparing: the interrupt waits for the code."""
    daemon.run(group, slow)
    check_interrupt_ends(daemon, group, "print('began'); time.sleep(30)")


@pytest.mark.parametrize(
    "code",
    [
        "class Slow:\n    def __del__(self): time.sleep(0.5)\nx = Slow(); del x; time.sleep(30)",
        """
import gc, weakref
class Node: pass
until = time.monotonic() + 1  # each collection ends with a callback: Python code at last
while time.monotonic() < until:
    node = Node(); node.self = node; ref = weakref.ref(node, lambda ref: sum(range(99_999)))
    del node; gc.collect()
time.sleep(30)
""",
    ],
    ids=["in __del__", "in the garbage collection"],
)
def test_interrupt_where_python_ignores_exceptions(daemon, group, code):
    daemon.run(group, "import time")
    events = check_interrupt_ends(daemon, group, code)
    assert "ignored" not in "".join(printed(events, rank, "stderr") for rank in (0, 1))


def test_timeout_of_a_cell(daemon, group):
    body = {"code": "import time; time.sleep(30)", "timeout_s": 0.3}
    started = time.monotonic()
    events = daemon.request("POST", f"/v1/groups/{group}/cells", body).events
    assert time.monotonic() - started < 2.5
    assert events[-1]["status"] == "interrupted"
    (stopping,) = (e for e in of_type(events, "status") if "rung" in e)
    assert stopping["rung"] == "interrupt" and "0.3 s" in stopping["reason"]


def test_idempotency_key(daemon, group):
    """The same request again follows the same cell; another one under its key is refused."""
    key = {"Idempotency-Key": f"key-{group}"}
    daemon.run(group, "n = 0")
    first = daemon.cell(group, "n += 1; print(n)", **key)
    again = daemon.cell(group, "n += 1; print(n)", **key)
    assert first.body == again.body and printed(again.events, 0) == "1\n"
    other = daemon.cell(group, "n += 2", **key)
    assert other.status == 409 and key["Idempotency-Key"] in other.json["detail"]
    assert daemon.run(group, "print(n)") == "1\n"
    body = {"ranks": 2, "name": f"{group}-twin"}
    made = [daemon.request("POST", "/v1/groups", body, key) for _ in range(2)]
    assert [m.status for m in made] == [201, 201]
    assert made[0].json["ranks"][0]["pid"] == made[1].json["ranks"][0]["pid"]
    body["ranks"] = 3
    assert daemon.request("POST", "/v1/groups", body, key).status == 409
    daemon.delete(f"{group}-twin")


def test_slow_reader_and_big_output(daemon, group):
    """A reader that stops reading neither stops the cell nor loses a line."""
    code = "for i in range(20000): print('line', i)"
    response, connection = daemon.open(
        "POST", f"/v1/groups/{group}/cells", code.encode(), {"Content-Type": "text/x-python"}
    )
    time.sleep(1)
    with contextlib.closing(connection):
        slow = [json.loads(line) for line in response]
    where = f"/v1/groups/{group}/cells/{slow[0]['cell']}/events?after=0"
    assert daemon.request("GET", where).events == slow
    for rank in (0, 1):
        assert printed(slow, rank) == "".join(f"line {i}\n" for i in range(20000))


def test_two_readers_see_the_same(daemon, group):
    code = "import time\nfor i in range(50):\n    print(i); time.sleep(.01)"
    where = daemon.cell(group, code, Prefer="respond-async").headers["location"]
    bodies = []

    def read():
        bodies.append(daemon.request("GET", f"{where}/events?after=0").body)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bodies[0] == bodies[1]


def test_events_of_all_cells(daemon, group):
    response, connection = daemon.open("GET", f"/v1/groups/{group}/events?after=0")
    with contextlib.closing(connection):
        daemon.run(group, "print('a')")
        daemon.run(group, "print('b')")
        seen = []
        for line in response:
            seen.append(json.loads(line))
            if sum(e["type"] == "done" for e in seen) == 2:
                break
    assert [e["seq"] for e in seen] == list(range(1, len(seen) + 1))
