# SPDX-License-Identifier: Apache-2.0
"""The daemon is killed and started again while notebooks and scripts use it: they go on as if
nothing had happened."""

import contextlib
import os
import random
import re
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path

import ddip
import kernels
import nbclient.exceptions
import nbformat
import numpy as np
import psutil
import pytest
from conftest import fresh_daemon, printed, text, wait_until
from ddip import retry
from nbclient import NotebookClient

TRAIN = """
import time, torch
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(30):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step * 2 + rank))
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    print(f"RUN step {step} of rank {rank}: {loss.item():.6f}")
    time.sleep(0.1)
round(sum(p.sum().item() for p in model.parameters()), 5)
"""


def slow(count, word="line"):
    """Code that says a line each tenth of a second."""
    return f"import time\nfor i in range({count}):\n    print('{word}', i)\n    time.sleep(0.1)"


def lines(count, word="line"):
    return "".join(f"{word} {i}\n" for i in range(count))


def environment(runtime_dir, build):
    return {**os.environ, "DDIP_RUNTIME_DIR": str(runtime_dir), "DDIPD": str(build / "ddipd")}


def notebook(cells, env, **options):
    node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    options = {"kernel_manager_class": kernels.UnixKernelManager, **options}
    NotebookClient(node, timeout=120, kernel_name="python3", **options).execute(env=env)
    return node


def kill(daemon):
    daemon.process.kill()
    daemon.process.wait()


def journalled(daemon, words):
    """Is it in the journal that a rank has said that?"""
    journals = daemon.state_dir.glob("groups/*/journal/*.ndjson")
    return any(words.encode() in path.read_bytes() for path in journals)


@contextlib.contextmanager
def beside(work, *args):
    """Runs work(*args) in a thread meanwhile; its exception is raised at the end."""
    failed = []

    def run():
        try:
            work(*args)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    for error in failed:
        raise error


def killing(daemon, *absences):
    """Kills the daemon when a rank has printed these words, and starts it that much later."""
    for words, seconds in absences:
        wait_until(lambda words=words: journalled(daemon, words), 60)
        kill(daemon)
        time.sleep(seconds)
        daemon.start()


@pytest.fixture(scope="module")
def own_daemon(build):
    """A daemon for these tests alone, with a group of two ranks."""
    with fresh_daemon(build) as daemon:
        daemon.create(2)
        yield daemon


@pytest.fixture
def client(own_daemon):
    """(that daemon, a client of it). What a test says is to be found in the journal
    and must be said by no other test."""
    try:
        with ddip.connect(own_daemon.socket) as client:
            yield own_daemon, client
    finally:
        if own_daemon.process.poll() is not None:
            own_daemon.start()
        with ddip.connect(own_daemon.socket) as client:
            while client.interrupt()["cell"]:
                time.sleep(0.1)


@pytest.mark.parametrize("see", ["", " --see all"])
def test_training_cell_of_a_notebook_goes_on(client, build, see):
    """Short absences leave no trace; one of seconds leaves one line on stderr."""
    daemon, _ = client
    tag = "all-" if see else "one-"

    def run(name):
        cells = ["%load_ext ddip", f"%%dip{see}\n{TRAIN.replace('RUN', name)}"]
        cell = notebook(cells, environment(daemon.runtime_dir, build)).cells[1]
        lines = text(cell).replace(name, "RUN").splitlines()
        # two ranks' lines have no order of their own
        return sorted(lines) if see else lines, text(cell, "stderr").splitlines()

    calm, _ = run(f"{tag}calm")
    assert sum("step 29 of rank" in line for line in calm) == (2 if see else 1)
    with beside(killing, daemon, (f"{tag}short step 5 ", 0.2), (f"{tag}short step 15 ", 0.7)):
        assert run(f"{tag}short") == (calm, [])
    with beside(killing, daemon, (f"{tag}long step 5 ", 4), (f"{tag}long step 15 ", 0.2)):
        shown, (notice,) = run(f"{tag}long")
    assert re.fullmatch(
        r"ddip: no ddipd at \S+, waiting up to 60 s for it ... back after \d s", notice
    )
    shown.remove(notice)
    assert shown == calm


