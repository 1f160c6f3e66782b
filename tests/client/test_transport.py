# SPDX-License-Identifier: Apache-2.0
"""Requests, WebSockets and the resuming Cell over real sockets."""

import errno
import json
import os
import stat
import threading
import time

import pytest
from ddip import api, daemon, payload, retry, transport
from ddip.errors import DdipError, NotRunning, RankError
from fake_daemon import FakeDaemon, frame

PROBLEM = "application/problem+json"


def answer(body, status=200, kind="application/json"):
    return lambda *request: (status, kind, json.dumps(body).encode())


@pytest.fixture(params=["unix", "tcp"])
def path(request, tmp_path):
    return tmp_path / "d.sock" if request.param == "unix" else None


def client_of(fake, token="secret"):
    return api.Client(transport.Endpoint.parse(fake.url, token))


def event(seq, kind="stream", **fields):
    return {"seq": seq, "group": "default", "cell": 3, "rank": 0, "type": kind, **fields}


DONE = {"status": "ok", "ranks": {"0": "ok"}}


def runs(*events):
    """A talk() that accepts each execute and sends these events."""

    def talk(ws):
        while (message := ws.request()) is not None:
            body = {"group": "default", "cell": 3, "first_seq": 1, "position": 0}
            ws.send({"id": message["id"], "status": 202, "body": body}, *events)

    return talk


def test_json_request(path):
    fake = FakeDaemon(path, route=answer({"version": "0"}))
    assert client_of(fake).info() == {"version": "0"}
    method, target, headers = fake.seen[0]
    assert (method, target) == ("GET", "/v1/info")
    assert headers.get("authorization") == (None if path else "Bearer secret")


def test_query_and_names_are_encoded(path):
    fake = FakeDaemon(path, route=answer({"variables": []}))
    client_of(fake).variables("a/b c", rank=1)
    client_of(fake).restart("g", ranks=[0, 2])
    targets = [target for _, target, _ in fake.seen]
    assert targets == ["/v1/groups/a%2Fb%20c/namespace?rank=1", "/v1/groups/g/restart?ranks=0,2"]


def test_problem_becomes_an_exception(path):
    problem = {"title": "Not Found", "status": 404, "detail": "no group 'x'", "hint": "make it"}
    fake = FakeDaemon(path, route=answer(problem, 404, PROBLEM))
    with pytest.raises(DdipError) as caught:
        client_of(fake).group("x")
    error = caught.value
    assert (error.status, error.title, error.detail) == (404, "Not Found", "no group 'x'")
    assert str(error) == "no group 'x'\nhint: make it"


def test_error_of_a_rank_keeps_its_traceback(path):
    raised = {"ename": "ValueError", "evalue": "boom", "traceback": ["a", "b"]}
    problem = {"title": "x", "status": 422, "detail": "raised", "rank": 1, "error": raised}
    fake = FakeDaemon(path, route=answer(problem, 422, PROBLEM))
    with pytest.raises(RankError, match="rank 1: ValueError: boom") as caught:
        client_of(fake).pull("x")
    assert (caught.value.traceback, caught.value.rank) == (["a", "b"], 1)


def test_error_that_is_not_json():
    fake = FakeDaemon(route=lambda *request: (502, "text/html", b"<p>bad gateway"))
    with pytest.raises(DdipError, match="bad gateway") as caught:
        client_of(fake).info()
    assert caught.value.status == 502


def test_push_sends_the_payload_as_it_is(path):
    received = {}

    def route(method, target, headers, reader):
        received["body"] = reader.read(int(headers["content-length"]))
        received["kind"], received["target"] = headers["content-type"], target
        return 200, "application/json", b'{"names": ["x"], "bytes": 1, "ranks": [0]}'

    client_of(FakeDaemon(path, route=route)).push({"x": b"q" * 3_000_000}, ranks=[0])
    assert payload.load(received["body"]) == {"x": b"q" * 3_000_000}
    assert received["kind"] == "application/x-pickle"
    assert received["target"] == "/v1/groups/default/namespace?ranks=0"


def test_refusal_before_the_end_of_a_large_body(path):
    problem = {"title": "Content Too Large", "status": 413, "detail": "at most 1 KiB"}
    fake = FakeDaemon(path, route=answer(problem, 413, PROBLEM))
    with pytest.raises((DdipError, NotRunning)) as caught:
        client_of(fake).push({"x": bytes(20_000_000)})
    # over TCP the reset may overtake the answer
    assert caught.value.status == 413 or path is None


def test_pull_receives_into_one_writable_buffer(path):
    parts, _ = payload.dump({"x": bytearray(b"z" * 2_000_000), "y": 1})
    data = b"".join(parts)
    fake = FakeDaemon(path, route=lambda *request: (200, "application/x-pickle", data))
    client = client_of(fake)
    assert client.pull("x") == bytearray(b"z" * 2_000_000)
    assert set(client.pull(["x", "y"])) == {"x", "y"}


