# SPDX-License-Identifier: Apache-2.0
"""The clients of tests/chaos.py: forked processes, so that they can be killed and stopped.

What a client sees goes line by line to a file, and how it ended, as JSON, to another.
"""

import http.client
import json
import mmap
import os
import random
import signal
import struct
import time
import traceback

import ddip
from conftest import UnixConnection
from ddip.errors import DdipError, NotRunning

PATIENCE_S = 90


class Shared:
    """What the parent tells its clients: is the daemon up, and how often has it been disturbed."""

    def __init__(self):
        self._memory = mmap.mmap(-1, 16)

    def __call__(self):
        up, disturbed = struct.unpack("qq", self._memory[:])
        return bool(up), disturbed

    def tell(self, up, disturbed):
        self._memory[:] = struct.pack("qq", up, disturbed)

    def still(self, before):
        """The daemon was up at `before` and has been so ever since."""
        return before[0] and self() == before


class Client:
    """A process that runs `work(client)`. `killed`: by us, so it may have stopped anywhere."""

    def __init__(self, world, step, name, work, **about):
        self.step, self.name, self.killed = step, name, False
        self.shared, self.socket = world.shared, world.daemon.socket
        base = world.folder / "clients" / f"{step}-{name}-{len(world.clients)}"
        self.seen, self.out = base.with_suffix(".seen"), base.with_suffix(".out")
        self.about = about
        self.before = self.shared()
        self.pid = os.fork()
        if not self.pid:
            self._run(work)

    def _run(self, work):
        status = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._seen = os.open(self.seen, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self.end(**work(self))
            status = 0
        except BaseException:
            self.end(broken=traceback.format_exc())
        finally:
            os._exit(status)

    def see(self, line):
        os.write(self._seen, line)

    def end(self, **how):
        how["undisturbed"] = self.shared.still(self.before)
        partial = self.out.with_suffix(".tmp")
        partial.write_text(json.dumps(how))
        partial.rename(self.out)

    def signal(self, number):
        if self.alive():
            os.kill(self.pid, number)
            self.killed = self.killed or number == signal.SIGKILL
            return True
        return False

    def alive(self):
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = 0
        return bool(self.pid)

    def how(self):
        """How it ended; {} if it was killed before."""
        return json.loads(self.out.read_text()) if self.out.exists() else {}

    def lines(self):
        return self.seen.read_bytes().splitlines(keepends=True) if self.seen.exists() else []


BROKEN = (OSError, http.client.HTTPException)


def ask(socket, method, path, body=None, headers=None, timeout=PATIENCE_S):
    """A response, to be read, over a connection of its own."""
    connection = UnixConnection(socket, timeout)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
    return connection.getresponse()


def refusal(response):
    return {"status": response.status, "problem": response.read().decode(errors="replace")}


def call(method, path, body=None, headers=None):
    """One request, its answer kept."""

    def work(client):
        try:
            response = ask(client.socket, method, path, body, headers)
            return refusal(response)
        except BROKEN as error:
            return {"lost": repr(error)}

    return work


def follow(client, response):
    """Copies lines; says whether the last was the cell's end."""
    last = b""
    try:
        while line := response.readline():
            client.see(line)
            last = line
    except BROKEN:
        pass
    return b'"type":"done"' in last and last.endswith(b"\n")


def http_cell(group, cell):
    """One request that stays until the cell has ended, or the connection."""

    def work(client):
        try:
            response = ask(client.socket, "POST", f"/v1/groups/{group}/cells", cell)
        except BROKEN as error:
            return {"lost": repr(error)}
        if response.status != 200:
            return refusal(response)
        return {"status": 200, "done": follow(client, response)}

    return work


def detached_cell(group, cell, pause):
    """Leaves once the cell is accepted, comes back later, and reads on when cut off."""

    def work(client):
        headers, path = {"Prefer": "respond-async"}, f"/v1/groups/{group}/cells"
        try:
            response = ask(client.socket, "POST", path, cell, headers)
            if response.status != 202:
                return refusal(response)
            number = json.loads(response.read())["cell"]
        except BROKEN as error:
            return {"lost": repr(error)}
        time.sleep(pause)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            after = json.loads(whole[-1])["seq"] if (whole := whole_lines(client)) else 0
            try:
                where = f"{path}/{number}/events?after={after}"
                response = ask(client.socket, "GET", where)
                if response.status == 404:
                    return {"status": 202, "cell": number, "gone": True}
                if response.status == 200 and follow(client, response):
                    return {"status": 202, "cell": number, "done": True}
            except BROKEN:
                pass
            time.sleep(0.1)
        return {"status": 202, "cell": number, "done": False}

    return work


def whole_lines(client):
    """What was seen; a line that was cut off is taken back."""
    lines = client.lines()
    if lines and not lines[-1].endswith(b"\n"):
        os.truncate(client.seen, sum(map(len, lines[:-1])))
        lines.pop()
    return lines


def refused(error):
    """The daemon's answer that the error stands for; one that stands for none goes on."""
    if error.status is None:
        raise error
    return {"status": error.status, "problem": json.dumps({"detail": str(error)})}


def python_cell(group, cell):
    """The Python API over its WebSocket, which reads on by itself when cut off."""

    def work(client):
        try:
            with ddip.connect(client.socket) as daemon:
                running = daemon.execute(**cell, group=group)
                for event in running:
                    client.see(json.dumps(event).encode() + b"\n")
            return {"status": 202, "cell": running.cell, "done": event["type"] == "done"}
        except NotRunning as error:
            return {"lost": str(error)}
        except DdipError as error:
            return refused(error)

    return work


def python_values(group, token):
    """Pushes a value and pulls it back from every rank."""

    def work(client):
        try:
            with ddip.connect(client.socket) as daemon:
                daemon.push({f"v_{token}": token * 1000}, group=group)
                got = daemon.pull(f"v_{token}", group=group, rank="all")
            return {"status": 200, "values": all(value == token * 1000 for value in got)}
        except NotRunning as error:
            return {"lost": str(error)}
        except DdipError as error:
            return refused(error)
        except BROKEN as error:
            return {"lost": repr(error)}

    return work


def group_reader(group, after):
    """All events of a group from `after` on, until it is cut off or killed."""

    def work(client):
        try:
            response = ask(client.socket, "GET", f"/v1/groups/{group}/events?after={after}")
            if response.status != 200:
                return refusal(response)
            follow(client, response)
            return {"status": 200}
        except BROKEN as error:
            return {"lost": repr(error)}

    return work


def watch(bound_s):
    """Asks without end; sees the slowest answers, and each that was late or missing."""

    def work(client):
        slowest, asked, dice = 0.0, 0, random.Random(0)
        parent = os.getppid()
        while os.getppid() == parent:
            before, started, wrong = client.shared(), time.monotonic(), ""
            path = dice.choice(["/healthz", "/v1/info", "/v1/groups", "/v1/gpus"])
            try:
                response = ask(client.socket, "GET", path, timeout=bound_s)
                response.read()
                wrong = "" if response.status == 200 else f"status {response.status}"
            except BROKEN as error:
                wrong = repr(error)
            took = time.monotonic() - started
            if client.shared.still(before):
                asked += 1
                slowest = max(slowest, took)
                about = {"asked": asked, "slowest_s": round(slowest, 3)}
                if wrong or took > bound_s:
                    about["wrong"] = f"GET {path}: {wrong or 'late'} after {took:.2f} s"
                client.see(json.dumps(about).encode() + b"\n")
            time.sleep(0.05)
        return {}

    return work
