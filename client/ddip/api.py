# SPDX-License-Identifier: Apache-2.0
"""The Python API: a Client, and a Cell, the iterator over one execution's events."""

import itertools
import os
import sys
import time
import uuid
from urllib.parse import quote, urlencode

from . import daemon, payload
from .errors import DdipError, NotRunning, from_problem
from .retry import Absence
from .transport import WebSocket, request


def connect(url_or_socket_path=None, token=None):
    """A Client of the daemon there, else of DDIP_URL (and DDIP_TOKEN), else of a runtime dir.

    Raises NotRunning when none answers, DdipError when it refuses us (a wrong token: 401).
    """
    client = Client(daemon.find(url_or_socket_path, token))
    client.info()
    return client


class Client:
    """A daemon's groups; usable from several threads, and as a context manager.

    Every call raises DdipError for the daemon's refusals, NotRunning when it is gone: for 5 s, or
    for a minute if the call was under way and may be sent again. Those that start ranks again or
    end them are not: their NotRunning says so.
    `group` is a group's name; `ranks` a list of ranks, None for all of them.
    notice: called with pieces of text, if not None, while the daemon is missed for seconds.
    """

    def __init__(self, endpoint, notice=None, start=None):
        """start: starts a daemon that has died again; returns False if it has not died."""
        self.endpoint, self.notice, self.start = endpoint, notice, start
        self._ids = itertools.count(1)
        self._idle = []  # WebSockets kept for the next cell

    def __repr__(self):
        return f"<ddip.Client of {self.endpoint}>"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Closes the idle connections. Cells go on; the client may be used again."""
        while self._idle:
            self._idle.pop().close()

    def info(self):
        """The daemon's version, pid, uptime_s, cuda and nccl as a dict."""
        return self._request("GET", "/info")

    def gpus(self):
        """The machine's GPUs, a list of dicts."""
        return self._request("GET", "/gpus")["gpus"]

    def groups(self):
        """Our groups, a list of dicts like `group`."""
        return self._request("GET", "/groups")["groups"]

    def group(self, name="default"):
        """One group: its state, generation, world_size, ranks and queue."""
        return self._request("GET", _path(name))

    def create_group(
        self, ranks=None, *, gpus=None, name="default", python=None, cwd=None, timeout=None, **more
    ):
        """Starts a group; returns it once every rank has passed a collective.

        ranks: how many CPU ranks; or gpus: "all", or indices and UUIDs in rank order. python: the
        ranks' interpreter, else DDIP_PYTHON, else this one. cwd: else this process's. timeout:
        seconds to wait; then raises DdipError, and the group goes on starting. more: app (text),
        env ({name: text}, variables to add), backend ("gloo" or "nccl"), grace_s (seconds).
        """
        python = python or os.environ.get("DDIP_PYTHON") or sys.executable
        body = _given(ranks=ranks, gpus=gpus, name=name, python=python, cwd=cwd or os.getcwd())
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        try:
            body |= _given(**more)
            return self._request(
                "POST", "/groups", body, headers=headers, timeout=timeout, again=True
            )
        except TimeoutError:
            why = f"group {name!r} is not ready after {timeout:g} s"
            raise DdipError(why, hint="it goes on starting") from None

    def delete_group(self, group="default"):
        """Ends a group and all its processes; returns {"name", "state": "gone"}."""
        return self._request("DELETE", _path(group))

    def restart(self, group="default", ranks=None, timeout=None):
        """Starts the same ranks again, or `ranks` alone; returns the group when it is ready.

        timeout: how long to wait for that, in seconds; None: as long as it takes.
        """
        return self._request("POST", _path(group, "restart"), ranks=ranks, timeout=timeout)

    def interrupt(self, group="default", cell=None):
        """Stops the running cell, or `cell` alone; returns {"cell", "ranks"}."""
        again = cell is not None  # another than the first might be running by then
        return self._request("POST", _path(group, "interrupt"), _given(cell=cell), again=again)

    def stacks(self, group="default", ranks=None):
        """Where the ranks are, also while they compute, wait or are stuck; takes at most 2 s.

        {"group", "summary": [{"where", "user", "ranks"}], "differ": [ranks], "ranks": [{"rank",
        "pid", "state", "where", "user", "problem", "threads", "text"}]}. summary: the ranks by
        place, most of them first; differ: who is not there. user: the line of a cell, {"cell",
        "execution_count", "line", "function", "source"}, or None. Frames are innermost first.
        """
        return self._request("GET", _path(group, "stacks"), ranks=ranks)

    def execute(self, code, group="default", ranks=None, timeout_s=None, on_event=None, **more):
        """Runs code on ranks; returns a Cell, an iterator of event dicts that ends with `done`.

        on_event: called with each event; then the `done` event is returned instead. timeout_s: the
        cell is interrupted after so many seconds. more: silent=True for no history, no results.
        An exception on a rank is an `error` event, not raised here. The cell does not depend on
        the iterator: dropping that stops nothing.
        """
        cell = Cell(self, group)
        more |= {"idempotency_key": uuid.uuid4().hex, "ranks": ranks, "timeout_s": timeout_s}
        cell._ask(op="execute", code=code, **more)
        if on_event is None:
            return cell
        for event in cell:
            on_event(event)
        return event

    def submit(self, code, group="default", ranks=None, timeout_s=None, **more):
        """Starts code without waiting; returns {"group", "cell", "first_seq", "position"}."""
        headers = {"Prefer": "respond-async", "Idempotency-Key": uuid.uuid4().hex}
        body = _given(code=code, ranks=ranks, timeout_s=timeout_s, **more)
        return self._request("POST", _path(group, "cells"), body, headers=headers, again=True)

    def events(self, group="default", cell=None, after=0):
        """Replays a cell's events past sequence number `after`, then follows it to `done`.

        With no cell: all events of the group, without an end.
        """
        stream = Cell(self, group, cell, after)
        stream._ask(**stream._rest())
        return stream

    def cells(self, group="default"):
        """The records of a group's cells, oldest first."""
        records = self._request("GET", _path(group, "cells"))["cells"]
        return sorted(records, key=lambda record: record["cell"])

    def cell(self, cell, group="default"):
        """The record of one cell: its code, state, status, and status by rank."""
        return self._request("GET", _path(group, "cells", str(cell)))

    def push(self, values, group="default", ranks=None):
        """Sets {name: object} on the ranks; returns {"names", "bytes", "ranks"}.

        Functions, lambdas and classes of the notebook travel by value, tensors to the CPU; see
        payload.dump. Raises DdipError naming the value that cannot be sent.
        """
        body = _dump(values)
        return self._request("POST", _path(group, "namespace"), body, ranks=ranks, again=True)

    def pull(self, names, group="default", rank=0):
        """The values of names on a rank: one value for a str, {name: value} for a list.

        rank="all": a list with one such result per rank. Raises DdipError (404) for a name that
        is not there, RankError when the rank cannot pickle it.
        """
        if rank == "all":
            size = self.group(group)["world_size"]
            return [self.pull(names, group, each) for each in range(size)]
        wanted = [names] if isinstance(names, str) else list(names)
        body = {"pull": wanted, "rank": rank}
        answer = self._request("POST", _path(group, "namespace"), body, again=True)
        values = payload.load(answer)
        return values[names] if isinstance(names, str) else values

    def variables(self, group="default", rank=0, wait=True):
        """A rank's variables: a list of {name, type, shape, dtype, device, size_bytes, repr}.

        At most 1000. wait=False: as they are now, also while a cell runs; DdipError 504 if the
        rank has not answered within 0.4 s.
        """
        now = None if wait else "false"
        return self._request("GET", _path(group, "namespace"), rank=rank, wait=now)["variables"]

    def complete(self, code, cursor_pos=None, group="default", rank=0):
        """Jupyter's complete_reply content. cursor_pos: in characters, else the end."""
        at = len(code) if cursor_pos is None else cursor_pos
        body = {"code": code, "cursor_pos": at, "rank": rank}
        return self._request("POST", _path(group, "complete"), body, again=True)

    def inspect(self, code, cursor_pos=None, group="default", rank=0, detail_level=0):
        """Jupyter's inspect_reply content."""
        at = len(code) if cursor_pos is None else cursor_pos
        body = {"code": code, "cursor_pos": at, "rank": rank, "detail_level": detail_level}
        return self._request("POST", _path(group, "inspect"), body, again=True)

    def _request(self, method, path, body=None, *, headers=(), timeout=None, again=False, **query):
        """again: it may be sent twice, as what only reads, sets the same, or has a key."""
        query = {key: _text(value) for key, value in _given(**query).items()}
        path = f"/v1{path}" + (f"?{urlencode(query, safe=',')}" if query else "")
        with Absence(self) as absence:
            while True:
                try:
                    return request(self.endpoint, method, path, body, headers, timeout)
                except NotRunning as error:
                    if error.sent and not again and method != "GET":
                        error.hint = "whether it was done is not known: look, then ask again"
                        raise
                    absence.wait(error)

    def _socket(self):
        try:
            while True:
                socket = self._idle.pop()
                if socket.quiet():
                    return socket
                socket.close()
        except IndexError:
            return WebSocket(self.endpoint)