def test_execute_of_a_script_goes_on(client):
    daemon, client = client
    with beside(killing, daemon, ("script 5", 0.1), ("script 15", 0.5)):
        events = list(client.execute(slow(30, "script")))
    for rank in (0, 1):
        assert printed(events, rank) == lines(30, "script")
    seqs = [e["seq"] for e in events]
    assert seqs == sorted(set(seqs)) and [e["type"] for e in events].count("done") == 1
    assert events[-1]["status"] == "ok"


def test_variables_under_way(client):
    """They wait behind a cell when the daemon is killed, and are asked for again."""
    daemon, client = client
    value = np.arange(300_000)
    code = "import time\ntime.sleep(2)\nmine = rank + 10"
    for call, want in (
        (lambda: client.push({"pushed": value})["ranks"], [0, 1]),
        (lambda: client.pull("mine", rank=1), 11),
        (lambda: [v["name"] for v in client.variables() if v["name"] == "pushed"], ["pushed"]),
    ):
        cell = client.submit(code)["cell"]
        wait_until(lambda cell=cell: client.cell(cell)["state"] == "running", 60)
        with beside(lambda: (time.sleep(0.5), kill(daemon), time.sleep(0.3), daemon.start())):
            assert call() == want
    assert all((client.pull("pushed", rank=rank) == value).all() for rank in (0, 1))


def test_push_cut_in_its_middle(client):
    daemon, client = client
    value = np.random.default_rng(0).integers(0, 1 << 60, 4_000_000)
    daemon.process.send_signal(signal.SIGSTOP)  # the sockets fill: the client is sending still
    with beside(lambda: (time.sleep(1), kill(daemon), daemon.start())):
        client.push({"big": value})
    assert (client.pull("big", rank=1) == value).all()


def test_dipush_and_dipull_of_a_notebook(client, build):
    daemon, _ = client
    cells = [
        "%load_ext ddip",
        f"%%dip --detach\n{slow(20, 'push')}",
        "sent = {'a': [1, 2]}\n%dipush sent",
        "%%dip --detach\ngot = sent['a'] + [rank]\nimport time\ntime.sleep(2)\nprint('ha' + 'lf')",
        "%dipull got -r 1\nprint(got)",
    ]
    with beside(killing, daemon, ("push 5", 0.3), ("half", 0)):
        done = notebook(cells, environment(daemon.runtime_dir, build))
    assert text(done.cells[2]) == "" and text(done.cells[4]) == "[1, 2, 1]\n"


class Proxy:
    """Between clients and the daemon. While `deaf`, what the daemon says is thrown away."""

    def __init__(self, path, daemon):
        self.path, self.daemon, self.deaf, self.pairs = str(path), daemon, False, []
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                here, _ = self.listener.accept()
            except OSError:
                return
            there = socket.socket(socket.AF_UNIX)
            if there.connect_ex(self.daemon.socket):
                here.close()
                continue
            self.pairs += [here, there]
            for source, sink, answers in ((here, there, False), (there, here, True)):
                threading.Thread(
                    target=self._copy, args=(source, sink, answers), daemon=True
                ).start()

    def _copy(self, source, sink, answers):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not (answers and self.deaf):
                    sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def cut(self):
        for each in self.pairs:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.pairs.clear()
        self.deaf = False

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("way", ["execute", "submit"])
def test_lost_acceptance(client, way, restart):
    """The daemon has taken the cell, and its answer is lost: the client asks again by its key."""
    daemon, direct = client
    proxied = contextlib.closing(Proxy(daemon.folder / f"{way}{restart}", daemon))
    with proxied as proxy, ddip.connect(proxy.path) as client:
        client.execute("n = 0", on_event=id)
        before, word = len(direct.cells()), f"{way} {restart}"
        proxy.deaf = True

        def lose():
            wait_until(lambda: journalled(daemon, f"{word} 1"), 60)
            if restart:
                kill(daemon)
                daemon.start()
            proxy.cut()

        with beside(lose):
            if way == "execute":
                events = list(client.execute(f"n += 1; print('{word}', n)"))
            else:
                number = client.submit(f"n += 1; print('{word}', n)")["cell"]
                events = list(client.events(cell=number))
    assert [printed(events, rank) for rank in (0, 1)] == [f"{word} 1\n"] * 2
    assert direct.pull("n", rank="all") == [1, 1] and len(direct.cells()) == before + 1


