# SPDX-License-Identifier: Apache-2.0
"""What a client can get wrong: a problem that says what and what to do, and an intact daemon."""

import contextlib
import http.client
import socket
import time

import pytest

CODE = {"Content-Type": "text/x-python"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def intact(daemon, group):
    """After each refusal the same daemon and the same ranks go on."""
    pid = daemon.request("GET", "/v1/info").json["pid"]
    ranks = daemon.request("GET", f"/v1/groups/{group}").json["ranks"]
    yield
    assert daemon.request("GET", "/v1/info").json["pid"] == pid == daemon.pid
    after = daemon.request("GET", f"/v1/groups/{group}").json["ranks"]
    assert [r["pid"] for r in after] == [r["pid"] for r in ranks]
    assert daemon.run(group, "print('well')") == "well\n"


def problem(reply, status, *words):
    assert reply.status == status, reply.text
    assert reply.headers["content-type"] == "application/problem+json"
    found = reply.json
    assert found["status"] == status and found["title"] and found["type"]
    text = found["detail"] + " " + found.get("hint", "")
    for word in words:
        assert word in text, text
    return found


def test_paths_and_methods(daemon, group):
    problem(daemon.request("GET", "/v1/nothing"), 404, "/v1/nothing")
    problem(daemon.request("GET", "/v1/groups/absent"), 404, "absent", "POST /v1/groups")
    problem(daemon.request("GET", f"/v1/groups/{group}/cells/77"), 404, "77")
    problem(daemon.request("GET", f"/v1/groups/{group}/cells/x/events"), 404)
    reply = daemon.request("PATCH", "/v1/groups")
    problem(reply, 405, "GET, POST")
    assert reply.headers["allow"] == "GET, POST"
    assert daemon.request("GET", "/v1/groups/").status == 200  # a trailing slash is tolerated


def test_json_bodies(daemon, group):
    cells = f"/v1/groups/{group}/cells"
    problem(daemon.request("POST", cells, '{"code": ', JSON), 400, "malformed JSON")
    problem(daemon.request("POST", cells, b'{"code": "\xff"}', JSON), 400, "not UTF-8 at byte 10")
    problem(daemon.request("POST", cells, '{"code": "\\u0000"}', JSON), 400, "NUL")
    problem(daemon.request("POST", cells, "[1]", JSON), 422, "object")
    problem(daemon.request("POST", cells, "{}", JSON), 422, '"code" is missing')
    problem(daemon.request("POST", cells, {"code": 1}, JSON), 422, '"code" must be a string')
    problem(daemon.request("POST", cells, {"code": "1", "silent": "no"}, JSON), 422, "silent")
    problem(daemon.request("POST", cells, {"code": "1", "timeout_s": -1}, JSON), 422, "timeout_s")
    problem(daemon.request("POST", cells, "[" * 100, JSON), 400, "nests deeper")


def test_code_bodies(daemon, group):
    cells = f"/v1/groups/{group}/cells"
    problem(daemon.request("POST", cells, b"print('\xff')", CODE), 400, "not UTF-8 at byte 7")
    problem(daemon.request("POST", cells, b"a\0b", CODE), 400, "NUL")
    problem(daemon.request("POST", cells, b"", CODE), 422, "empty")
    problem(
        daemon.request("POST", cells, b"x", {"Content-Type": "image/png"}), 415, "text/x-python"
    )
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d says of anything
    for body in (b"print(7)", b'{"code": "print(7)"}'):
        assert "7\n" in [e.get("text") for e in daemon.request("POST", cells, body, form).events]
    for bad in ([], [2], [-1], ["0"], 0, [0.5]):
        body = {"code": "1", "ranks": bad}
        problem(daemon.request("POST", cells, body, JSON), 422, "rank")
    problem(daemon.request("POST", f"{cells}?ranks=0,7", b"1", CODE), 422, "rank 7", "0 to 1")


def test_bodies_over_the_limit(start_daemon):
    daemon = start_daemon("--body-limit", "4K", "--payload-limit", "8K")
    daemon.create()
    cells, value = "/v1/groups/default/cells", "/v1/groups/default/namespace/x"
    problem(daemon.request("POST", cells, b"#" * 5000, CODE), 413, "5000")
    problem(daemon.request("POST", cells, iter([b"#" * 1000] * 6), CODE), 413, "4096")  # chunked
    problem(daemon.request("PUT", value, b"1" * 9000, JSON), 413, "9000")
    problem(daemon.request("PUT", value, iter([b"1" * 1000] * 9), JSON), 413, "payload_limit")
    assert daemon.run("default", "print(1)") == "1\n"


@pytest.mark.parametrize(
    "body, words",
    [
        ({}, ["ranks", "gpus"]),
        ({"ranks": 0}, ["1 to 256", "0"]),
        ({"ranks": 1.5}, ["whole number"]),
        ({"ranks": 2, "gpus": "all"}, ["not both"]),
        ({"gpus": "all"}, ["ranks"]),
        ({"ranks": 2, "name": "no/slash"}, ["name", "no/slash"]),
        ({"ranks": 2, "name": ""}, ["name"]),
        ({"ranks": 2, "backend": "nccl"}, ["gloo"]),
        ({"ranks": 2, "app": "nonsense"}, ["nonsense"]),
        ({"ranks": 2, "env": {"A": 1}}, ["env"]),
        ({"ranks": 2, "cwd": "relative"}, ["absolute"]),
        ({"ranks": 2, "name": "x", "python": "/no/such/python"}, ["/no/such/python", "IPython"]),
        ({"ranks": 2, "name": "x", "cwd": "/no/such/folder"}, ["/no/such/folder"]),
        ({"ranks": 2, "grace_s": "long"}, ["grace_s"]),
    ],
)
def test_group_requests(daemon, body, words):
    problem(daemon.request("POST", "/v1/groups", body), 422, *words)
    assert len(daemon.request("GET", "/v1/groups").json["groups"]) == 1


def test_group_that_exists(daemon, group):
    problem(daemon.request("POST", "/v1/groups", {"ranks": 2, "name": group}), 409, group)


def test_python_without_what_ranks_need(daemon, tmp_path):
    """An interpreter that lacks torch, and one that is no interpreter."""
    import venv

    venv.create(tmp_path / "bare", with_pip=False)
    bare = str(tmp_path / "bare/bin/python")
    body = {"ranks": 2, "name": "bare", "python": bare}
    problem(daemon.request("POST", "/v1/groups", body), 422, bare, "cannot import IPython")
    body["python"] = "/bin/false"
    problem(daemon.request("POST", "/v1/groups", body), 422, "/bin/false")
    assert "bare" not in [g["name"] for g in daemon.request("GET", "/v1/groups").json["groups"]]


def test_names_and_values(daemon, group):
    base = f"/v1/groups/{group}/namespace"
    problem(daemon.request("PUT", f"{base}/1x", "1", JSON), 422, "1x", "identifier")
    problem(daemon.request("GET", f"{base}/a-b"), 422, "a-b", "identifier")
    problem(daemon.request("GET", f"{base}/absent"), 404, "absent")
    problem(daemon.request("DELETE", f"{base}/absent"), 404, "absent")
    problem(daemon.request("PUT", f"{base}/x", "{", JSON), 422, "JSON")
    problem(daemon.request("PUT", f"{base}/x", b"\xff", {"Content-Type": "text/plain"}), 422)
    npy = {"Content-Type": "application/x-npy"}
    problem(daemon.request("PUT", f"{base}/x", b"not numpy", npy), 422, ".npy")
    problem(daemon.request("PUT", f"{base}/x", b"1", {"Content-Type": "a/b"}), 415, "x-pickle")
    problem(daemon.request("GET", f"{base}/x?rank=9"), 422, "rank 9")
    problem(daemon.request("GET", f"{base}/rank", headers={"Accept": "image/png"}), 406)
    problem(daemon.request("POST", base, {"pull": ["1x"]}, JSON), 422, "identifiers")
    problem(daemon.request("POST", base, {"pull": ["absent"]}, JSON), 404, "absent")
    daemon.run(group, "s = {1}")
    problem(daemon.request("GET", f"{base}/s", headers={"Accept": "application/json"}), 422, "set")


def test_pickle_that_does_not_load(daemon, group):
    import pickle

    class Bomb:
        def __reduce__(self):
            return eval, ("1/0",)

    pickled = {"Content-Type": "application/x-pickle"}
    path = f"/v1/groups/{group}/namespace/x"
    found = problem(daemon.request("PUT", path, pickle.dumps(Bomb()), pickled), 422, "rank")
    assert found["rank"] in (0, 1) and found["error"]["ename"] == "ZeroDivisionError"
    assert "Traceback" in found["error"]["traceback"][0]
    found = problem(daemon.request("PUT", path, b"DDIPPKL1\x01", pickled), 422, "damaged")
    problem(daemon.request("PUT", path, b"garbage", pickled), 422, "UnpicklingError")


def test_after_beyond_the_end(daemon, group):
    where = daemon.cell(group, "1", Prefer="respond-async").headers["location"]
    problem(daemon.request("GET", f"{where}/events?after=100000"), 422, "100000")
    problem(daemon.request("GET", f"{where}/events?after=x"), 422, "after")


# --- who asks -------------------------------------------------------------------------------------


def tcp(daemon, headers, path="/v1/info", method="GET"):
    host, port = daemon.url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        from conftest import Reply

        return Reply(connection.getresponse())


def test_token(daemon):
    assert tcp(daemon, {"Authorization": f"Bearer {daemon.token}"}).status == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": daemon.token}):
        reply = tcp(daemon, headers)
        problem(reply, 401, "token", "Authorization: Bearer")
        assert reply.headers["www-authenticate"] == "Bearer"
    problem(tcp(daemon, {}, "/v1/no/such/path"), 401)  # strangers do not learn what exists
    assert tcp(daemon, {}, "/healthz").status == 200


def test_host_and_origin(daemon):
    good = {"Authorization": f"Bearer {daemon.token}"}
    problem(tcp(daemon, {**good, "Host": "evil.example"}), 403, "evil.example", "allowed_hosts")
    problem(tcp(daemon, {**good, "Host": "evil.example"}, "/healthz"), 403)
    problem(tcp(daemon, {**good, "Origin": "http://evil.example"}), 403, "allowed_origins")
    problem(daemon.request("GET", "/v1/info", headers={"Origin": "http://evil.example"}), 403)
    own = daemon.url.removeprefix("http://")
    assert tcp(daemon, {**good, "Host": own, "Origin": daemon.url}).status == 200
    assert tcp(daemon, {**good, "Host": "localhost:3347"}).status == 200


def test_allowed_hosts_and_origins(start_daemon):
    daemon = start_daemon("--allowed-hosts", "gpu.lab", "--allowed-origins", "https://hub.lab")
    good = {"Authorization": f"Bearer {daemon.token}"}
    assert tcp(daemon, {**good, "Host": "gpu.lab:80", "Origin": "https://hub.lab"}).status == 200
    problem(tcp(daemon, {**good, "Origin": "https://other.lab"}), 403)


# --- connections ----------------------------------------------------------------------------------


def raw(daemon):
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(15)
    connection.connect(daemon.socket)
    return connection


@pytest.mark.parametrize("start", [b"", b"G", b"GET /v1/ws"])
def test_silent_connections_are_closed(daemon, start):
    with raw(daemon) as connection:
        connection.sendall(start)
        started = time.monotonic()
        with contextlib.suppress(ConnectionResetError):  # a Unix socket's word for "unread bytes"
            assert connection.recv(100) == b""
        assert 3 < time.monotonic() - started < 8


def test_slow_request_is_closed(start_daemon):
    daemon = start_daemon("--idle-timeout-s", "1")
    with raw(daemon) as connection:
        connection.sendall(b"POST /v1/groups HTTP/1.1\r\nHost: d\r\n")
        started = time.monotonic()
        while connection.recv(4096):
            pass
        assert time.monotonic() - started < 5


def test_slow_bytes_get_their_answer(daemon):
    with raw(daemon) as connection:
        for byte in b"GET /healthz HTTP/1.1\r\nHost: d\r\nConnection: close\r\n\r\n":
            connection.sendall(bytes([byte]))
            time.sleep(0.001)
        assert b"200 OK" in connection.recv(4096)


def test_upgrade_on_a_kept_alive_connection(daemon):
    upgrade = (
        b"GET /v1/ws HTTP/1.1\r\nHost: d\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with raw(daemon) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: d\r\n\r\n")
        assert b"200 OK" in connection.recv(4096)
        connection.sendall(upgrade)
        answer = b""
        while part := connection.recv(4096):
            answer += part
        assert answer.startswith(b"HTTP/1.1 426 ") and b"new connection" in answer


def test_plain_get_of_the_websocket(daemon):
    reply = daemon.request("GET", "/v1/ws")
    problem(reply, 426, "WebSocket")
    assert reply.headers["upgrade"] == "websocket"


def test_nonsense_on_the_sockets(daemon):
    for junk in (b"\x00" * 100, b"HELO mail\r\n\r\n", b"\x16\x03\x01" + b"x" * 200, b"GET\r\n\r\n"):
        with raw(daemon) as connection:
            connection.sendall(junk)
            time.sleep(0.05)


def test_strangers_at_the_workers_socket(daemon):
    """Wrong secrets, no HELLO, nonsense: refused, and the log says so without the secret."""
    path = str(daemon.runtime_dir / "workers.sock")
    header = bytes([1, 1, 0, 0]) + len(b'{"secret":"guess"}').to_bytes(4, "little") + bytes(24)
    for junk in (
        b"\xff" * 64,
        header + b'{"secret":"guess"}',
        b"\x01" * 10,
        bytes([1, 3]) + bytes(62),
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(15)
            connection.connect(path)
            connection.sendall(junk)
            if junk != b"\x01" * 10:
                with contextlib.suppress(ConnectionResetError):
                    said = connection.recv(100)
                    assert said == (bytes([1, 22]) + bytes(30) if b"guess" in junk else b"")
                    assert connection.recv(100) == b""
    assert "guess" not in daemon.log.read_text()


def test_client_that_leaves_while_waiting(daemon, group):
    """Waiting requests of vanished clients are forgotten at once, whatever they waited for."""
    import psutil

    process = psutil.Process(daemon.pid)
    reply = daemon.cell(group, "import time; time.sleep(1.5)", Prefer="respond-async")
    before = process.num_fds()
    where = reply.headers["location"]
    for path in (f"{where}/events?after=0", f"/v1/groups/{group}/namespace/rank"):
        connection = raw(daemon)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: d\r\n\r\n".encode())
        time.sleep(0.1)
        connection.close()
    time.sleep(0.3)
    assert process.num_fds() <= before
    assert daemon.request("GET", f"{where}/events?after=0").events[-1]["status"] == "ok"


def test_queue_limit(start_daemon):
    daemon = start_daemon("--queue-limit", "3")
    daemon.create()
    later = {"Prefer": "respond-async"}
    replies = [daemon.cell("default", "import time; time.sleep(.3)", **later) for _ in range(6)]
    assert [r.status for r in replies[:4]] == [202] * 4
    problem(replies[-1], 503, "waiting")


def test_command_line(build, tmp_path):
    import subprocess

    def run(*options):
        return subprocess.run([build / "ddipd", *options], capture_output=True, text=True)

    bad = tmp_path / "bad.conf"
    bad.write_text("# fine\nbody_limit = 12Q\n")
    cases = {
        ("--nonsense", "1"): "unknown argument",
        ("--listen", "here"): "HOST:PORT",
        ("--log-level", "loud"): "log_level",
        ("--body-limit",): "needs a value",
        ("--config", str(bad)): "bad.conf:2: body_limit must be a whole number",
        ("--config", "/no/such/file"): "/no/such/file",
    }
    for options, words in cases.items():
        done = run(*options)
        assert done.returncode == 2 and words in done.stderr, (options, done)
    good = tmp_path / "good.conf"
    good.write_text("body_limit = 2M # two\nlog_level=debug\n")
    shown = run("--config", str(good), "--check-config", "--log-level", "warn").stdout
    assert "body_limit = 2097152\n" in shown and "log_level = warn\n" in shown
    assert run("--version").stdout.startswith("ddipd ")
    (tmp_path / "open").mkdir(mode=0o755)
    done = run("--runtime-dir", str(tmp_path / "open"), "--state-dir", str(tmp_path / "s"))
    assert done.returncode == 1 and "0700" in done.stderr
