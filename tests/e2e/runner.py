# SPDX-License-Identifier: Apache-2.0
"""What tests of the fastai apps share: cells run on a group, what its ranks printed with show(), a
line of JSON each; and a server to download from."""

import contextlib
import functools
import http.server
import json
import tarfile
import threading


class Runner:
    def __init__(self, daemon, group):
        self.daemon, self.group = daemon, group

    def __call__(self, code, **more):
        body = {"code": code, "timeout_s": 100, **more}
        path = f"/v1/groups/{self.group}/cells"
        return self.daemon.request("POST", path, body, timeout=120).events

    def ok(self, code, **more):
        events = self(code, **more)
        assert events[-1]["status"] == "ok", [e for e in events if e["type"] == "error"]
        return events

    def values(self, code, **more):
        """What show() printed last on each rank: a list of lists, by rank."""
        events = self.ok(code, **more)
        return [
            json.loads(text(events, int(rank)).splitlines()[-1]) for rank in events[-1]["ranks"]
        ]

    def same(self, code, **more):
        """What show() printed, the same on all ranks."""
        first, *others = self.values(code, **more)
        assert all(other == first for other in others), (first, others)
        return first


def text(events, rank):
    return "".join(e["text"] for e in events if e["type"] == "stream" and e["rank"] == rank)


def errors(events):
    return {e["rank"]: e for e in events if e["type"] == "error" and not e.get("released")}


@contextlib.contextmanager
def downloads(folder):
    """Serves folder, with a data.tgz made there; gives its URL and the paths that are asked for."""
    (folder / "data").mkdir()
    (folder / "data/labels.csv").write_text("a,b\n1,2\n")
    with tarfile.open(folder / "data.tgz", "w:gz") as archive:
        archive.add(folder / "data", "data")
    asked = []

    class Files(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *args):
            pass

    handler = functools.partial(Files, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