def test_cell_that_was_not_taken(client):
    """It is in the socket of a daemon that dies before it reads it: the next one runs it."""
    daemon, client = client
    client.execute("n = 0", on_event=id)
    daemon.process.send_signal(signal.SIGSTOP)
    with beside(lambda: (time.sleep(0.5), kill(daemon), daemon.start())):
        assert client.execute("n += 1", on_event=id)["status"] == "ok"
    assert client.pull("n", rank="all") == [1, 1]


def test_every_cell_runs_once(client):
    """Cells one after another, while the daemon is killed at random moments."""
    daemon, client = client
    dice, over = random.Random(1), threading.Event()

    def killer():
        while not over.is_set():
            time.sleep(dice.random())
            kill(daemon)
            time.sleep(dice.random() / 5)
            daemon.start()

    client.push({"seen": []})
    end = time.monotonic() + float(os.environ.get("DDIP_RECONNECT_S", "10"))
    count = 0
    with beside(killer):
        try:
            while time.monotonic() < end:
                code = f"seen.append({count}); print('cell', {count})"
                events = list(client.execute(code))
                assert events[-1]["status"] == "ok"
                assert [printed(events, r) for r in (0, 1)] == [f"cell {count}\n"] * 2
                count += 1
        finally:
            over.set()
    assert count > 10
    assert client.pull("seen", rank="all") == [list(range(count))] * 2
    print(f"{count} cells, each once")


def test_calls_that_are_not_sent_twice(client):
    daemon, client = client
    cell = client.submit("import time; time.sleep(60)")["cell"]
    wait_until(lambda: client.cell(cell)["state"] == "running", 60)
    daemon.process.send_signal(signal.SIGSTOP)
    with beside(lambda: (time.sleep(0.5), kill(daemon), daemon.start())):
        with pytest.raises(ddip.NotRunning, match="whether it was done is not known") as caught:
            client.interrupt()
    assert caught.value.sent and client.cell(cell)["state"] == "running"
    daemon.process.send_signal(signal.SIGSTOP)
    with beside(lambda: (time.sleep(0.5), kill(daemon), daemon.start())):
        assert client.interrupt(cell=cell)["cell"] == cell
    assert list(client.events(cell=cell))[-1]["status"] == "interrupted"


def test_something_new_waits_for_a_restart(client):
    daemon, client = client
    kill(daemon)
    with beside(lambda: (time.sleep(1), daemon.start())):
        assert client.execute("1", on_event=id)["status"] == "ok"
    kill(daemon)
    started = time.monotonic()
    with pytest.raises(ddip.NotRunning, match="no ddipd answers"):
        client.execute("1")
    assert retry.KNOCK_S <= time.monotonic() - started < retry.KNOCK_S + 2
    daemon.start()


def test_daemon_that_stays_away(client, monkeypatch):
    daemon, client = client
    monkeypatch.setattr(retry, "RETRY_S", 3)
    told = []
    client.notice = told.append
    cell = client.execute(slow(30, "stays"))
    next(event for event in cell if event["type"] == "stream")
    kill(daemon)
    started = time.monotonic()
    with pytest.raises(ddip.NotRunning, match="may still be running .*\nhint: .*%dipattach"):
        list(cell)
    assert 3 <= time.monotonic() - started < 5
    assert "".join(told).count("\n") == 1 and told[-1] == " not yet\n"
    daemon.start()
    assert list(cell)[-1]["status"] == "ok", "iterating on must go on where it was"


