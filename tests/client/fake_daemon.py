# SPDX-License-Identifier: Apache-2.0
"""A stand-in for ddipd on a real socket, for what the real one does not do on demand: cutting
connections, odd frames, refusals in the middle of a body."""

import base64
import hashlib
import io
import json
import socket
import struct
import threading

GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def frame(data, first=0x81):
    """One unmasked WebSocket frame."""
    data = data.encode() if isinstance(data, str) else data
    if len(data) < 126:
        return bytes([first, len(data)]) + data
    if len(data) < 65536:
        return bytes([first, 126]) + struct.pack("!H", len(data)) + data
    return bytes([first, 127]) + struct.pack("!Q", len(data)) + data


class FakeSocket:
    """The daemon's end of one WebSocket."""

    def __init__(self, sock, reader):
        self.sock, self.reader = sock, reader

    def receive(self):
        """(opcode, payload) of the client's next frame; (None, b"") at the end."""
        head = self.reader.read(2)
        if len(head) < 2:
            return None, b""
        size = head[1] & 127
        if size == 126:
            size = struct.unpack("!H", self.reader.read(2))[0]
        elif size == 127:
            size = struct.unpack("!Q", self.reader.read(8))[0]
        mask = self.reader.read(4)
        data = self.reader.read(size)
        return head[0] & 15, bytes(b ^ mask[i % 4] for i, b in enumerate(data))

    def request(self):
        """The client's next JSON message, None at the end."""
        opcode, data = self.receive()
        return json.loads(data) if opcode == 1 else None

    def send(self, *objects):
        self.sock.sendall(b"".join(frame(json.dumps(each)) for each in objects))


class FakeDaemon:
    """route(method, path, headers, body file) -> (status, type, bytes); talk(FakeSocket)."""

    def __init__(self, path=None, route=None, talk=None):
        self.listener = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        self.listener.bind(str(path) if path else ("127.0.0.1", 0))
        self.listener.listen()
        where = self.listener.getsockname()
        self.url = str(path) if path else f"http://127.0.0.1:{where[1]}"
        self.route, self.talk = route, talk
        self.seen = []  # (method, path, headers) of each request
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)  # wakes accept, which would hold it open
        self.listener.close()

    def _accept(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock):
        reader = sock.makefile("rb")
        with sock, reader:
            try:
                self._request(sock, reader)
            except OSError:
                pass

    def _request(self, sock, reader):
        words = reader.readline().decode().split()
        if not words:
            return
        headers = {}
        while line := reader.readline().strip().decode():
            name, value = line.split(":", 1)
            headers[name.lower()] = value.strip()
        self.seen.append((words[0], words[1], headers))
        if "upgrade" in headers and self.talk:
            key = headers["sec-websocket-key"].encode()
            accept = base64.b64encode(hashlib.sha1(key + GUID).digest()).decode()
            sock.sendall(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Accept: " + accept.encode() + b"\r\n\r\n"
            )
            self.talk(FakeSocket(sock, reader))
            return
        size = int(headers.get("content-length", 0))
        body = reader if size > 1 << 20 else io.BytesIO(reader.read(size))
        status, kind, data = self.route(words[0], words[1], headers, body)
        head = f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
        sock.sendall(head.encode() + data)
