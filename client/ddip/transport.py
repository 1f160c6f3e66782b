# SPDX-License-Identifier: Apache-2.0
"""Bytes to and from the daemon: HTTP requests and a WebSocket, each over TCP or a Unix socket.

Both raise NotRunning when the connection cannot be made. A request opens a connection of its own;
a WebSocket is kept by its user, and after any exception out of it must be closed, not reused.
"""

import http.client
import json
import os
import select
import socket
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import websocket

from . import payload
from .errors import DdipError, NotRunning, from_problem

CONNECT_S = 5.0
# A cell may be silent for hours: a dead peer is noticed after a minute.
_TCP_OPTIONS = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


@dataclass(frozen=True)
class Endpoint:
    """Where a daemon listens: a Unix socket's path, or a TCP host, port and token."""

    path: str | None = None
    host: str = "localhost"
    port: int = 80
    token: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, where, token=None):
        """Of "http://HOST:PORT", "unix:PATH" or a path. Raises ValueError for another scheme."""
        where = str(where).strip()
        url = urlsplit(where)
        if url.scheme in ("", "unix"):
            return cls(path=where.removeprefix("unix:"))
        if url.scheme != "http" or not url.hostname:
            raise ValueError(f"{where!r} is neither http://HOST:PORT nor the path of a socket")
        return cls(host=url.hostname, port=url.port or 80, token=token)

    def __str__(self):
        return self.path or f"http://{self.authority}"

    @property
    def authority(self):
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def headers(self):
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def open(self):
        """A connected stream socket without a timeout. Raises NotRunning."""
        try:
            sock = self._unix() if self.path else self._tcp()
        except OSError as error:
            reason = error.strerror or error
            raise NotRunning(f"no ddipd answers at {self} ({reason})") from error
        sock.settimeout(None)
        return sock

    def _unix(self):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(CONNECT_S)
        if number := sock.connect_ex(self.path):
            sock.close()
            raise OSError(number, os.strerror(number))
        return sock

    def _tcp(self):
        sock = socket.create_connection((self.host, self.port), CONNECT_S)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return sock


class _Connection(http.client.HTTPConnection):
    def __init__(self, endpoint, timeout):
        super().__init__(endpoint.host, endpoint.port)
        self._endpoint, self._timeout = endpoint, timeout

    def connect(self):
        self.sock = self._endpoint.open()
        self.sock.settimeout(self._timeout)


def request(endpoint, method, path, body=None, headers=(), timeout=None):
    """One HTTP exchange; returns decoded JSON, a pickle's bytes (writable), or else text.

    body: None, an object to send as JSON, or the (parts, size) of payload.dump, sent part by part.
    timeout: seconds without a byte; None waits for ever.
    Raises NotRunning, TimeoutError, or the error answer as DdipError.
    """
    headers = {**endpoint.headers(), "Connection": "close", **dict(headers)}
    if isinstance(body, tuple):
        body, size = body
        headers |= {"Content-Type": "application/x-pickle", "Content-Length": str(size)}
    elif body is not None:
        body = json.dumps(body).encode()
        headers["Content-Type"] = "application/json"
    connection = _Connection(endpoint, timeout)
    try:
        _send(connection, method, path, body, headers)
        return _answer(connection.getresponse())
    except TimeoutError:
        raise
    except (http.client.HTTPException, OSError) as error:
        if isinstance(error, DdipError):
            raise
        why = f"lost the connection to ddipd at {endpoint} ({error!r})"
        raise NotRunning.after_sending(why) from error
    finally:
        connection.close()


def _send(connection, method, path, body, headers):
    """A daemon may refuse a large body before its end: then the answer is there to be read."""
    try:
        connection.request(method, path, body, headers)
    except (BrokenPipeError, ConnectionResetError):
        if connection.sock is None:
            raise


def _answer(response):
    kind = response.headers.get_content_type()
    if response.length is not None and kind == "application/x-pickle":
        data = payload.allocate(response.length)
        _read_into(response, memoryview(data))
    else:
        data = response.read()
        if data and kind.endswith("json"):
            data = json.loads(data)
        elif kind != "application/x-pickle":
            data = data.decode(errors="replace")
    if response.status >= 400:
        raise from_problem(response.status, data)
    return data