def test_deadline_in_an_absence(client):
    daemon, client = client
    cell = client.execute(slow(20, "deadline"))
    next(event for event in cell if event["type"] == "stream")
    kill(daemon)
    cell.deadline = time.monotonic() + 1
    with pytest.raises(TimeoutError):
        list(cell)
    assert time.monotonic() - cell.deadline < 0.5
    cell.deadline = None
    daemon.start()
    assert list(cell)[-1]["status"] == "ok"


class Kernel:
    """A real kernel, watched while it runs."""

    def __init__(self, env):
        self.manager, self.client = kernels.start(env)
        self.run("%load_ext ddip")

    def run(self, code, meanwhile=None):
        """What a cell shows, as `text` would say, and the status of its reply. meanwhile: called
        with all that is shown so far after each piece."""
        node = nbformat.v4.new_code_cell(code)

        def hook(message):
            if message["msg_type"] in ("stream", "error", "display_data", "execute_result"):
                node.outputs.append(nbformat.v4.output_from_msg(message))
                if meanwhile:
                    meanwhile(text(node))

        reply = self.client.execute_interactive(code, timeout=60, output_hook=hook)
        return text(node), reply["content"]["status"]

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(client, build):
    """kernel(): a kernel of the test's own daemon, as often as called."""
    daemon, _ = client
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(
            contextlib.closing(Kernel(environment(daemon.runtime_dir, build)))
        )


def test_interrupt_while_the_daemon_is_away(client, kernel):
    daemon, client = client
    kernel, killed = kernel(), []
    number = client.cells()[-1]["cell"] + 1

    def meanwhile(shown):
        if "away 3" in shown and not killed:
            kill(daemon)
            killed.append(time.monotonic())
            threading.Timer(1, kernel.manager.interrupt_kernel).start()
            threading.Timer(2, kernel.manager.interrupt_kernel).start()

    shown, status = kernel.run(f"%%dip\n{slow(30, 'away')}", meanwhile)
    assert status == "error" and time.monotonic() - killed[0] < 4
    assert "DdipInterrupted" not in shown and f"cell {number} is still going on" in shown
    assert f"`%dipattach {number}` shows it" in shown and "Traceback" not in shown
    daemon.start()
    assert kernel.run(f"%dipattach {number}") == (lines(30, "away"), "ok")


def test_giving_up_in_a_notebook(client, kernel):
    daemon, _ = client
    kernel, killed = kernel(), []
    kernel.run("import ddip.retry; ddip.retry.RETRY_S = 3")

    def meanwhile(shown):
        if "giving 3" in shown and not killed:
            kill(daemon)
            killed.append(time.monotonic())

    shown, status = kernel.run(f"%%dip\n{slow(60, 'giving')}", meanwhile)
    assert status == "error" and "of group 'default' may still be running" in shown
    assert "%dipattach" in shown and "waiting up to 3 s for it ... not yet\n" in shown
    daemon.start()
    assert kernel.run("%dipattach") == (lines(60, "giving"), "ok")


@pytest.mark.parametrize("now", [True, False])
def test_kernel_restarted_in_mid_cell(client, kernel, now):
    """The new kernel shows what the cell has said before, and follows it, through a restart of the
    daemon; so does another kernel."""
    daemon, _ = client
    first, second = kernel(), kernel()
    count, word = (120, "restarted") if now else (60, "shut down")
    first.client.execute(f"%%dip\n{slow(count, word)}")
    wait_until(lambda: journalled(daemon, f"{word} 5"), 60)
    first.manager.restart_kernel(now=now)
    first.client.wait_for_ready(timeout=30)
    first.run("%load_ext ddip")
    whole = lines(count, word), "ok"
    if now:  # the other way takes as long as the cell
        assert not journalled(daemon, f"{word} 110"), "the cell must still be running"
        with beside(killing, daemon, (f"{word} 110", 0.2)):
            assert first.run("%dipattach") == whole
    assert second.run("%dipattach") == whole


