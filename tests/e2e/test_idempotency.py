# SPDX-License-Identifier: Apache-2.0
"""A request sent again under its Idempotency-Key does nothing twice, whatever the daemon went
through meanwhile."""

import contextlib
import json
import secrets
import socket
import time

import pytest
from conftest import printed

COUNT = {"code": "n = globals().get('n', 0) + 1\nprint('run', n)"}
ASYNC = {"Prefer": "respond-async"}


def restart(daemon):
    daemon.process.kill()
    daemon.process.wait()
    daemon.start()


def journal(daemon):
    return b"".join(p.read_bytes() for p in daemon.state_dir.glob("groups/*/journal/*.ndjson"))


def send_and_kill(daemon, path, body, key, sign):
    """Sends a POST and kills the daemon as soon as the journal has `sign`; reads no answer."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\n"
    head += f"Idempotency-Key: {key}\r\nContent-Length: {len(data)}\r\n\r\n"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.connect(daemon.socket)
        connection.sendall(head.encode() + data)
        deadline = time.monotonic() + 60
        while sign not in journal(daemon):
            assert time.monotonic() < deadline
        daemon.process.kill()
        daemon.process.wait()


def post(daemon, body, key, path="/v1/groups/default/cells", headers=ASYNC):
    return daemon.request("POST", path, body, {**headers, "Idempotency-Key": key}, timeout=60)


def runs(daemon):
    """How often COUNT has run on each rank."""
    events = daemon.request("GET", "/v1/groups/default/events?follow=false&after=0").events
    lines = ((rank, line) for rank in (0, 1) for line in printed(events, rank).splitlines())
    return [(rank, line) for rank, line in lines if line.startswith("run ")]


def test_lost_answer_of_a_cell(start_daemon):
    daemon = start_daemon()
    daemon.create(2)
    for i in range(3):
        key = secrets.token_hex(16)
        send_and_kill(daemon, "/v1/groups/default/cells", COUNT, key, key.encode())
        daemon.start()
        again = post(daemon, COUNT, key)
        assert again.status == 202, again.text
        number = again.json["cell"]
        events = daemon.request("GET", f"/v1/groups/default/cells/{number}/events").events
        assert events[0]["idempotency_key"] == key and events[-1]["status"] == "ok"
        assert post(daemon, COUNT, key).json["cell"] == number
        cells = daemon.request("GET", "/v1/groups/default/cells").json["cells"]
        assert [c["cell"] for c in cells] == list(range(1, i + 2))
        other = post(daemon, {"code": "other = 1"}, key)
        assert other.status == 409 and key in other.json["detail"]
        assert runs(daemon) == [(r, f"run {n + 1}") for r in (0, 1) for n in range(i + 1)]


def test_key_of_a_cell_whose_events_are_gone(start_daemon):
    """The journal's limit has taken the cell: the heads of later files still have its key."""
    daemon = start_daemon("--journal-limit", "1M")
    daemon.create(1)
    first = post(daemon, COUNT, "a key").json["cell"]
    flood = "for i in range(3000): print('x' * 1000)"
    daemon.run("default", flood)
    restart(daemon)
    assert b'"a key"' in journal(daemon) and b"run 1" not in journal(daemon)
    gone = post(daemon, COUNT, "a key")
    assert gone.status == 410 and f"cell {first}," in gone.json["detail"]
    assert post(daemon, {"code": "1"}, "a key").status == 409
    assert daemon.run("default", "print(n)") == "1\n"


def test_last_keys_are_kept(start_daemon):
    """256 of them; the oldest is forgotten, and so runs anew."""
    daemon = start_daemon()
    daemon.create(1)
    cells = [post(daemon, {"code": "1"}, f"k{i}").json["cell"] for i in range(257)]
    for _ in range(2):
        assert post(daemon, {"code": "1"}, "k256").json["cell"] == cells[256]
        assert post(daemon, {"code": "1"}, "k1").json["cell"] == cells[1]
        restart(daemon)
    assert post(daemon, {"code": "1"}, "k0").json["cell"] == cells[256] + 1


@pytest.mark.parametrize("key", ["x" * 129, "caf\u00e9", "tab\there"])
def test_unfit_keys(daemon, group, key):
    path = f"/v1/groups/{group}/cells"
    refused = post(daemon, COUNT, key.encode("latin-1"), path)
    assert refused.status == 422 and "1 to 128 printable ASCII" in refused.json["detail"]
    body = {"ranks": 1, "name": "never"}
    assert post(daemon, body, key.encode("latin-1"), "/v1/groups").status == 422
    assert post(daemon, COUNT, "x" * 128, path).status == 202


def test_lost_answer_of_a_group(start_daemon):
    daemon = start_daemon()
    body = {"ranks": 2, "name": "kept"}
    made = post(daemon, body, "g", "/v1/groups", {})
    assert made.status == 201
    restart(daemon)
    again = post(daemon, body, "g", "/v1/groups", {})
    assert again.status == 201
    assert [r["pid"] for r in again.json["ranks"]] == [r["pid"] for r in made.json["ranks"]]
    assert post(daemon, {"ranks": 3, "name": "kept"}, "g", "/v1/groups", {}).status == 409
    assert post(daemon, body, "another", "/v1/groups", {}).status == 409


def test_group_that_was_starting(start_daemon):
    """It has failed; who asks for it again hears that once, and then may have another."""
    daemon = start_daemon()
    body = {"ranks": 2, "name": "default"}
    send_and_kill(daemon, "/v1/groups", body, "g", b'"starting"')
    daemon.start()
    failed = post(daemon, body, "g", "/v1/groups", {})
    assert failed.status == 503 and "restarted while the group was starting" in failed.text
    assert daemon.request("GET", "/v1/groups").json["groups"] == []
    assert post(daemon, body, "g", "/v1/groups", {}).status == 201