def _read_into(response, view):
    done = 0
    while done < len(view):
        count = response.readinto(view[done:])
        if not count:
            raise http.client.IncompleteRead(b"", len(view) - done)
        done += count


class WebSocket:
    """JSON objects both ways, for one user at a time.

    websocket-client does the handshake and the sending. Receiving is done here, because that
    module's three reads and a dozen calls per frame are a third of an empty cell's whole time.
    """

    def __init__(self, endpoint, path="/v1/ws"):
        """Raises NotRunning, or the refusal as DdipError."""
        self._ws = websocket.WebSocket(enable_multithread=False, skip_utf8_validation=True)
        self._sock = endpoint.open()
        self._buffer, self._fragments = bytearray(), None
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        header = [f"{name}: {value}" for name, value in endpoint.headers().items()]
        url = f"ws://{endpoint.authority}{path}"
        try:
            self._sock.settimeout(CONNECT_S)
            self._ws.connect(url, socket=self._sock, header=header, suppress_origin=True)
            self._sock.settimeout(None)
        except websocket.WebSocketBadStatusException as error:
            raise self._refusal(error) from None
        except (websocket.WebSocketException, OSError) as error:
            self._sock.close()
            raise NotRunning(f"no WebSocket at {endpoint} ({error})") from error

    def _refusal(self, error):
        self.close()
        text = (error.resp_body or b"").decode(errors="replace")
        try:
            return from_problem(error.status_code, json.loads(text))
        except ValueError:
            return from_problem(error.status_code, text)

    @property
    def buffered(self):
        """True while something received has not been taken yet."""
        return bool(self._buffer)

    def quiet(self):
        """True if an idle connection is still good: nothing has come, not even its end."""
        return not self._buffer and not self._poll.poll(0)

    def send(self, message):
        """Raises ConnectionError when the connection is gone."""
        try:
            self._ws.send(json.dumps(message))
        except websocket.WebSocketException as error:
            raise ConnectionResetError(str(error)) from error

    def receive(self, timeout=None):
        """The next object. Raises ConnectionError at the connection's end, TimeoutError.

        timeout: seconds without a byte; None waits for ever.
        """
        while (text := self._take()) is None:
            if timeout is not None:
                self._sock.settimeout(max(timeout, 0.001))
            try:
                chunk = self._sock.recv(262144)
            except OSError as error:
                if isinstance(error, TimeoutError) and error.errno is None:
                    raise  # our own timeout, not a peer that keep-alive found dead
                raise ConnectionResetError(str(error)) from error
            if not chunk:
                raise ConnectionResetError("the daemon closed the connection")
            self._buffer += chunk
        return json.loads(text)

    def _take(self):
        """The text of the first whole message in the buffer, or None when there is none yet."""
        buffer = self._buffer
        while len(buffer) >= 2:
            first, size, start = buffer[0], buffer[1] & 0x7F, 2
            if size > 125:
                start = 4 if size == 126 else 10
                if len(buffer) < start:
                    return None
                size = int.from_bytes(buffer[2:start], "big")
            if len(buffer) < start + size:
                return None
            data = bytes(buffer[start : start + size])
            del buffer[: start + size]
            if first != 0x81:  # anything but a whole text message
                data = self._other(first, data)
            if data is not None:
                return data.decode(errors="replace")
        return None

    def _other(self, first, data):
        """Handles a fragment or a control frame; returns a message completed by it, or None."""
        opcode = first & 0x0F
        if opcode == websocket.ABNF.OPCODE_CLOSE:
            reason = data[2:].decode(errors="replace") or "the daemon closed the connection"
            raise ConnectionResetError(reason)
        if opcode == websocket.ABNF.OPCODE_PING:
            self._ws.pong(data)
        if opcode > 2:
            return None
        self._fragments = data if opcode else (self._fragments or b"") + data
        if not first & 0x80:
            return None
        data, self._fragments = self._fragments, None
        return data

    def close(self):
        """Closes without waiting for the daemon's goodbye."""
        try:
            if self._ws.connected:
                self._ws.send_close()
        except (websocket.WebSocketException, OSError):
            pass
        self._sock.close()
