# SPDX-License-Identifier: Apache-2.0
"""Completion, inspection and the list of variables: at once, whatever the rank is at, and without
running what its objects would compute."""

import contextlib
import time

import pytest
from conftest import stopped, wait_until

OBJECTS = '''
import dataclasses, threading, time, torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 4)

class Learner:
    """What trains."""
    def __init__(self):
        self.model, self.ran = Net(), []
    def __getattr__(self, name):
        self.__dict__["ran"].append(name)
        raise AttributeError(name)
    def __dir__(self):
        print("this is no output of a cell")
        return [*object.__dir__(self), "from_dir"]
    def __repr__(self):
        self.ran.append("repr")
        time.sleep(60)
    def fit(self, epochs, *, lr_max=0.1):
        "Trains for so many epochs."
    @property
    def gathered(self):
        "A collective."
        self.ran.append("gathered")
        time.sleep(60)

@dataclasses.dataclass
class Config:
    lr: float
    net: object

learn = Learner()
config = Config(0.5, learn)
table = {"alpha": 1, "beta": [learn] * 1000}
weights = torch.zeros(3, 4)
huge = 10 ** 100_000
'''


@pytest.fixture(scope="module")
def asked(daemon):
    """A group of one rank, which has OBJECTS."""
    daemon.create(1, name="asked")
    daemon.run("asked", OBJECTS)
    yield "asked"
    daemon.delete("asked")


@pytest.fixture
def ask(daemon, asked):
    """ask("complete" or "inspect", code, ...): the answer, which a loaded machine may give late."""

    def ask(what, code, **more):
        body = {"code": code, **more}
        reply = daemon.request("POST", f"/v1/groups/{asked}/{what}", body)
        end = time.monotonic() + 20
        while reply.status == 504 and time.monotonic() < end:
            reply = daemon.request("POST", f"/v1/groups/{asked}/{what}", body)
        assert reply.status == 200, reply.text
        return reply.json

    return ask


@contextlib.contextmanager
def running(daemon, group, code):
    """The cell runs, and says so; afterwards it is interrupted."""
    code = f"print('runs', flush=True)\n{code}"
    where = daemon.cell(group, code, Prefer="respond-async").headers["location"]
    wait_until(lambda: "runs" in daemon.request("GET", f"{where}/events?follow=false").text[150:])
    try:
        yield where
    finally:
        daemon.request("POST", f"/v1/groups/{group}/interrupt")
        daemon.request("GET", f"{where}/events?after=0")


COMPLETIONS = {
    "wei": ["weights"],
    "learn.fi": [".fit"],
    "learn.from_": [".from_dir"],
    "learn.model.fc.in_f": [".in_features"],
    "x = 1 + learn.model.fc.wei": [".weight"],
    "for i in range(3):\n    learn.model.fc.bia": [".bias"],
    "learn.fit(1, lr": ["lr_max="],
    "print(learn.fit(lr": ["lr_max="],
    "table['al": ["alpha"],
    "weights.device.typ": [".type"],
    "learn.gathered.x": [],
    "learn.missing.x": [],
    "learn.fit(": None,
    "nothing_there": [],
    "": None,
}


@pytest.mark.parametrize("code", COMPLETIONS)
def test_completion(ask, code):
    found, wanted = ask("complete", code), COMPLETIONS[code]
    matches = found["matches"]
    assert len(matches) <= 500
    if code.startswith("weights."):  # C code's attributes are plain values
        assert ".type" in matches
    elif wanted is not None:
        assert matches == wanted
    start, end = found["cursor_start"], found["cursor_end"]
    assert end == len(code) and all(m.startswith(code[start:end]) for m in matches)
    types = found["metadata"]["_jupyter_types_experimental"]
    assert [each["text"] for each in types] == matches


def test_a_long_cell_that_does_not_parse_is_no_work(ask):
    """Parsing it once per character, as IPython does, would take minutes."""
    code = "if (:\n" + "    total = total + 1\n" * 5000 + "learn.fi"
    started = time.monotonic()
    found = ask("complete", code)
    assert found["matches"] == [".fit"] and code[found["cursor_start"] :] == ".fi"
    assert ask("inspect", code + "t")["found"] and time.monotonic() - started < 5


@pytest.mark.parametrize("start", ["x", "é", "not ", "x.", "d[", "('", "\n", "x\n", "if x:\n"])
def test_no_code_is_much_work(ask, start):
    """IPython's expressions take the cube of a line's length, hours for these."""
    started = time.monotonic()
    code = start * 10_000 + " learn.fi"
    for what in ("complete", "inspect"):
        ask(what, start * 10_000)
    assert ask("complete", code)["cursor_end"] == len(code) and time.monotonic() - started < 10
    if start.isspace():
        assert ask("complete", code)["matches"] == [".fit"]


def test_cut_line(ask):
    code = "f(" + "x, " * 1000 + "learn.fi"
    assert ask("complete", code)["matches"] == [".fit"]
    assert ask("complete", "a" * 500 + "learn.fi")["matches"] == []
    assert "learn" in ask("complete", "for i in range(3):\n    ")["matches"]