def test_what_cannot_be_sent_is_named():
    fake = FakeDaemon(route=answer({}))
    with pytest.raises(DdipError, match="cannot send lock: "):
        client_of(fake).push({"fine": 1, "lock": threading.Lock()})
    assert not fake.seen


def test_nobody_listens(tmp_path):
    with pytest.raises(NotRunning, match="no ddipd answers at .*nothing.sock"):
        api.connect(tmp_path / "nothing.sock")
    assert issubclass(NotRunning, ConnectionError)


def test_execute_reuses_its_connection(path):
    fake = FakeDaemon(path, talk=runs(event(1, text="a"), event(2, "done", **DONE)))
    client = client_of(fake)
    for _ in range(3):
        types = []
        done = client.execute("x", on_event=lambda e, types=types: types.append(e["type"]))
        assert types == ["stream", "done"] and done["status"] == "ok"
    assert len(fake.seen) == 1


def test_two_cells_at_once_do_not_mix():
    fake = FakeDaemon(talk=runs(event(1, text="a"), event(2, "done", **DONE)))
    client = client_of(fake)
    first, second = client.execute("x"), client.execute("y")
    pairs = [(a["seq"], b["seq"]) for a, b in zip(first, second, strict=True)]
    assert pairs == [(1, 1), (2, 2)]


def test_refused_cell_raises_at_once():
    def talk(ws):
        while (message := ws.request()) is not None:
            ws.send({"id": message["id"], "status": 404, "body": {"detail": "no group"}})

    client = client_of(FakeDaemon(talk=talk))
    for _ in range(2):
        with pytest.raises(DdipError, match="no group"):
            client.execute("x")


def test_fragments_pings_and_large_messages():
    text = json.dumps(event(1, text="é" * 100_000))
    data, pongs = text.encode(), []

    def talk(ws):
        message = ws.request()
        ws.send({"id": message["id"], "status": 202, "body": {"cell": 3}})
        ws.sock.sendall(frame(data[:70_001], 0x01) + frame(b"hi", 0x89))
        ws.sock.sendall(frame(data[70_001:70_010], 0x00) + frame(data[70_010:], 0x80))
        pongs.append(ws.receive())
        for byte in frame(json.dumps(event(2, "done", **DONE))):
            ws.sock.sendall(bytes([byte]))
        ws.receive()

    events = list(client_of(FakeDaemon(talk=talk)).execute("x"))
    assert events[0]["text"] == "é" * 100_000 and events[1]["type"] == "done"
    assert pongs == [(10, b"hi")]


def test_cut_connection_resumes_without_gap_or_repetition(path):
    asked = []

    def talk(ws):
        message = ws.request()
        asked.append(message)
        if message["op"] == "execute":
            ws.send({"id": message["id"], "status": 202, "body": {"cell": 3}}, event(1), event(2))
            ws.sock.sendall(frame(json.dumps(event(3)))[:20])
        elif len(asked) == 2:
            ws.send({"id": message["id"], "status": 200, "body": {}}, event(2), event(3))
            ws.sock.sendall(frame(b"\x03\xe9going away", 0x88))
        else:
            ws.send({"id": message["id"], "status": 200, "body": {}}, event(4))
            ws.send(event(5, "done", **DONE))
            ws.receive()

    cell = client_of(FakeDaemon(path, talk=talk)).execute("x")
    assert [each["seq"] for each in cell] == [1, 2, 3, 4, 5]
    assert [(m["op"], m.get("cell"), m.get("after")) for m in asked[1:]] == [
        ("cell_events", 3, 2),
        ("cell_events", 3, 3),
    ]


def test_daemon_that_stays_away_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "RETRY_S", 0.2)

    def talk(ws):
        ws.send({"id": ws.request()["id"], "status": 202, "body": {"cell": 3}}, event(1))
        fake.close()
        os.unlink(fake.url)

    fake = FakeDaemon(tmp_path / "d.sock", talk=talk)
    cell = client_of(fake).execute("x")
    assert next(cell)["seq"] == 1
    with pytest.raises(NotRunning, match="cell 3 of group 'default' may still be running"):
        next(cell)


def test_daemon_that_comes_back_is_found(tmp_path):
    later = []

    def talk(ws):
        ws.send({"id": ws.request()["id"], "status": 202, "body": {"cell": 3}}, event(1))
        fake.close()
        os.unlink(fake.url)
        threading.Timer(0.3, start_again).start()

    def start_again():
        later.append(FakeDaemon(fake.url, talk=runs(event(2), event(3, "done", **DONE))))

    fake = FakeDaemon(tmp_path / "d.sock", talk=talk)
    assert [each["seq"] for each in client_of(fake).execute("x")] == [1, 2, 3]


