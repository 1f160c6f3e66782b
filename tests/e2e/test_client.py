# SPDX-License-Identifier: Apache-2.0
"""The Python API against a real daemon and real ranks."""

import os
import threading
import time
from pathlib import Path

import ddip
import numpy as np
import pytest
import torch

HERE = "import os, torch, torch.distributed as dist\nrank = dist.get_rank()\n"


@pytest.fixture(params=["unix", "tcp"], scope="module")
def client(request, daemon):
    where = {"unix": (daemon.socket, None), "tcp": (daemon.url, daemon.token)}[request.param]
    with ddip.connect(*where) as client:
        yield client


@pytest.fixture
def unix(daemon):
    with ddip.connect(daemon.socket) as client:
        yield client


def text(events, rank=0, name="stdout"):
    chosen = [e for e in events if e["type"] == "stream" and (e["rank"], e["name"]) == (rank, name)]
    return "".join(event["text"] for event in chosen)


def run(client, code, group, **options):
    events = list(client.execute(code, group, **options))
    assert events[-1]["status"] == "ok", [e for e in events if e["type"] == "error"]
    return events


def gone(pid):
    """True once the process has ended (it may still wait to be reaped by its parent)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_connect_by_environment(daemon, monkeypatch):
    monkeypatch.delenv("DDIP_URL", raising=False)
    monkeypatch.setenv("DDIP_RUNTIME_DIR", str(daemon.runtime_dir))
    pids = {ddip.connect().info()["pid"], ddip.connect(daemon.runtime_dir).info()["pid"]}
    monkeypatch.setenv("DDIP_URL", daemon.url)
    pids.add(ddip.connect().info()["pid"])
    assert len(pids) == 1


def test_wrong_token_is_refused(daemon):
    with pytest.raises(ddip.DdipError) as caught:
        ddip.connect(daemon.url, "wrong")
    assert caught.value.status == 401


def test_group_object(client, group):
    found = client.group(group)
    assert (found["state"], found["world_size"], found["backend"]) == ("ready", 2, "gloo")
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert group in [each["name"] for each in client.groups()]


def test_unknown_group(client):
    for call in (client.group, client.delete_group, client.cells, client.interrupt):
        with pytest.raises(ddip.DdipError) as caught:
            call("no-such-group")
        assert caught.value.status == 404
    with pytest.raises(ddip.DdipError) as caught:
        client.execute("1", "no-such-group")
    assert caught.value.status == 404


def test_cell_on_every_rank(client, group):
    code = HERE + "t = torch.ones(3) * (rank + 1)\ndist.all_reduce(t)\nprint(rank, t.sum().item())"
    events = run(client, code, group)
    assert events[0]["type"] == "execute_input" and events[-1]["type"] == "done"
    assert events[-1]["ranks"] == {"0": "ok", "1": "ok"}
    assert (text(events, 0), text(events, 1)) == ("0 9.0\n", "1 9.0\n")
    numbers = [event["seq"] for event in events]
    assert numbers == sorted(set(numbers))


def test_on_event_returns_done(client, group):
    seen = []
    done = client.execute("print(1)", group, on_event=seen.append)
    assert done is seen[-1] and done["status"] == "ok"


def test_cell_on_one_rank(client, group):
    events = run(client, "print('one')", group, ranks=[1])
    assert (text(events, 0), text(events, 1)) == ("", "one\n")
    assert events[-1]["ranks"] == {"1": "ok"}


@pytest.mark.alone
def test_first_line_comes_at_once(client, group):
    started = time.monotonic()
    for event in client.execute("print('now')\nimport time; time.sleep(1)", group):
        if event["type"] == "stream" and event["rank"] == 0:
            assert time.monotonic() - started < 0.5
            break
    else:
        pytest.fail("no stream event")
    run(client, "pass", group)


def test_error_is_an_event_and_the_next_cell_runs(client, group):
    run(client, "kept = 5", group)
    events = list(client.execute(HERE + "if rank == 1: raise ValueError('boom')", group))
    [error] = [event for event in events if event["type"] == "error"]
    assert (error["rank"], error["ename"], error["evalue"]) == (1, "ValueError", "boom")
    assert events[-1]["status"] == "error" and events[-1]["ranks"]["1"] == "error"
    assert text(run(client, "print(kept)", group), 1) == "5\n"


def test_timeout_of_a_cell(client, group):
    started = time.monotonic()
    done = client.execute("import time; time.sleep(60)", group, timeout_s=0.5, on_event=id)
    assert done["status"] == "interrupted" and time.monotonic() - started < 10


def test_interrupt_keeps_the_namespace(client, group):
    run(client, "kept = [1]", group)
    cell = client.execute("print('on', flush=True)\nimport time; time.sleep(60)", group)
    next(event for event in cell if event["type"] == "stream")
    started = time.monotonic()
    assert client.interrupt(group)["cell"] == cell.cell
    events = list(cell)
    assert events[-1]["status"] == "interrupted" and time.monotonic() - started < 2
    assert client.pull("kept", group, rank="all") == [[1], [1]]


def test_cells_wait_for_each_other(client, group):
    first = client.execute("import time; time.sleep(0.5); order = [1]", group)
    second = client.execute("order.append(2)", group)
    assert second.cell > first.cell and second.position
    assert list(second)[-1]["status"] == "ok" and list(first)[-1]["status"] == "ok"
    assert client.pull("order", group) == [1, 2]


def test_threads_share_a_client(client, group):
    results = {}

    def work(number):
        results[number] = text(run(client, f"print({number})", group))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == {number: f"{number}\n" for number in range(8)}


def test_replay_is_equal(client, group):
    live = run(client, "print('a'); print('b'); 1 + 1", group)
    cell = live[0]["cell"]
    assert list(client.events(group, cell)) == live
    assert list(client.events(group, cell, after=live[2]["seq"])) == live[3:]


def test_events_of_a_whole_group(client, group):
    stream = client.events(group, after=client.group(group)["last_seq"])
    live = run(client, "print('a')", group)
    same = []
    for event in stream:
        if event["cell"] is not None:
            same.append(event)
        if event["type"] == "done":
            break
    stream.close()
    assert same == live


def test_detached_cell(client, group):
    code = "import time\nfor i in range(3): print(i, flush=True); time.sleep(0.1)"
    started = client.submit(code, group)
    events = list(client.events(group, started["cell"]))
    assert text(events) == "0\n1\n2\n" and events[0]["seq"] == started["first_seq"]
    record = client.cells(group)[-1]
    assert (record["cell"], record["state"], record["status"]) == (started["cell"], "done", "ok")


def test_dropping_the_iterator_stops_nothing(client, group):
    cell = client.execute("import time; time.sleep(0.3); survived = True", group)
    cell.close()
    run(client, "pass", group)
    assert client.pull("survived", group) is True


def test_push_and_pull_arrays_and_tensors(client, group):
    base = torch.arange(300_000.0)
    values = {"a": np.arange(12).reshape(3, 4), "base": base, "view": base[10:20], "n": {"k": (1,)}}
    done = client.push(values, group)
    assert sorted(done["names"]) == ["a", "base", "n", "view"] and done["ranks"] == [0, 1]
    run(client, "view[0] = -1; a *= 2; assert base[10] == -1", group)
    got = client.pull(["a", "base", "view", "n"], group, rank=1)
    assert (got["a"] == 2 * values["a"]).all() and got["n"] == {"k": (1,)}
    assert got["base"][10] == got["view"][0] == -1 and base[10] == 10
    got["base"][10] = 7
    assert got["view"][0] == 7


def test_push_of_functions_and_classes(client, group):
    scope = {"__name__": "__main__"}
    exec("k = 3\nclass P:\n    def f(self, x): return k * x\ng = lambda x: P().f(x) + 1", scope)
    client.push({"P": scope["P"], "g": scope["g"]}, group)
    assert text(run(client, "print(P().f(2), g(5))", group)) == "6 16\n"


def test_classes_of_the_ranks_come_back_by_value(client, group):
    run(client, "class Q:\n    def __init__(self): self.x = 4\nq = Q()", group)
    assert client.pull("q", group).x == 4


def test_push_to_one_rank(client, group):
    client.push({"only": 1}, group, ranks=[1])
    assert "only" in [row["name"] for row in client.variables(group, rank=1)]
    assert "only" not in [row["name"] for row in client.variables(group, rank=0)]


def test_pull_forms(client, group):
    run(client, HERE, group)
    assert client.pull("rank", group) == 0 and client.pull("rank", group, rank=1) == 1
    assert client.pull("rank", group, rank="all") == [0, 1]
    assert client.pull(["rank"], group, rank="all") == [{"rank": 0}, {"rank": 1}]


def test_pull_of_a_missing_name(client, group):
    with pytest.raises(ddip.DdipError, match="no_such_name") as caught:
        client.pull(["no_such_name"], group, rank=1)
    assert (caught.value.status, caught.value.rank) == (404, 1)


def test_pull_of_what_cannot_be_pickled(client, group):
    run(client, "import threading; lock = threading.Lock()", group)
    with pytest.raises(ddip.DdipError, match="lock"):
        client.pull("lock", group)
    run(client, "pass", group)


def test_variables(client, group):
    client.push({"w": torch.zeros(3, 4), "s": "text"}, group)
    rows = {row["name"]: row for row in client.variables(group)}
    assert (rows["w"]["shape"], rows["w"]["type"], rows["w"]["device"]) == ([3, 4], "Tensor", "cpu")
    assert rows["s"]["type"] == "str"


def in_time(ask, code, group):
    """Asked again while a loaded machine has no answer within 0.4 s."""
    end = time.monotonic() + 30
    while True:
        try:
            return ask(code, group=group)
        except ddip.DdipError as error:
            if error.status != 504 or time.monotonic() > end:
                raise


def test_complete_and_inspect(client, group):
    run(client, "someword = 1\ndef helper(x):\n    'says so'", group)
    assert "someword" in in_time(client.complete, "somew", group)["matches"]
    found = in_time(client.inspect, "helper", group)
    assert found["found"] and "says so" in found["data"]["text/plain"]


def test_life_of_a_group(unix, tmp_path):
    made = unix.create_group(2, name="life", cwd=str(tmp_path), env={"LIFE": "yes"})
    try:
        assert made["state"] == "ready" and made["cwd"] == str(tmp_path)
        events = run(unix, "import os; print(os.getcwd(), os.environ['LIFE'])", "life")
        assert text(events, 1) == f"{tmp_path} yes\n"
        with pytest.raises(ddip.DdipError) as caught:
            unix.create_group(2, name="life")
        assert caught.value.status == 409
        again = unix.restart("life")
        before = [rank["pid"] for rank in made["ranks"]]
        after = [rank["pid"] for rank in again["ranks"]]
        assert again["state"] == "ready" and not set(before) & set(after)
        assert again["generation"] > made["generation"] and all(map(gone, before))
    finally:
        assert unix.delete_group("life")["state"] == "gone"
    assert all(map(gone, after))


def test_interpreter_of_the_ranks(unix, monkeypatch, tmp_path):
    monkeypatch.setenv("DDIP_PYTHON", str(tmp_path / "no-such-python"))
    with pytest.raises(ddip.DdipError, match="no-such-python"):
        unix.create_group(1, name="other-python")
    if any(each["name"] == "other-python" for each in unix.groups()):
        unix.delete_group("other-python")


def test_dead_rank_ends_the_cell(unix):
    unix.create_group(2, name="dying")
    try:
        code = HERE + "if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()"
        events = list(unix.execute(code, "dying"))
        assert events[-1]["status"] == "lost" and events[-1]["ranks"]["1"] == "lost"
        again = unix.restart("dying", ranks=[1])
        assert again["state"] == "ready"
        run(unix, HERE + "dist.barrier()", "dying")
    finally:
        unix.delete_group("dying")


def test_cwd_is_the_callers(unix, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    unix.create_group(1, name="cwd")
    try:
        assert text(run(unix, "import os; print(os.getcwd())", "cwd")).strip() == os.getcwd()
    finally:
        unix.delete_group("cwd")