class Cell:
    """The events of a cell, as dicts in order, each once; made by Client.execute and .events.

    group, cell: what it is; seq: the last event's number; position: its place in the queue when it
    was accepted. deadline: a time.monotonic() value after which waiting raises TimeoutError.
    A lost connection is made again and the events resume after `seq`; so does iterating on after
    an exception (KeyboardInterrupt, TimeoutError).
    """

    def __init__(self, client, group, cell=None, after=0):
        self.group, self.cell, self.seq = group, cell, after
        self.position = self.deadline = None
        self._client, self._socket, self._ended = client, None, False

    def __iter__(self):
        return self

    def __next__(self):
        while not self._ended:
            if self._socket is None:
                self._resume()
            try:
                event = self._receive()
            except ConnectionError as error:
                self._resume(error)
                continue
            if event.get("seq", 0) <= self.seq:
                continue
            self.seq = event["seq"]
            if event["type"] == "done" and event["cell"] == self.cell:
                self._ended = True
                self._release()
            return event
        raise StopIteration

    @property
    def buffered(self):
        """True while the next event is here already."""
        return self._socket is not None and self._socket.buffered

    def close(self):
        """Stops listening; the cell itself goes on."""
        self._ended = True
        self._drop()

    def _receive(self):
        timeout = None if self.deadline is None else self.deadline - time.monotonic()
        try:
            return self._socket.receive(timeout)
        except BaseException:  # it may have stopped inside a frame
            self._drop()
            raise

    def _rest(self):
        """The request for the events that have not come yet."""
        if self.cell is None:
            return {"op": "group_events", "after": self.seq}
        return {"op": "cell_events", "cell": self.cell, "after": self.seq}

    def _resume(self, error=None):
        try:
            self._ask(error, **self._rest())
        except NotRunning as lost:
            raise self._lost(lost.detail) from lost

    def _ask(self, error=None, **message):
        """Opens, as often as it takes. error: why the connection there was is gone."""
        with Absence(self._client, self.deadline) as absence:
            while True:
                if error is not None:
                    absence.wait(error)
                try:
                    return self._open(**message)
                except NotRunning as lost:
                    error = lost
                except DdipError as refusal:  # a daemon that is just starting or ending
                    if error is None or refusal.status != 503:
                        raise
                    error = refusal

    def _open(self, **message):
        """Sends a request about our group on a WebSocket of our own, and takes its answer."""
        self._socket = self._client._socket()
        number = next(self._client._ids)
        try:
            self._socket.send(_given(id=number, group=self.group, **message))
            while (answer := self._socket.receive()).get("id") != number:
                pass
        except ConnectionError as error:
            self._drop()
            why = f"ddipd closed the connection before it answered ({error})"
            hint = "whether it was done is not known: look, then ask again"
            raise NotRunning.after_sending(why, hint=hint) from error
        except BaseException:
            self._drop()
            raise
        body = answer.get("body") or {}
        if answer["status"] >= 400:
            self._release()
            raise from_problem(answer["status"], body)
        self.cell, self.position = body.get("cell", self.cell), body.get("position")

    def _lost(self, why):
        where = f"ddipd at {self._client.endpoint}"
        if self.cell is None:
            return NotRunning(f"lost {where}; the events of {self.group!r} may go on ({why})")
        what = f"cell {self.cell} of group {self.group!r}"
        hint = f"attach again when it is back: %dipattach {self.cell}, or Client.events"
        return NotRunning(f"lost {where}; {what} may still be running ({why})", hint=hint)

    def _release(self):
        """Hands the connection back: nothing more is expected on it."""
        if self._socket is not None:
            self._client._idle.append(self._socket)
            self._socket = None

    def _drop(self):
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _dump(values):
    try:
        return payload.dump(values)
    except Exception as error:
        if len(values) > 1:
            for name, value in values.items():
                _dump({name: value})
        raise DdipError(f"cannot send {', '.join(values)}: {error}") from error


def _given(**fields):
    return {key: value for key, value in fields.items() if value is not None}


def _path(group, *rest):
    return "/".join(["/groups", quote(group, safe=""), *rest])


def _text(value):
    return ",".join(map(str, value)) if isinstance(value, (list, tuple, range)) else str(value)
