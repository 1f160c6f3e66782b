# SPDX-License-Identifier: Apache-2.0
"""The record: bounded memory, bounded disk, and nothing lost whoever reads slowly or not at all."""

import contextlib
import ctypes
import json
import os
import socket
import statistics
import time

import psutil
import pytest
from conftest import printed, wait_until
from test_restart import detached, events_of, kill, wait_done

MIB = 1 << 20


def rss(daemon):
    return psutil.Process(daemon.pid).memory_info().rss


class SlowReader:
    """Reads a cell's events over a raw socket, as slowly as it is told to."""

    def __init__(self, daemon, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.connect(daemon.socket)
        self.socket.sendall(f"GET {path} HTTP/1.0\r\nHost: d\r\n\r\n".encode())
        self.bytes = b""

    def read(self, n=4096):
        piece = self.socket.recv(n)
        self.bytes += piece
        return piece

    def lines(self):
        """Whole lines so far, without the header."""
        body = self.bytes.partition(b"\r\n\r\n")[2]
        return body.split(b"\n")[:-1]


@pytest.mark.timeout(300)
def test_replay_equals_live(start_daemon):
    """200,000 lines from 4 ranks; one client reads slowly, one is killed and comes back."""
    lines = int(os.environ.get("DDIP_LINES", "200000")) // 4
    daemon = start_daemon()
    daemon.create(4)
    code = f"for i in range({lines}):\n    print(f'{{rank}} {{i}} \u20ac')"
    cell = detached(daemon, "default", code)
    where = f"/v1/groups/default/cells/{cell}/events?after=0"
    slow, killed = SlowReader(daemon, where), SlowReader(daemon, where)
    while len(killed.bytes) < 200_000:
        killed.read()
    killed.socket.close()
    for _ in range(50):
        slow.read(512)
        time.sleep(0.01)
    live = daemon.request("GET", where, timeout=200).body
    events = [json.loads(line) for line in live.splitlines()]
    assert events[-1]["type"] == "done" and events[-1]["status"] == "ok"
    for rank in range(4):
        assert printed(events, rank) == "".join(f"{rank} {i} \u20ac\n" for i in range(lines))
    assert daemon.request("GET", where).body == live
    while slow.read(65536):
        pass
    assert b"\n".join(slow.lines()) + b"\n" == live
    had = killed.lines()
    assert live.startswith(b"\n".join(had))
    after = json.loads(had[-1])["seq"]
    rest = daemon.request("GET", where.replace("after=0", f"after={after}")).body
    assert b"\n".join(had) + b"\n" + rest == live


@pytest.mark.alone
@pytest.mark.timeout(200)
def test_flood(start_daemon):
    """A rank writes 1 GB: the daemon stays small and answers all the while."""
    size = int(os.environ.get("DDIP_FLOOD_MB", "1000"))
    # a sanitizer keeps freed memory; a little of it will do
    asan = os.environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=4"
    daemon = start_daemon("--journal-limit", "64M", env={"ASAN_OPTIONS": asan})
    daemon.create(1)
    daemon.run("default", "print('warm')")
    before, most, times = rss(daemon), 0, []
    code = f"import os\nleft = {size} * 1000\nwhile left > 0:\n"
    code += " left -= os.write(1, (b'y' * 999 + b'\\n') * 60) // 1000"
    cell = detached(daemon, "default", code)
    reader = SlowReader(daemon, f"/v1/groups/default/cells/{cell}/events?after=0")
    reader.read()
    state = "running"
    while state != "done":
        started = time.monotonic()
        assert daemon.request("GET", "/healthz").status == 200
        times.append(time.monotonic() - started)
        most = max(most, rss(daemon))
        state = daemon.request("GET", f"/v1/groups/default/cells/{cell}").json["state"]
        time.sleep(0.01)
    grown = (most - before) / MIB
    print(
        f"{size} MB: RSS +{grown:.1f} MiB, /healthz worst {max(times) * 1000:.1f} ms, "
        f"median {statistics.median(times) * 1000:.1f} ms of {len(times)}"
    )
    assert grown < 32
    assert statistics.quantiles(times, n=100)[98] < 0.05
    size = sum(p.stat().st_size for p in daemon.state_dir.rglob("*.ndjson"))
    assert size < 65 * MIB
    events = wait_done(daemon, "default", cell)
    assert events[0]["type"] == "gap" and events[0]["dropped_events"] > 100
    assert events[-1]["type"] == "done" and events[-1]["status"] == "ok"
    text = "".join(e["text"] for e in events if e["type"] == "stream")
    assert len(text) > 30 * MIB and set(text.split("\n")[1:-1]) == {"y" * 999}


def test_a_rank_does_not_keep_what_it_prints(daemon, group):
    """IPython's own record of outputs would grow with each line."""
    memory = "int(open('/proc/self/statm').read().split()[1]) * 4096"
    daemon.run(group, f"before = {memory}")
    daemon.run(group, "for i in range(100_000): print(f'{i}' * 40)")
    assert int(daemon.run(group, f"print({memory} - before)")) < 16 * MIB


def test_old_events_make_room(start_daemon):
    daemon = start_daemon("--journal-limit", "1M")
    daemon.create(2)
    daemon.run("default", "first = 1")
    for _ in range(3):
        daemon.run("default", "print('z' * 400_000)")
    daemon.run("default", "print('last', first)")
    events = events_of(daemon, "default")
    gap, kept = events[0], events[1:]
    assert gap["type"] == "gap" and gap["dropped_events"] == gap["seq"]
    assert "limit" in gap["reason"]
    assert [e["seq"] for e in kept] == list(range(gap["seq"] + 1, gap["seq"] + 1 + len(kept)))
    gone = daemon.request("GET", "/v1/groups/default/cells/1/events")
    assert gone.status == 410
    assert f"from event {kept[0]['seq']}" in gone.json["detail"]
    before = daemon.request("GET", "/v1/groups/default").json["last_seq"]
    kill(daemon)
    daemon.start()
    wait_until(lambda: daemon.request("GET", "/v1/groups/default").json["state"] == "ready", 30)
    assert daemon.run("default", "print('again', first)") == "again 1\n"
    after = events_of(daemon, "default", after=before)
    assert [e["seq"] for e in after] == list(range(before + 1, before + 1 + len(after)))
    record = daemon.request("GET", "/v1/groups/default/cells").json["cells"][-1]
    assert record["cell"] == 6


def test_running_cell_survives_its_own_flood_and_a_restart(start_daemon):
    """Its first events, the code among them, are no longer kept when the next daemon comes."""
    daemon = start_daemon("--journal-limit", "1M")
    daemon.create(2)
    code = "import time\nfor i in range(40):\n print('w' * 100_000, i)\n time.sleep(0.05)"
    cell = detached(daemon, "default", code)
    second = detached(daemon, "default", "print('second')")
    time.sleep(1.5)
    kill(daemon)
    daemon.start()
    assert wait_done(daemon, "default", cell)[-1]["status"] == "ok"
    events = wait_done(daemon, "default", second)
    assert events[-1]["status"] == "ok"
    assert [printed(events, rank) for rank in (0, 1)] == ["second\n"] * 2


@contextlib.contextmanager
def small_disk(folder, size):
    """A tmpfs of that size; only root may mount one."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={size},mode=700".encode()
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, options):
        pytest.skip("needs root to mount a tmpfs")
    try:
        yield folder
    finally:
        libc.umount2(os.fsencode(folder), 2)


@pytest.mark.timeout(120)
def test_disk_full_and_free_again(start_daemon, tmp_path):
    with small_disk(tmp_path, "3m"):
        daemon = start_daemon("--state-dir", str(tmp_path / "state"))
        daemon.create(2)
        daemon.run("default", "kept = 3")
        before = rss(daemon)
        lines = 40_000
        code = f"import os, subprocess\nfor i in range({lines}):\n print('line', i)\n"
        code += " if i % 1000 == 0: os.write(1, b'raw %d\\n' % i)\nkept"
        cell = detached(daemon, "default", code)
        filler = tmp_path / "filler"
        with open(filler, "wb") as f, contextlib.suppress(OSError):
            f.write(b"x" * (2 * MIB + MIB // 2))
        wait_until(lambda: "cannot append to the journal" in daemon.log.read_text(), 30)
        time.sleep(1)
        refused = daemon.request("POST", "/v1/groups/default/cells", {"code": "1"})
        assert refused.status == 503 and "cannot be written" in refused.json["detail"]
        assert daemon.request("GET", "/v1/groups/default").json["state"] == "busy"
        ready = daemon.request("GET", "/readyz")
        assert ready.status == 503 and "journal" in ready.text
        assert rss(daemon) - before < 32 * MIB
        filler.unlink()
        events = wait_done(daemon, "default", cell)
        assert events[-1]["status"] == "ok"
        for rank in (0, 1):
            got = printed(events, rank).split("\n")[:-1]
            assert [x for x in got if x[0] == "l"] == [f"line {i}" for i in range(lines)]
            assert [x for x in got if x[0] == "r"] == [f"raw {i}" for i in range(0, lines, 1000)]
        assert daemon.request("GET", "/readyz").status == 200
        assert daemon.run("default", "print(kept)") == "3\n"
        everything = events_of(daemon, "default")
        assert [e["seq"] for e in everything] == list(range(1, len(everything) + 1))


@pytest.mark.timeout(120)
def test_disk_full_and_daemon_killed(start_daemon, tmp_path):
    with small_disk(tmp_path, "2m"):
        daemon = start_daemon("--state-dir", str(tmp_path / "state"))
        daemon.create(2)
        cell = detached(daemon, "default", "for i in range(60_000):\n print('line', i)")
        filler = tmp_path / "filler"
        with open(filler, "wb") as f, contextlib.suppress(OSError):
            f.write(b"x" * (MIB + MIB // 2))
        wait_until(lambda: "cannot append to the journal" in daemon.log.read_text(), 30)
        kill(daemon)
        filler.unlink()
        daemon.start()
        events = wait_done(daemon, "default", cell)
        for rank in (0, 1):
            text = "".join(e["text"] for e in events if e["type"] == "stream" and e["rank"] == rank)
            assert text == "".join(f"line {i}\n" for i in range(60_000))


def test_full_disk_at_the_start_of_a_group(start_daemon, tmp_path):
    with small_disk(tmp_path, "1m"):
        daemon = start_daemon("--state-dir", str(tmp_path / "state"))
        with open(tmp_path / "filler", "wb", buffering=0) as f, contextlib.suppress(OSError):
            while f.write(b"x" * 4096):
                pass
        reply = daemon.request("POST", "/v1/groups", {"ranks": 2})
        assert reply.status == 500 and "No space left" in reply.json["detail"], reply.text
        (tmp_path / "filler").unlink()
        daemon.create(2)
        assert daemon.run("default", "print(rank)") == "0\n"


def test_read_only_state_folder(start_daemon, tmp_path):
    daemon = start_daemon()
    libc = ctypes.CDLL(None, use_errno=True)
    ms_rdonly, ms_remount, ms_bind = 1, 32, 4096
    state = os.fsencode(daemon.state_dir)
    if libc.mount(state, state, None, ms_bind, None):
        pytest.skip("needs root to mount read-only")
    try:
        assert libc.mount(None, state, None, ms_remount | ms_bind | ms_rdonly, None) == 0
        reply = daemon.request("POST", "/v1/groups", {"ranks": 1})
        assert reply.status == 500 and "Read-only file system" in reply.json["detail"], reply.text
    finally:
        libc.umount2(state, 2)
    daemon.create(1)
