# SPDX-License-Identifier: Apache-2.0
"""Cells on the ranks feel like cells here: Tab, Shift-Tab and `?`, in real kernels and in the
terminal's completer, against a real daemon and real ranks."""

import os
import re
import time

import kernels
import pytest
from conftest import ROOT, of_type, stopped, wait_until

OBJECTS = """
class Learner:
    def fit_far(self, epochs, lr_max=0.1):
        "Trains on the ranks."
learn = Learner()
learn.far_model = {"far_key": 1}
only_far = 1
"""


@pytest.fixture(scope="module")
def made(daemon):
    """A group whose ranks have OBJECTS; rank 1 has far_rank_one too."""
    daemon.create(2, name="feel", cwd=str(ROOT))
    daemon.run("feel", OBJECTS + "if rank: far_rank_one = 1")
    yield "feel"
    daemon.delete("feel")


@pytest.fixture(scope="module")
def kernel(daemon, made):
    """The client of a kernel that has the magics, and a name of its own."""
    env = {**os.environ, "DDIP_RUNTIME_DIR": str(daemon.runtime_dir)}
    manager, client = kernels.start(env)
    client.execute_interactive("%load_ext Ddip\nonly_here = 1", timeout=30)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.fixture
def autodip(kernel):
    run(kernel, "%autodip -a '--name feel' on")
    yield
    run(kernel, "%autodip off")


def run(client, code):
    """The text that a cell shows; it must succeed."""
    outputs = []
    reply = client.execute_interactive(code, timeout=60, output_hook=outputs.append)["content"]
    assert reply["status"] == "ok", reply
    shown = "".join(m["content"].get("text", "") for m in outputs)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown), reply


def tab(client, code, until=None):
    """Matches of a complete_request; asked again, on a loaded machine, until one is there."""
    end = time.monotonic() + 30
    while True:
        reply = client.complete(code, reply=True, timeout=30)["content"]
        assert reply["status"] == "ok"
        if until is None or until in reply["matches"] or time.monotonic() > end:
            return reply["matches"], code[reply["cursor_start"] : reply["cursor_end"]]


def shift_tab(client, code, until=None):
    """The text of an inspect_request."""
    end = time.monotonic() + 30
    while True:
        reply = client.inspect(code, reply=True, timeout=30)["content"]
        plain = re.sub(r"\x1b\[[0-9;]*m", "", reply["data"].get("text/plain", ""))
        if until is None or until in plain or time.monotonic() > end:
            return plain


DIP = "%%dip --name feel\n"


def test_names_of_the_ranks_and_of_here(kernel):
    matches, fragment = tab(kernel, DIP + "only_", "only_far")
    assert {"only_far", "only_here"} <= set(matches) and fragment == "only_"
    assert "only_far" not in tab(kernel, "only_")[0]
    assert "only_far" not in tab(kernel, "%%dip local --name feel\nonly_")[0]
    assert "only_far" not in tab(kernel, "%%time\nonly_")[0]


@pytest.mark.parametrize(
    ("code", "match", "fragment"),
    [
        ("learn.fit_", ".fit_far", ".fit_"),
        ("x = 1\nfor i in range(3):\n    learn.far_model.ke", ".keys", ".ke"),
        ("learn.fit_far(1, lr", "lr_max=", "lr"),
        ("learn.far_model['far", "far_key", "far"),
    ],
)
def test_attributes_arguments_and_keys(kernel, code, match, fragment):
    matches, replaced = tab(kernel, DIP + code, match)
    assert match in matches and replaced == fragment


def test_first_rank_of_the_cell(kernel):
    code = "%%dip --name feel --ranks 1\nfar_rank"
    assert "far_rank_one" in tab(kernel, code, "far_rank_one")[0]
    assert "far_rank_one" not in tab(kernel, DIP + "far_rank")[0]


def test_flags(kernel):
    assert {"-n", "--gpus"} <= set(tab(kernel, "%makedip -")[0])
    assert tab(kernel, "%%dip --name feel --se")[0] == ["--see"]


def test_inspection(kernel):
    plain = shift_tab(kernel, DIP + "learn.fit_far(", "Trains on the ranks.")
    assert "learn.fit_far(epochs, lr_max=0.1)" in plain
    assert "only_here" not in shift_tab(kernel, "only_far") and not shift_tab(kernel, "only_far")
    assert "int" in shift_tab(kernel, DIP + "only_here")  # the ranks have none


def test_autodip(kernel, autodip):
    assert "only_far" in tab(kernel, "only_", "only_far")[0]
    assert ".fit_far" in tab(kernel, "x = 1\nlearn.fit", ".fit_far")[0]
    assert "Trains" in shift_tab(kernel, "learn.fit_far", "Trains")
    for local in ("%time only_", "%%time\nonly_", "%%dip local\nonly_"):
        assert "only_far" not in tab(kernel, local)[0]
    assert not shift_tab(kernel, "%time learn.fit_far")


