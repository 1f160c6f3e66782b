# SPDX-License-Identifier: Apache-2.0
"""Interrupts where a user sends them: a group that is starting, %makedip, Ctrl-C in a terminal."""

import contextlib
import os
import pty
import re
import select
import signal
import sys
import time

import kernels
import pytest
from conftest import fresh_daemon

ASYNC = {"Prefer": "respond-async"}
INTERRUPT = "/v1/groups/default/interrupt"


@pytest.fixture
def cold(build):
    """A daemon without a template: a group takes seconds to start."""
    with fresh_daemon(build) as daemon:
        yield daemon


def end_of(daemon, reply):
    return daemon.request("GET", reply.headers["location"] + "/events?after=0").events[-1]


def test_cells_of_a_starting_group(cold):
    """One by one, in the order in which they would run; the group starts all the same."""
    cold.request("POST", "/v1/groups", {"ranks": 2}, ASYNC)
    cells = [cold.cell("default", f"ran = {i}", **ASYNC) for i in range(3)]
    started = time.monotonic()
    assert cold.request("POST", INTERRUPT).json == {"cell": 1, "ranks": []}
    assert end_of(cold, cells[0])["status"] == "interrupted"
    assert time.monotonic() - started < 1
    assert cold.request("GET", "/v1/groups/default").json["state"] == "starting"
    assert cold.request("POST", INTERRUPT, {"cell": 3}).json["cell"] == 3
    assert end_of(cold, cells[2])["status"] == "interrupted"
    assert end_of(cold, cells[1])["status"] == "ok"
    assert cold.run("default", "print(ran)") == "1\n"
    assert cold.request("POST", INTERRUPT).json["cell"] is None


def test_starting_group_without_cells(cold):
    cold.request("POST", "/v1/groups", {"ranks": 2}, ASYNC)
    assert cold.request("POST", INTERRUPT).json == {"cell": None, "ranks": []}
    assert cold.run("default", "print('started')") == "started\n"


def test_group_that_starts_again_keeps_waiting_cells(daemon, group):
    """After an abort the group joins anew: a late second interrupt must not hit the next cell."""
    for i in range(3):
        code = (
            "import time, torch.distributed as dist\nif rank: dist.barrier()\nelse: time.sleep(99)"
        )
        first = daemon.cell(group, code, **ASYNC)
        second = daemon.cell(group, f"print({i})", **ASYNC)
        time.sleep(0.3)
        path = f"/v1/groups/{group}/interrupt"
        for _ in range(2):
            daemon.request("POST", path, {"cell": first.json["cell"]})
        assert end_of(daemon, first)["status"] == "interrupted"
        assert daemon.request("POST", path, {"cell": first.json["cell"]}).json["cell"] is None
        assert end_of(daemon, second)["status"] == "ok"


def test_makedip(cold):
    """The prompt is back at once, and says what goes on."""
    env = {**os.environ, "DDIP_RUNTIME_DIR": str(cold.runtime_dir)}
    manager, client = kernels.start(env)
    try:
        client.execute_interactive("%load_ext Ddip", timeout=30)
        outputs = []
        client.execute("%makedip -n 2")
        while not cold.request("GET", "/v1/groups").json["groups"]:
            time.sleep(0.02)
        assert cold.request("GET", "/v1/groups/default").json["state"] == "starting"
        manager.interrupt_kernel()
        sent = time.monotonic()
        error = client.get_shell_msg(timeout=20)["content"]
        assert time.monotonic() - sent < 1
        told = "\n".join(error["traceback"])
        assert error["ename"] == "DdipInterrupted" and "magics.py" not in told
        assert "group 'default' goes on starting" in told
        for code in ("%makedip", "%makedip -n 2", "%%dip\nprint('it runs')"):
            client.execute_interactive(code, timeout=60, output_hook=outputs.append)
        shown = "".join(m["content"].get("text", "") for m in outputs)
        assert "gloo, starting" in shown and "attached" in shown and "it runs" in shown
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


class Terminal:
    """IPython in a terminal of its own, as a user types in it."""

    def __init__(self, env):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job ignores it
            options = ["--simple-prompt", "--no-banner", "--no-confirm-exit", "--colors=NoColor"]
            os.execve(sys.executable, [sys.executable, "-m", "IPython", *options], env)
        self.text = ""

    def type(self, text):
        self.text = ""
        os.write(self.fd, text.encode())

    def wait_for(self, pattern, seconds=20):
        """Reads until the pattern has come; returns how long that took."""
        started = time.monotonic()
        while not re.search(pattern, self.text):
            left = started + seconds - time.monotonic()
            assert left > 0 and select.select([self.fd], [], [], left)[0], self.text
            self.text += os.read(self.fd, 65536).decode(errors="replace")
        return time.monotonic() - started

    def close(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.fd)


@pytest.fixture
def terminal(daemon, tmp_path):
    env = {
        **os.environ,
        "DDIP_RUNTIME_DIR": str(daemon.runtime_dir),
        "IPYTHONDIR": str(tmp_path),
        "TERM": "dumb",
    }
    with contextlib.closing(Terminal(env)) as terminal:
        terminal.wait_for(r"In \[1\]: ")
        terminal.type("%load_ext Ddip\n")
        terminal.wait_for(r"In \[2\]: ")
        yield terminal


WAITS = {
    "sleep": "time.sleep(60)",
    "loop": "while True: pass",
    "command": "get_ipython().system('sleep 60')",
    "subprocess": "subprocess.run(['sleep', '60'])",
    "collective": "dist.barrier() if rank else time.sleep(60)",
}


@pytest.mark.parametrize("wait", WAITS)
def test_ctrl_c_in_a_terminal(daemon, terminal, wait):
    name = f"terminal-{wait}"
    before = daemon.create(name=name, grace_s=1)["ranks"]
    imports = "import time, subprocess, torch.distributed as dist; kept = 7; print('on')"
    terminal.type(f"%%dip --name {name}\n{imports}\n{WAITS[wait]}\n\n\n")
    terminal.wait_for(r"(: |\n)on\r?\n")
    time.sleep(0.2)
    terminal.type("\x03")
    took = terminal.wait_for(r"In \[3\]: ")
    assert took < (2 if wait != "collective" else 4), (took, terminal.text)
    if wait != "command":  # as in a notebook, a command that was interrupted is no error
        assert "KeyboardInterrupt" in terminal.text
    terminal.type(f"%%dip --name {name}\nprint('kept', kept)\n\n\n")
    terminal.wait_for(r"(: |\n)kept 7\r?\n")
    after = daemon.request("GET", f"/v1/groups/{name}").json["ranks"]
    assert [r["pid"] for r in after] == [r["pid"] for r in before]
    daemon.delete(name)


def test_bars_of_all_ranks_in_a_terminal(daemon, group, terminal):
    """They move in one line of it, which then stays as it was at the end."""
    code = (
        "from tqdm import tqdm\nfor i in tqdm(range(9), ncols=30, mininterval=0): time.sleep(0.05)"
    )
    terminal.type(f"%%dip --name {group} --see all\nimport time\n{code}\n\n\nprint('bel' + 'ow')\n")
    terminal.wait_for(r"below\r?\n")
    bars = [line for line in re.split(r"\r?\n", terminal.text) if "%|" in line]
    assert len(bars) == 1 and len(bars[0].split("\r")) > 5
    assert re.match(r"\[0\] 100%.*9/9.*  \[1\] 100%.*9/9", bars[0].split("\r")[-1])
