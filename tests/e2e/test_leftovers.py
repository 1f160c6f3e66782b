# SPDX-License-Identifier: Apache-2.0
"""However ranks end, nothing they started is left within 10 s; while they live, all of it stays.

Processes are found by a mark in their environment or arguments, wherever they hang by then.
DDIP_LEFTOVERS=20 repeats each case as often (default 1).
"""

import os
import secrets
import signal
import time

import psutil
import pytest
from conftest import printed

REPEATS = int(os.environ.get("DDIP_LEFTOVERS", "1"))
LIMIT_S = 10

# Each prints the pids of what it leaves running; MARK is in the environment and in the arguments.
START = {
    "DataLoader": """
        import torch, torch.utils.data as data
        numbers = data.TensorDataset(torch.arange(64.0))
        loader = data.DataLoader(numbers, num_workers=2, persistent_workers=True)
        steps = iter(loader); next(steps)
        print(*[w.pid for w in steps._workers])""",
    "own session": """
        p = subprocess.Popen(SLEEP, start_new_session=True); print(p.pid)""",
    "own session, empty environment": """
        p = subprocess.Popen(SLEEP, start_new_session=True, env={}); print(p.pid)""",
    "ignores SIGTERM and SIGHUP": """
        deaf = "import signal, time\\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\\n"
        deaf += "print('deaf', flush=True); time.sleep(300)"
        p = subprocess.Popen([sys.executable, "-c", deaf, MARK], stdout=subprocess.PIPE)
        p.stdout.readline(); print(p.pid)""",
    "nohup and setsid in a shell": """
        get_ipython().system(f"nohup setsid {shlex.join(SLEEP)} >/dev/null 2>&1 & echo $!")""",
    "double-forked daemon": """
        daemon = "import os, sys, time\\nif os.fork(): os._exit(0)\\nos.setsid()\\n"
        daemon += "if os.fork(): os._exit(0)\\nos.chdir('/'); print(os.getpid(), flush=True)\\n"
        daemon += "os.closerange(0, 99); time.sleep(300)"
        print(subprocess.check_output([sys.executable, "-c", daemon, MARK], text=True))""",
    "double-forked daemon, empty environment": """
        get_ipython().system(f"env -i setsid {shlex.join(SLEEP)} & echo $!")""",
    "forked, in its own session": """
        pid = os.fork()
        if pid == 0:
            os.setsid(); time.sleep(300); os._exit(0)
        print(pid)""",
    "stopped": """
        p = subprocess.Popen(SLEEP); os.kill(p.pid, signal.SIGSTOP); print(p.pid)""",
    "spawns without end": """
        spawner = "import subprocess, sys, time\\nuntil = time.time() + 20\\n"
        spawner += "while time.time() < until: subprocess.Popen("
        spawner += "[sys.executable, '-S', '-c', 'import time; time.sleep(20)', sys.argv[1]],"
        spawner += "start_new_session=True); time.sleep(.02)"
        p = subprocess.Popen([sys.executable, "-c", spawner, MARK], start_new_session=True)
        print(p.pid)""",
}
# A rank that dies by itself takes along what has its mark or its session: not what has neither.
LOSES = {"own session, empty environment", "double-forked daemon, empty environment"}


def marked(mark):
    """{pid: name} of all processes with the mark, zombies of them excepted."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = b""
            for file in ("environ", "cmdline"):
                with open(f"/proc/{name}/{file}", "rb") as f:
                    text += f.read()
        except OSError:
            continue
        if mark.encode() in text and int(name) != os.getpid():
            found[int(name)] = text[-200:]
    return found


def wait_until_gone(mark, but=()):
    deadline = time.monotonic() + LIMIT_S
    while left := {pid: text for pid, text in marked(mark).items() if pid not in but}:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def setup(mark):
    return (
        f"import os, shlex, signal, subprocess, sys, time\nMARK = '{mark}'\n"
        "SLEEP = [sys.executable, '-S', '-c', 'import time; time.sleep(300)', MARK]"
    )


def start(daemon, group, what, mark):
    """Runs a case on every rank; {rank: [pids]}."""
    lines = [line.removeprefix(" " * 8) for line in START[what].splitlines()]
    events = daemon.cell(group, setup(mark) + "\n".join(lines)).events
    assert events[-1]["status"] == "ok", [e for e in events if e["type"] == "error"]
    text = {rank: printed(events, rank) for rank in (0, 1)}
    pids = {rank: [int(word) for word in text[rank].split()] for rank in text}
    assert len(pids) == 2 and all(pids.values()), text
    return pids


class Marked:
    """A daemon whose ranks have the mark; `warm` are its template's."""

    def __init__(self, daemon):
        self.daemon, self.mark = daemon, f"left-{secrets.token_hex(6)}"
        self.create()
        daemon.delete("default")
        self.warm = set(marked(self.mark))
        assert len(self.warm) == 1

    def create(self):
        return self.daemon.create(env={"LEFT": self.mark})

    def check_gone(self):
        left = {p: t for p, t in marked(self.mark).items() if p not in self.warm}
        assert not left
        children = psutil.Process(self.daemon.pid).children(recursive=True)
        assert {p.pid for p in children} == self.warm  # not even zombies