def test_cursor_is_counted_in_characters(ask):
    code = "'größe', learn.fi, 1"
    found = ask("complete", code, cursor_pos=len("'größe', learn.fi"))
    assert found["matches"] == [".fit"] and found["cursor_end"] == 17
    assert "Trains" in ask("inspect", "'größe', learn.fit(2)", cursor_pos=17)["data"]["text/plain"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("learn.fit(1", ["fit", "epochs", "lr_max", "Trains for so many epochs."]),
        ("learn", ["Learner", "What trains."]),
        ("learn.gathered", ["property", "A collective."]),
        ("weights", ["shape [3, 4]", "float32", "cpu"]),
        ("config", ["Config(lr=0.5, net=<Learner>)"]),
        ("len", ["Signature"]),
    ],
)
def test_inspection(ask, code, words):
    found = ask("inspect", code)
    assert found["found"] and "text/html" in found["data"]
    plain = found["data"]["text/plain"]
    assert all(word in plain for word in words), plain


def test_source_is_there_for_detail(ask):
    source = ask("inspect", "learn.fit", detail_level=1)["data"]["text/plain"]
    assert "Trains for so many epochs." in source and "def" in source


@pytest.mark.parametrize("code", ["nothing_there", "learn.missing", "1 + 2", ""])
def test_nothing_to_inspect(ask, code):
    assert ask("inspect", code) == {"status": "ok", "found": False, "data": {}, "metadata": {}}


def test_nothing_of_the_objects_own_ran(daemon, asked, ask):
    for code in ("learn.gathered.x", "learn.missing.x", "learn", "config.net.gathered.y"):
        ask("complete", code)
        ask("inspect", code)
    reply = daemon.request("GET", f"/v1/groups/{asked}/namespace?wait=false")
    rows = {row["name"]: row for row in reply.json["variables"]}
    assert (
        rows["learn"]["repr"] is None and rows["config"]["repr"] == "Config(lr=0.5, net=<Learner>)"
    )
    assert rows["table"]["repr"].startswith("{'alpha': 1, 'beta': [<Learner>, ")
    assert len(rows["table"]["repr"]) <= 200 and rows["huge"]["repr"].startswith("<int of")
    assert (rows["weights"]["shape"], rows["weights"]["dtype"]) == ([3, 4], "torch.float32")
    # IPython itself asks every object for some names
    ran = daemon.run(asked, "print([n for n in learn.ran if n[0] != '_' and n != 'getdoc'])")
    assert ran == "[]\n"


BUSY = {
    "python loop": "while True: pass",
    "sleep": "time.sleep(60)",
    "lock": "threading.Event().wait()",
    "changing names": "while True: globals().update({f'v{i}': i for i in range(99)}); "
    "[globals().pop(f'v{i}') for i in range(99)]",
}


@pytest.mark.parametrize("busy", BUSY)
def test_answers_while_a_cell_runs(daemon, asked, ask, busy):
    with running(daemon, asked, BUSY[busy]) as where:
        for _ in range(5):
            assert ask("complete", "learn.fi")["matches"] == [".fit"]
        assert ask("inspect", "learn.fit")["found"]
        rows = f"/v1/groups/{asked}/namespace?wait=false"
        wait_until(lambda: daemon.request("GET", rows).status == 200)
        assert "learn" in daemon.request("GET", rows).text
        assert daemon.request("GET", where).json["state"] == "running"
    events = daemon.request("GET", f"{where}/events").text
    assert '"status":"interrupted"' in events and "no output of a cell" not in events


def test_stopped_rank_gives_no_answer_quickly(daemon, asked):
    pid = daemon.request("GET", f"/v1/groups/{asked}").json["ranks"][0]["pid"]
    with stopped(pid):
        for _ in range(10):  # more than the rank's library keeps
            started = time.monotonic()
            reply = daemon.request("POST", f"/v1/groups/{asked}/complete", {"code": "x" * 10_000})
            assert reply.status == 504 and time.monotonic() - started < 5
        assert "rank 0 has not answered within 0.4 s" in reply.json["detail"]
        assert "/stacks" in reply.json["hint"] and reply.json["rank"] == 0
    path = f"/v1/groups/{asked}/complete"
    wait_until(lambda: daemon.request("POST", path, {"code": "wor"}).status == 200)
    assert daemon.run(asked, "print(1)") == "1\n"


def test_code_that_keeps_the_gil(daemon, asked):
    code = "import ctypes; ctypes.PyDLL(None).sleep(2)"
    where = daemon.cell(asked, code, Prefer="respond-async").headers["location"]
    path, statuses = f"/v1/groups/{asked}/inspect", []
    while daemon.request("GET", where).json["state"] != "done":
        statuses.append(daemon.request("POST", path, {"code": "learn"}).status)
    assert 504 in statuses and set(statuses) <= {200, 504}
    wait_until(lambda: daemon.request("POST", path, {"code": "learn"}).status == 200)


def test_starting_group_refuses_at_once(daemon):
    body = {"name": "early", "ranks": 1, "wait": False}
    assert daemon.request("POST", "/v1/groups", body).status == 202
    path = "/v1/groups/early/complete"
    statuses = {daemon.request("POST", path, {"code": "wor"}).status}
    wait_until(lambda: daemon.request("POST", path, {"code": "wor"}).status == 200)
    daemon.delete("early")
    assert statuses <= {409, 504, 200}


def test_many_variables_are_cut(daemon, asked):
    daemon.run(asked, "globals().update({f'many{i:04}': i for i in range(1500)})")
    rows = daemon.request("GET", f"/v1/groups/{asked}/namespace").json
    assert len(rows["variables"]) == 1000 and rows["omitted"] > 500
    daemon.run(asked, "[globals().pop(f'many{i:04}') for i in range(1500)]")