def test_pauses_grow_to_a_limit_and_differ(monkeypatch):
    """No crowd of clients at a daemon that is just back, and none that waits for minutes."""
    clock, pauses = [0.0], []

    def sleep(seconds):
        pauses.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(retry.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(retry.time, "sleep", sleep)
    told = []
    client = api.Client(transport.Endpoint.parse("/nowhere"), told.append)
    lost = NotRunning.after_sending("gone")
    with pytest.raises(NotRunning) as caught, retry.Absence(client) as absence:
        while True:
            absence.wait(lost)
    assert caught.value is lost and clock[0] == pytest.approx(retry.RETRY_S)
    assert pauses[0] < 0.08 and 2 < max(pauses) <= 3 and len(set(pauses)) == len(pauses)
    assert "".join(told).endswith("waiting up to 60 s for it ... not yet\n")
    with pytest.raises(NotRunning), retry.Absence(client) as absence:
        for _ in range(1000):
            absence.wait(NotRunning("not there"))
    assert clock[0] == pytest.approx(retry.RETRY_S + retry.KNOCK_S)


def test_peer_that_keep_alive_finds_dead_is_a_lost_connection():
    """The kernel says ETIMEDOUT, in Python a TimeoutError; the deadline's has no errno."""

    class Dead:
        def recv(self, size):
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    socket = transport.WebSocket.__new__(transport.WebSocket)
    socket._sock, socket._buffer = Dead(), bytearray()
    with pytest.raises(ConnectionError):
        socket.receive()


def test_deadline_then_iterating_on():
    go_on = threading.Event()

    def talk(ws):
        message = ws.request()
        body = {"id": message["id"], "status": 202, "body": {"cell": 3}}
        if message["op"] == "execute":
            ws.send(body, event(1))
            go_on.wait(5)
        else:
            ws.send(body, event(2, "done", **DONE))
            ws.receive()

    cell = client_of(FakeDaemon(talk=talk)).execute("x")
    cell.deadline = time.monotonic() + 0.1
    assert next(cell)["seq"] == 1
    with pytest.raises(TimeoutError):
        next(cell)
    cell.deadline = None
    assert [each["seq"] for each in cell] == [2]
    go_on.set()


def test_stale_idle_connection_is_not_used():
    def talk(ws):
        ws.send({"id": ws.request()["id"], "status": 202, "body": {"cell": 3}})
        ws.send(event(1, "done", **DONE))

    fake = FakeDaemon(talk=talk)
    client = client_of(fake)
    for _ in range(3):
        assert client.execute("x", on_event=print)["status"] == "ok"
        time.sleep(0.05)
    assert len(fake.seen) == 3


def test_endpoint_forms():
    parse = transport.Endpoint.parse
    assert parse("/run/ddipd/ddipd.sock").path == "/run/ddipd/ddipd.sock"
    assert parse("unix:/a/b").path == "/a/b"
    assert (parse("http://10.0.0.1:99", "t").port, parse("http://[::1]:9").authority) == (
        99,
        "[::1]:9",
    )
    assert "secret" not in repr(parse("http://h", "secret"))
    with pytest.raises(ValueError, match="https://h"):
        parse("https://h")


def test_discovery(tmp_path, monkeypatch):
    for name in ("DDIP_URL", "DDIP_TOKEN", "DDIP_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    fake = FakeDaemon(tmp_path / "ddipd.sock", route=answer({}))
    remote = FakeDaemon(route=answer({}))
    assert daemon.find(tmp_path).path == fake.url
    monkeypatch.setenv("DDIP_RUNTIME_DIR", str(tmp_path))
    assert daemon.find().path == fake.url
    (tmp_path / "url").write_text(remote.url + "\n")
    (tmp_path / "token").write_text("t0ken\n")
    assert daemon.find(remote.url).token == "t0ken"
    monkeypatch.setenv("DDIP_URL", remote.url)
    assert (daemon.find().port, daemon.find().token) == (int(remote.url.split(":")[2]), "t0ken")
    monkeypatch.setenv("DDIP_TOKEN", "other")
    assert daemon.find().token == "other"
    monkeypatch.delenv("DDIP_URL")
    monkeypatch.delenv("DDIP_TOKEN")
    fake.close()
    os.unlink(fake.url)
    assert daemon.find().token == "t0ken"
    remote.close()
    with pytest.raises(NotRunning, match="no ddipd answers at http"):
        daemon.find()


def test_start_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("DDIPD", str(tmp_path / "no-such-ddipd"))
    monkeypatch.setenv("DDIP_RUNTIME_DIR", str(tmp_path / "run"))
    with pytest.raises(NotRunning, match="no-such-ddipd.*\n.*set DDIPD"):
        daemon.start()


def test_start_that_fails_shows_the_log(tmp_path, monkeypatch):
    binary = tmp_path / "ddipd"
    binary.write_text("#!/bin/sh\necho 'error: cannot do that' >&2; exit 3\n")
    binary.chmod(0o755)
    monkeypatch.setenv("DDIPD", str(binary))
    monkeypatch.setenv("DDIP_RUNTIME_DIR", str(tmp_path / "run"))
    with pytest.raises(NotRunning, match="exited with status 3[^$]*cannot do that"):
        daemon.start()
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "run/ddipd.log").stat().st_mode) == 0o600