@pytest.fixture(scope="module")
def home(build):
    from conftest import fresh_daemon

    with fresh_daemon(build) as daemon:
        yield Marked(daemon)


@pytest.fixture
def alone(start_daemon):
    return Marked(start_daemon())


def alive(pids):
    return all(psutil.pid_exists(pid) for of_rank in pids.values() for pid in of_rank)


@pytest.mark.parametrize("what", START)
def test_delete(home, what):
    for _ in range(REPEATS):
        home.create()
        pids = start(home.daemon, "default", what, home.mark)
        time.sleep(0.2)
        home.daemon.run("default", "1")
        assert alive(pids)  # a cell's end ends nothing
        started = time.monotonic()
        home.daemon.delete("default")
        took = time.monotonic() - started
        print(f"{what}: gone after {took:.2f} s")
        assert took < LIMIT_S
        home.check_gone()


@pytest.mark.parametrize("what", [name for name in START if name not in LOSES])
def test_a_rank_that_dies_takes_its_own_along(home, what):
    for _ in range(REPEATS):
        ranks = home.create()["ranks"]
        pids = start(home.daemon, "default", what, home.mark)
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        others = {ranks[0]["pid"], *pids[0]}
        deadline = time.monotonic() + LIMIT_S
        while any(map(psutil.pid_exists, pids[1])):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)
        assert all(map(psutil.pid_exists, others))
        home.daemon.delete("default")
        home.check_gone()


@pytest.mark.parametrize("what", ["DataLoader", "spawns without end"])
def test_restart(home, what):
    home.create()
    pids = start(home.daemon, "default", what, home.mark)
    path = "/v1/groups/default/restart?ranks=1"
    assert home.daemon.request("POST", path, timeout=60).json["state"] == "ready"
    deadline = time.monotonic() + LIMIT_S
    while any(map(psutil.pid_exists, pids[1])):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert all(map(psutil.pid_exists, pids[0]))
    home.daemon.delete("default")
    home.check_gone()


@pytest.mark.parametrize("way", ["SIGINT", "POST /v1/shutdown"])
def test_shutdown(alone, way):
    """Everything at once, from a busy group."""
    alone.create()
    for what in START:
        start(alone.daemon, "default", what, alone.mark)
    busy = "try: time.sleep(300)\nfinally: time.sleep(300)"
    alone.daemon.cell("default", busy, Prefer="respond-async")
    time.sleep(0.2)
    if way == "SIGINT":
        alone.daemon.process.send_signal(signal.SIGINT)
    else:
        assert alone.daemon.request("POST", "/v1/shutdown").status == 202
    started = time.monotonic()
    assert alone.daemon.process.wait(LIMIT_S) == 0
    assert time.monotonic() - started < LIMIT_S
    alone.daemon.process = None
    assert not marked(alone.mark)


def test_ranks_without_a_daemon_leave_nothing(start_daemon):
    """Nobody comes within the orphan timeout: the ranks end themselves and what they started."""
    alone = Marked(start_daemon("--orphan-timeout-s", "1"))
    alone.create()
    for what in START:
        start(alone.daemon, "default", what, alone.mark)
    alone.daemon.process.send_signal(signal.SIGTERM)
    assert alone.daemon.process.wait(5) == 0
    alone.daemon.process = None
    wait_until_gone(alone.mark)


def test_exit_functions_run(home):
    """What a library has promised to do at the end of the process is done, with output."""
    home.create()
    file = home.daemon.folder / "at-exit"
    code = f"import atexit; atexit.register(lambda: open({str(file)!r} + str(rank), 'w').close())"
    home.daemon.run("default", code)
    home.daemon.run("default", "atexit.register(__import__('time').sleep, 60)")
    started = time.monotonic()
    home.daemon.delete("default")  # the second one, which is called first, is cut short
    assert time.monotonic() - started < 5
    assert not list(home.daemon.folder.glob("at-exit*"))
    home.create()
    home.daemon.run("default", code)
    home.daemon.delete("default")
    assert len(list(home.daemon.folder.glob("at-exit*"))) == 2


def test_shared_memory_is_given_back(home):
    """Python's resource tracker outlives a rank for the moment it needs to unlink."""
    code = (
        "from multiprocessing import shared_memory, Semaphore\n"
        "kept = shared_memory.SharedMemory(create=True, size=1000), Semaphore()\n"
        "print(kept[0].name)"  # the semaphore has no name any more
    )
    for end in ("delete", "kill"):
        ranks = home.create()["ranks"]
        events = home.daemon.cell("default", code).events
        names = {printed(events, rank).strip().lstrip("/") for rank in (0, 1)}
        start(home.daemon, "default", "DataLoader", home.mark)
        assert len(names) == 2 and names <= set(os.listdir("/dev/shm"))
        if end == "kill":
            for rank in ranks:
                os.kill(rank["pid"], signal.SIGKILL)
        home.daemon.delete("default")
        home.check_gone()
        assert not names & set(os.listdir("/dev/shm")), end
