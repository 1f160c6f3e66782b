# SPDX-License-Identifier: Apache-2.0
"""The real daemon, over real sockets, with real ranks. Processes are ended by pid, and counted."""

import contextlib
import http.client
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
READY_S = 20
STOP_S = 20


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def in_time(ask, seconds=30):
    """ask()'s answer, asked again while that is a 504: ranks have 0.4 s for one, on any machine."""
    end = time.monotonic() + seconds
    while (reply := ask()).status == 504 and time.monotonic() < end:
        pass
    return reply


@contextlib.contextmanager
def stopped(pid):
    """SIGSTOP, until all threads have; SIGCONT afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        tasks = Path(f"/proc/{pid}/task")
        wait_until(lambda: all(") T " in (t / "stat").read_text() for t in tasks.iterdir()))
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def of_type(events, type):
    return [e for e in events if e["type"] == type]


def printed(events, rank=0, name="stdout"):
    """What a rank wrote to a stream. (One print() may come as several events.)"""
    mine = (e for e in of_type(events, "stream") if (e["rank"], e["name"]) == (rank, name))
    return "".join(e["text"] for e in mine)


def text(cell, name=None):
    """What a notebook's cell shows as plain text, without colours; of one stream if named."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream" and name in (None, output.name):
            parts.append(output.text)
        elif output.output_type == "error" and name is None:
            parts.append("\n".join(output.traceback))
        elif name is None and "data" in output:
            parts.append(output.data.get("text/plain", "") + "\n")
    return re.sub(r"\x1b\[[0-9;]*m", "", "".join(parts))


class UnixConnection(http.client.HTTPConnection):
    """http.client over a Unix socket."""

    def __init__(self, path, timeout=60):
        super().__init__("d", timeout=timeout)
        self._path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Reply:
    """status, headers (lower case) and body of one answer."""

    def __init__(self, response):
        self.status = response.status
        self.headers = {k.lower(): v for k, v in response.getheaders()}
        self.body = response.read()

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def events(self):
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def text(self):
        return self.body.decode()


class Daemon:
    """One ddipd with folders of its own."""

    def __init__(self, build, folder, *options, env=None, listen="127.0.0.1:0"):
        self.build = build
        self.folder = Path(folder)
        self.runtime_dir = self.folder / "run"
        self.state_dir = self.folder / "state"
        self.socket = str(self.runtime_dir / "ddipd.sock")
        self.log = self.folder / "log"
        self.command = [
            str(build / "ddipd"),
            "--runtime-dir",
            str(self.runtime_dir),
            "--state-dir",
            str(self.state_dir),
            "--listen",
            listen,
            "--python",
            sys.executable,
            *options,
        ]
        self.env = {**os.environ, **(env or {})}
        self.env.pop("XDG_RUNTIME_DIR", None)
        self.process = None

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command, stderr=log, env=self.env)
        deadline = time.monotonic() + READY_S
        while not self.answers():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        return self

    def answers(self):
        try:
            return self.request("GET", "/healthz", timeout=2).status == 200
        except OSError:
            return False

    @property
    def pid(self):
        return self.process.pid

    @property
    def url(self):
        return (self.runtime_dir / "url").read_text()

    @property
    def token(self):
        return (self.runtime_dir / "token").read_text()

    def open(self, method, path, body=None, headers=None, timeout=60):
        """The response, its body not read yet, and the connection to close."""
        connection = UnixConnection(self.socket, timeout)
        if isinstance(body, (dict, list)):
            body = json.dumps(body)
        connection.request(method, path, body, headers or {})
        return connection.getresponse(), connection

    def request(self, method, path, body=None, headers=None, timeout=60):
        response, connection = self.open(method, path, body, headers, timeout)
        with contextlib.closing(connection):
            return Reply(response)

    def cell(self, group, code, accept=None, **headers):
        headers = {"Content-Type": "text/x-python", **headers}
        if accept:
            headers["Accept"] = accept
        return self.request("POST", f"/v1/groups/{group}/cells", code.encode(), headers)

    def run(self, group, code):
        """Text printed by rank 0; the cell must succeed."""
        events = self.cell(group, code).events
        assert events[-1]["status"] == "ok", [e for e in events if e["type"] == "error"]
        return printed(events)

    def create(self, ranks=2, **body):
        reply = self.request("POST", "/v1/groups", {"ranks": ranks, **body}, timeout=120)
        assert reply.status == 201, reply.text
        return reply.json

    def delete(self, group):
        reply = self.request("DELETE", f"/v1/groups/{group}", timeout=30)
        assert reply.status == 200, reply.text
        return reply.json

    def processes(self):
        """Living descendants."""
        children = psutil.Process(self.pid).children(recursive=True)
        return [p for p in children if p.status() != psutil.STATUS_ZOMBIE]

    def stop(self, with_signal=signal.SIGINT):
        """Ends the daemon and everything it started; returns its exit code."""
        if self.process is None:
            return None
        below = []
        if self.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                below = psutil.Process(self.pid).children(recursive=True)
            self.process.send_signal(with_signal)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        for process in below:  # psutil knows by start time whether the pid is still that process
            with contextlib.suppress(psutil.NoSuchProcess):
                if with_signal == signal.SIGINT:
                    process.wait(2)
                process.kill()
        self.process = None
        return code


@pytest.fixture(scope="session")
def build():
    return (ROOT / os.environ.get("DDIP_BUILD", "build")).resolve()


@contextlib.contextmanager
def fresh_daemon(build, *options, **settings):
    # not pytest's tmp_path: a Unix socket's path has room for 107 characters
    folder = tempfile.mkdtemp(prefix="ddip-")
    daemon = Daemon(build, folder, *options, **settings)
    try:
        yield daemon.start()
    finally:
        code = daemon.stop()
        log = daemon.log.read_text()
        shutil.rmtree(folder, ignore_errors=True)
        print(log)
        assert code in (0, None), f"ddipd ended with exit code {code}"


@pytest.fixture(scope="session")
def daemon(build):
    with fresh_daemon(build) as daemon:
        yield daemon


@pytest.fixture
def start_daemon(build):
    """start_daemon(*options, env=...): a daemon of the test's own."""
    with contextlib.ExitStack() as stack:
        yield lambda *options, **settings: stack.enter_context(
            fresh_daemon(build, *options, **settings)
        )


@pytest.fixture
def group(daemon):
    """The name of a ready group of two CPU ranks."""
    name = f"g{secrets.token_hex(4)}"
    daemon.create(name=name, cwd=str(ROOT))
    yield name
    daemon.request("DELETE", f"/v1/groups/{name}", timeout=30)


@pytest.fixture
def notebook(daemon, build):
    """notebook(cells, env=None): the cells run in a real kernel that finds the session's daemon."""
    import nbformat
    from kernels import UnixKernelManager
    from nbclient import NotebookClient

    def run(cells, env=None, allow_errors=False, timeout=100):
        node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        client = NotebookClient(
            node,
            timeout=timeout,
            kernel_name="python3",
            kernel_manager_class=UnixKernelManager,
            allow_errors=allow_errors,
        )
        environment = {
            **os.environ,
            "DDIP_RUNTIME_DIR": str(daemon.runtime_dir),
            "DDIPD": str(build / "ddipd"),
            **(env or {}),
        }
        client.execute(env=environment)
        return node

    yield run
    for found in daemon.request("GET", "/v1/groups").json["groups"]:
        daemon.request("DELETE", f"/v1/groups/{found['name']}", timeout=30)