def test_question_mark(kernel, autodip):
    """`name?` is code: the ranks run it."""
    shown, reply = run(kernel, "learn.fit_far?")
    assert "Trains on the ranks." in shown and "lr_max=0.1" in shown
    shown, reply = run(kernel, "learn.fit_far??")
    assert "def fit_far" in shown
    shown, reply = run(kernel, "%%dip local\nonly_here?")
    assert "int" in reply["payload"][0]["data"]["text/plain"]


BUSY = {"python": "while True: pass", "collective": "import torch.distributed as d; d.barrier()"}


@pytest.mark.parametrize("busy", BUSY)
def test_while_a_cell_runs(kernel, daemon, made, busy):
    code = f"print('runs', flush=True)\nif rank == 0:\n    {BUSY[busy]}"
    if busy == "collective":
        code += "\nelse:\n    import time; time.sleep(99)"
    where = daemon.cell(made, code, Prefer="respond-async").headers["location"]
    events = f"{where}/events?follow=false"
    wait_until(lambda: of_type(daemon.request("GET", events).events, "stream"))
    try:
        assert ".fit_far" in tab(kernel, DIP + "learn.fit_", ".fit_far")[0]
        assert "Trains" in shift_tab(kernel, DIP + "learn.fit_far", "Trains")
        assert daemon.request("GET", where).json["state"] == "running"
    finally:
        for _ in range(2):
            daemon.request("POST", f"/v1/groups/{made}/interrupt")
        daemon.request("GET", f"{where}/events")


def pid_of(daemon, group, rank):
    return daemon.request("GET", f"/v1/groups/{group}").json["ranks"][rank]["pid"]


def test_a_rank_that_cannot_answer_holds_up_nobody(kernel, daemon, made):
    """The local names, after half a second at most."""
    with stopped(pid_of(daemon, made, 0)):
        started = time.monotonic()
        matches, _ = tab(kernel, DIP + "only_")
        took = time.monotonic() - started
    assert "only_here" in matches and "only_far" not in matches and took < 5
    assert "only_far" in tab(kernel, DIP + "only_", "only_far")[0]


def test_in_the_terminals_completer(daemon, made, monkeypatch):
    from IPython.core.completer import provisionalcompleter
    from IPython.terminal.interactiveshell import TerminalInteractiveShell
    from IPython.terminal.ptutils import IPythonPTCompleter
    from prompt_toolkit.completion import CompleteEvent
    from prompt_toolkit.document import Document

    monkeypatch.setenv("DDIP_RUNTIME_DIR", str(daemon.runtime_dir))
    shell = TerminalInteractiveShell()
    shell.history_manager.enabled = False
    shell.run_line_magic("load_ext", "ddip")
    completer = IPythonPTCompleter(shell=shell)
    code = DIP + "x = learn.fi"

    def texts():
        with provisionalcompleter():
            found = completer.get_completions(Document(code, len(code)), CompleteEvent())
            return [each.text for each in found]

    wait_until(lambda: "fit_far" in texts() or ".fit_far" in texts())
    shell.run_line_magic("unload_ext", "ddip")
    assert not {"fit_far", ".fit_far"} & set(texts())


def test_dipinfo(kernel, daemon, made):
    differ = "import torch\nw = torch.zeros(3 - rank, 4)\nsame = 'text'\n" + OBJECTS
    daemon.run(made, differ)
    shown, _ = run(kernel, "%dipinfo --name feel")
    lines = [line.split() for line in shown.splitlines()]
    assert lines[0][:2] == ["group", "'feel':"] and lines[1] == ["ranks", "0,", "1:"]
    assert ["same", "str", "'text'"] in lines and ["rank", "int", "0", "|", "1"] in lines
    at = lines.index(["w", "<-", "differs"])
    assert lines[at + 1][:4] == ["0:", "Tensor", "[3,", "4]"]
    assert lines[at + 2][:4] == ["1:", "Tensor", "[2,", "4]"]
    at = lines.index(["far_rank_one", "<-", "differs"])
    assert lines[at + 1] == ["0:", "(not", "there)"] and lines[at + 2] == ["1:", "int", "1"]
    assert lines[-1] == ["autodip:", "off"]
    shown, _ = run(kernel, "%dipinfo w same --ranks 1 --name feel")
    assert shown.splitlines()[1] == "rank 1:" and "differs" not in shown
    assert "rank " not in shown.split("rank 1:")[1] and "w " in shown


def test_dipinfo_while_a_cell_runs_and_of_a_rank_that_is_stuck(kernel, daemon, made):
    code = "import time; time.sleep(60)"
    where = daemon.cell(made, code, Prefer="respond-async").headers["location"]
    wait_until(lambda: daemon.request("GET", where).json["state"] == "running")
    with stopped(pid_of(daemon, made, 1)):
        shown, end = "", time.monotonic() + 20
        while "\nrank 0:" not in shown and time.monotonic() < end:  # a loaded machine
            shown = run(kernel, "try:\n    %dipinfo --name feel\nexcept Exception: pass")[0]
    assert f"cell {where.rsplit('/')[-1]} is running" in shown
    assert "only_far" in shown.split("rank 0:")[1]
    assert "\nrank 1 has not answered within 0.4 s" in shown
    daemon.request("POST", f"/v1/groups/{made}/interrupt")
    daemon.request("GET", f"{where}/events")