def test_detach_and_what_cannot_be_attached_to(start_daemon, build):
    daemon = start_daemon("--journal-limit", "1M")
    with contextlib.closing(Kernel(environment(daemon.runtime_dir, build))) as kernel:
        shown, status = kernel.run("%dipattach")
        assert status == "error" and "there is no group" in shown and "--name" in shown
        kernel.run("%makedip -n 2")
        shown, status = kernel.run("%dipattach")
        assert status == "error" and "group 'default' has run no cell" in shown
        started = time.monotonic()
        shown, status = kernel.run(f"%%dip --detach\n{slow(20, 'line')}")
        assert time.monotonic() - started < 1 and status == "ok"
        assert shown == "ddip: cell 1 of group 'default' started; `%dipattach 1` shows it\n"
        assert kernel.run("%dipattach 1") == (lines(20, "line"), "ok")
        for number in (0, 7):
            shown, status = kernel.run(f"%dipattach {number}")
            assert status == "error" and "%dipattach without a number shows the newest" in shown
        flood = "for i in range(3000): print('x' * 1000)"
        kernel.run(f"%%dip\n{flood}")
        shown, status = kernel.run("%dipattach 2")
        assert status == "ok" and "events are missing here: the journal's limit" in shown
        kill(daemon)
        daemon.start()
        shown, status = kernel.run("%dipattach 1")
        assert status == "error" and "record of cell 1 is no longer kept" in shown
        assert "Traceback" not in shown and "shows the newest" in shown


def test_private_daemon_that_dies(build):
    """The magics start again what they have started: in mid-cell, and between cells. One that was
    ended on purpose stays away."""
    with tempfile.TemporaryDirectory(prefix="ddip") as folder:
        env = environment(f"{folder}/run", build) | {"XDG_STATE_HOME": folder}
        pid_file = Path(folder, "run/ddipd.pid")

        def end(with_signal):
            process = psutil.Process(int(pid_file.read_text()))
            process.send_signal(with_signal)
            wait_until(lambda: not process.is_running() or process.status() == "zombie", 60)

        killed = []
        said = "ddip: the private ddipd had died; started it again, the ranks went on"

        def meanwhile(shown):
            for i, words in enumerate(("line 5", "line 15")):
                if words in shown and len(killed) == i == shown.count(said):
                    killed.append(pid_file.read_text())
                    end(signal.SIGKILL)

        with contextlib.closing(Kernel(env)) as kernel:
            try:
                assert "started a private one" in kernel.run("%makedip -n 2")[0]
                shown, status = kernel.run(f"%%dip\n{slow(60, 'line')}", meanwhile)
                said_lines = shown.splitlines()
                told = [line for line in said_lines if line.startswith("ddip:")]
                assert told == [said] * 2 and status == "ok" and len(set(killed)) == 2
                assert [line for line in said_lines if line not in told] == lines(60).splitlines()
                end(signal.SIGKILL)
                shown, status = kernel.run("%%dip\nprint(i)")
                waits = "ddip: waiting; the group is starting\n"  # until the ranks are back
                assert (shown.replace(waits, ""), status) == (f"{said}\n59\n", "ok")
                end(signal.SIGINT)
                shown, status = kernel.run("%%dip\n1")
                assert status == "error" and "no ddipd answers" in shown
                assert "started a private one" in kernel.run("%makedip -n 2")[0]
                kernel.run(f"%%dip --detach\n{slow(30)}")
                end(signal.SIGKILL)
                with contextlib.closing(Kernel(env)) as later:  # it takes the group over
                    shown, status = later.run("%makedip -n 2")
                    assert "started a private one" in shown and "attached" in shown
                    assert later.run("%dipattach") == (lines(30), "ok")
            finally:
                with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ValueError):
                    end(signal.SIGINT)


def test_no_hope_is_told_at_once(build, tmp_path):
    env = environment(tmp_path, build)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="no ddipd is running"):
        notebook(["%load_ext ddip\n%dipattach"], env)
