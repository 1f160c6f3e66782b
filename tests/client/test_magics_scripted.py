# SPDX-License-Identifier: Apache-2.0
"""The magics in an IPython shell, against a scripted daemon: flags, places, autodip, the ends of
cells. What the real daemon answers is in tests/e2e/test_magics.py."""

import json
import os
import re
import subprocess
import sys

import pytest
from ddip import magics
from ddip.errors import DdipCellError, DdipError
from fake_daemon import FakeDaemon
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

RANK = {"rank": 0, "pid": 11, "gpu": None, "state": "idle"}
GROUP = {
    "name": "default",
    "state": "ready",
    "backend": "gloo",
    "world_size": 2,
    "ranks": [RANK, {**RANK, "rank": 1, "pid": 12}],
    "running": None,
}
GPUS = [{"index": i, "uuid": f"GPU-{i}", "name": "H"} for i in range(3)]
MISSING = (404, {"title": "Not Found", "detail": "no such group"})


class Script(FakeDaemon):
    """answers: {"METHOD path": (status, body)}; cells: what was executed; each cell prints its
    code on rank 0 and 1, or raises if the code holds `boom`."""

    def __init__(self, path):
        super().__init__(path, route=self._route, talk=self._talk)
        self.cells, self.bodies, self.answers = [], [], {}

    def _route(self, method, path, headers, reader):
        self.bodies.append((f"{method} {path}", json.loads(reader.read() or "null")))
        info = {"version": "0", "pid": 1, "cuda": {"available": False}}
        known = {"GET /v1/info": (200, info), **self.answers}
        status, body = known.get(f"{method} {path}", MISSING)
        return status, "application/json", json.dumps(body).encode()

    def _talk(self, ws):
        while (message := ws.request()) is not None:
            self.cells.append(message)
            ws.send({"id": message["id"], "status": 202, "body": {"cell": 7}})
            events, bad = [], "boom" in message.get("code", "")
            for rank in (0, 1):
                text = message.get("code", "replayed")
                events.append({"type": "stream", "rank": rank, "name": "stdout", "text": text})
            if bad:
                error = {"ename": "ValueError", "evalue": "boom", "traceback": ["remote trace"]}
                events.append({"type": "error", "rank": 1, **error})
            events.append({"type": "done", "rank": None, "status": "error" if bad else "ok"})
            events[-1]["ranks"] = {"0": "ok", "1": events[-1]["status"]}
            ws.send(*[{"seq": i + 1, "cell": 7, **event} for i, event in enumerate(events)])


@pytest.fixture
def script(tmp_path, monkeypatch):
    fake = Script(tmp_path / "d.sock")
    monkeypatch.setenv("DDIP_URL", fake.url)
    yield fake
    fake.close()


@pytest.fixture
def shell(script):
    shell = InteractiveShell()
    shell.history_manager.enabled = False
    shell.run_cell("%load_ext Ddip")
    yield shell
    magics.unload(shell)


def ok(shell, cell):
    result = shell.run_cell(cell)
    result.raise_error()
    return result


def codes(script):
    return [message["code"].rstrip("\n") for message in script.cells]


def test_cell_runs_on_the_ranks(shell, script, capsys):
    ok(shell, "%%dip\nprint(1)\n")
    assert codes(script) == ["print(1)"] and "ranks" not in script.cells[0]
    assert capsys.readouterr().out == "print(1)\n"


def test_flags_of_dip(shell, script, capsys):
    ok(shell, "%%dip --ranks 1,0 --name g --timeout 2.5 -S all -a \"f 'a b'\"\nx\n")
    asked = script.cells[0]
    assert (asked["group"], asked["ranks"], asked["timeout_s"]) == ("g", [1, 0], 2.5)
    assert (
        capsys.readouterr().out == "[0] x\n[1] x\n" and script.cells[-1]["app_command"] == "f 'a b'"
    )


def test_a_command_for_the_app_alone(shell, script):
    ok(shell, "%dip -a \"f 'a b'\" --ranks 1\n")
    ok(shell, "%%dip -a f\n\n")
    assert codes(script) == ["", ""] and script.cells[0]["ranks"] == [1]
    assert [each["app_command"] for each in script.cells] == ["f 'a b'", "f"]
    for line in ("%dip", "%dip -a f local"):
        result = shell.run_cell(line)
        assert "%dip runs no code" in str(result.error_in_exec)
    assert len(script.cells) == 2


@pytest.mark.parametrize(
    ("flags", "see", "where"),
    [
        ("", None, "remote"),
        ("--see 0 1 everywhere", ["0", "1"], "everywhere"),
        ("everywhere --see all", ["all"], "everywhere"),
        ("-S 0,1 -q local", ["0,1"], "local"),
    ],
)
def test_see_and_where(shell, flags, see, where):
    args = shell._ddip._dip_args(flags)
    assert (args.see, args.where) == (see, where)


def test_rank_1_alone_is_seen_without_asking(shell, capsys):
    ok(shell, "%%dip --ranks 1\nx\n")
    assert capsys.readouterr().out == "x\n"


def test_local_runs_here_and_everywhere_runs_here_first(shell, script, capsys):
    ok(shell, "%%dip local\na = 1\nprint('here')\n")
    assert shell.user_ns["a"] == 1 and not script.cells
    ok(shell, "%%dip everywhere\nprint('both', end=' ')\n")
    assert capsys.readouterr().out == "here\nboth print('both', end=' ')\n"
    assert len(script.cells) == 1


def test_everywhere_stops_at_an_error_here(shell, script, capsys):
    error = shell.run_cell("%%dip everywhere\n1 / 0\n").error_in_exec
    assert isinstance(error, DdipCellError) and not script.cells
    text = capsys.readouterr().out
    assert text.count("ZeroDivisionError") == 2  # head and end of one traceback
    assert "the ranks did not run it" in text and "run_cell_magic" not in text


def test_local_error_is_an_ordinary_one(shell, capsys):
    error = shell.run_cell("%%dip local\n\n1 / 0\n").error_in_exec
    assert isinstance(error, ZeroDivisionError)
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "----> 3 1 / 0" in text and "run_cell_magic" not in text


def test_error_of_a_rank_fails_the_cell_with_its_traceback(shell, capsys):
    error = shell.run_cell("%%dip\nboom\n").error_in_exec
    assert isinstance(error, DdipCellError) and error.ranks == {"0": "ok", "1": "error"}
    text = capsys.readouterr().out
    assert "--- rank 1 ---" in text and "remote trace" in text and "magics.py" not in text


def test_autodip_prefixes_plain_cells_only(shell, script, capsys):
    ok(shell, '%autodip -a "--see all" on')
    assert "on, cells run as `%%dip --see all`" in capsys.readouterr().out
    ok(shell, "\n  \nx = 1\n")
    assert codes(script) == ["x = 1"] and "x" not in shell.user_ns
    for cell in ("%time y = 1", "\n%%time\ny = 1\n", "%%dip local\ny = 1\n", "", "%autodip"):
        ok(shell, cell)
    assert len(script.cells) == 1 and shell.user_ns["y"] == 1
    ok(shell, "%%dip --ranks 1\nz\n")
    assert script.cells[-1]["ranks"] == [1]
    ok(shell, "%autodip off")
    ok(shell, "x = 3")
    assert shell.user_ns["x"] == 3 and len(script.cells) == 2


def test_autodip_says_its_state(shell, script, capsys):
    for line, said in (
        ("%autodip", "autodip: off\n"),
        (
            "%autodip on",
            "autodip: on, cells run as `%%dip`; those whose first line starts with % run here\n",
        ),
        ("%autodip", "autodip: on, cells run as `%%dip`\n"),
        ("%autodip off", "autodip: off\n"),
    ):
        ok(shell, line)
        assert capsys.readouterr().out == said
    script.answers["GET /v1/groups/default"] = (200, GROUP)
    for state in ("on", "off"):
        ok(shell, f"%autodip {state}")
        ok(shell, "%makedip -i")
        assert f"autodip: {state}" in capsys.readouterr().out.splitlines()[-1]


def test_the_prompt_of_a_terminal_shows_autodip(tmp_path):
    """In a real one, in the mode that reads lines."""
    lines = "%load_ext ddip\n%autodip on\n%autodip off\n%autodip on\n%unload_ext ddip\n"
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path), "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "-i"],
        input=lines,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    prompts = re.findall(r"(?:\(dip\) )?In \[\d\]", re.sub(r"\x1b\[[0-9;]*m", "", done.stdout))
    assert prompts[:6] == ["In [1]", "In [2]", "(dip) In [3]", "In [4]", "(dip) In [5]", "In [6]"]


def test_autodip_leaves_nested_and_silent_code_alone(shell, script):
    ok(shell, "%autodip on")
    shell.get_parent = lambda: {"content": {"silent": False, "store_history": False}}
    ok(shell, "viewer = 1")
    shell.get_parent = lambda: {"content": {"silent": False, "store_history": True}}
    ok(shell, "%%capture out\ninner = 1\n")
    assert not script.cells and shell.user_ns["viewer"] == shell.user_ns["inner"] == 1
    ok(shell, "far")
    assert codes(script) == ["far"]


def test_autodip_with_a_local_cell_that_pushes(shell, script):
    script.answers["POST /v1/groups/default/namespace"] = (200, {"bytes": 1, "ranks": [0, 1]})
    ok(shell, "%autodip on")
    script.route = lambda *request: (200, "application/json", b'{"bytes": 1, "ranks": [0, 1]}')
    ok(shell, "%%dip local\n\ns = 'text'\n\n%dipush s\n")
    assert not script.cells


def test_autodip_refuses_wrong_flags_at_once(shell):
    with pytest.raises(UsageError):
        shell.run_line_magic("autodip", 'on -a "--nonsense"')
    assert shell._ddip.auto.prefix is None


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ("-n 2", {"ranks": 2}),
        ("-g all -a fastai_v1 --verbose True", {"gpus": "all", "app": "fastai_v1"}),
        ("-g 0,2,1 --verbose=False", {"gpus": [0, 2, 1]}),
        ("-g 0 GPU-2 -t 30", {"gpus": [0, "GPU-2"]}),
    ],
)
def test_makedip_makes(shell, script, line, body, capsys, monkeypatch):
    monkeypatch.setenv("DDIP_PYTHON", "/opt/python")
    script.answers["POST /v1/groups"] = (201, GROUP)
    shell.run_line_magic("makedip", line)
    sent = dict(script.bodies)["POST /v1/groups"]
    assert sent.pop("cwd") and sent.pop("python") == "/opt/python"
    assert sent == {"name": "default", **body}
    assert "2 CPU ranks, gloo, ready" in capsys.readouterr().out


def test_makedip_attaches_to_the_same_shape(shell, script, capsys):
    script.answers["GET /v1/groups/default"] = (200, {**GROUP, "running": 4})
    shell.run_line_magic("makedip", "-n 2")
    out = capsys.readouterr().out
    assert "was there already, attached" in out and "cell 4 is running" in out
    shell.run_line_magic("makedip", "-n 2 -a torch")
    for other in ("-n 3", "-g 0,1", "-n 2 -a fastai_v2"):
        with pytest.raises(Exception, match="already: 2 CPU ranks.*\n.*-r"):
            shell.run_line_magic("makedip", other)
    assert "POST /v1/groups" not in dict(script.bodies)


def test_makedip_compares_gpus_in_order(shell, script):
    ranks = [{**RANK, "rank": i, "gpu": GPUS[i]} for i in range(3)]
    script.answers["GET /v1/groups/default"] = (200, {**GROUP, "world_size": 3, "ranks": ranks})
    script.answers["GET /v1/gpus"] = (200, {"gpus": GPUS})
    for same in ("-g all", "-g 0,1,2", "-g GPU-0 1 2"):
        shell.run_line_magic("makedip", same)
    for other in ("-g 0,2,1", "-g 0,1", "-n 3"):
        with pytest.raises(Exception, match="GPUs 0, 1, 2"):
            shell.run_line_magic("makedip", other)


def test_makedip_restart_with_a_shape_replaces(shell, script):
    script.answers |= {
        "GET /v1/groups/default": (200, GROUP),
        "DELETE /v1/groups/default": (200, {"stopped": [11, 12]}),
        "POST /v1/groups": (201, GROUP),
        "POST /v1/groups/default/restart?ranks=1": (200, GROUP),
    }
    shell.run_line_magic("makedip", "-r -n 2")
    shell.run_line_magic("makedip", "-r 1")
    calls = [call for call, _ in script.bodies if not call.startswith("GET")]
    assert calls == [
        "DELETE /v1/groups/default",
        "POST /v1/groups",
        "POST /v1/groups/default/restart?ranks=1",
    ]


def test_makedip_without_gpus_hints_at_cpu_ranks(shell, script, capsys):
    refusal = {"title": "Unprocessable Content", "detail": "no GPU: libcuda.so.1 is not there"}
    script.answers["POST /v1/groups"] = (422, refusal)
    assert shell.run_cell("%makedip -g all").error_in_exec.status == 422
    text = capsys.readouterr().out
    assert "no GPU: libcuda.so.1" in text and "%makedip -n 2" in text and "magics.py" not in text


def test_makedip_kill_without_a_group_is_no_error(shell, capsys):
    shell.run_line_magic("makedip", "-k")
    assert "there is no group 'default'" in capsys.readouterr().out


def test_name_of_the_only_group_made_here_is_the_default(shell, script):
    script.answers["POST /v1/groups"] = (201, {**GROUP, "name": "mine"})
    shell.run_line_magic("makedip", "-n 2 --name mine")
    ok(shell, "%%dip\nx\n")
    script.answers["POST /v1/groups"] = (201, GROUP)
    shell.run_line_magic("makedip", "-n 2 --name default")
    ok(shell, "%%dip\nx\n")
    assert [message["group"] for message in script.cells] == ["mine", "default"]


def test_push_of_unknown_names(shell):
    shell.user_ns["a"] = 1
    with pytest.raises(DdipError, match="not defined in the notebook: b, c"):
        shell.run_line_magic("dipush", "a b,c")


def test_dipattach_takes_the_newest_cell(shell, script, capsys):
    records = [{"cell": 7, "ranks": {"1": {}, "3": {}}}, {"cell": 2, "ranks": {"0": {}}}]
    script.answers["GET /v1/groups/default/cells"] = (200, {"cells": records})
    ok(shell, "%dipattach")
    assert script.cells[0].items() >= {"op": "cell_events", "cell": 7, "after": 0}.items()
    assert "replayed" in capsys.readouterr().out


def test_detach(shell, script, capsys):
    script.answers["POST /v1/groups/default/cells"] = (202, {"cell": 9, "position": 0})
    ok(shell, "%%dip --detach\nx\n")
    assert "`%dipattach 9`" in capsys.readouterr().out and not script.cells


def test_interrupt_stops_the_cell_and_shows_its_end(shell, script, capsys, monkeypatch):
    path = "POST /v1/groups/default/interrupt"
    script.answers |= {path: (200, {"cell": 7}), "GET /v1/groups/default": (200, GROUP)}
    script.answers["GET /v1/groups/default/cells/7"] = (200, {"cell": 7, "state": "running"})
    real, times = magics.Renderer.follow, []

    def follow(self, cell):
        times.append(1)
        if len(times) == 1:
            raise KeyboardInterrupt
        real(self, cell)

    monkeypatch.setattr(magics.Renderer, "follow", follow)
    error = shell.run_cell("%%dip\nprint(1)\n").error_in_exec
    assert isinstance(error, KeyboardInterrupt) and dict(script.bodies)[path] == {"cell": 7}
    assert "print(1)" in capsys.readouterr().out


def test_second_interrupt_leaves_the_cell(shell, script, capsys, monkeypatch):
    def follow(self, cell):
        raise KeyboardInterrupt

    script.answers["GET /v1/groups/default"] = (200, GROUP)
    script.answers["GET /v1/groups/default/cells/7"] = (200, {"cell": 7, "state": "running"})
    script.answers["POST /v1/groups/default/interrupt"] = (200, {"cell": 7})
    monkeypatch.setattr(magics.Renderer, "follow", follow)
    assert isinstance(shell.run_cell("%%dip\nx\n").error_in_exec, KeyboardInterrupt)
    assert "cell 7 is still going on; `%dipattach 7` shows it" in capsys.readouterr().out


def test_interrupt_of_a_start_says_what_goes_on(shell, script, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    script.answers["GET /v1/groups/train"] = (404, {"status": 404, "detail": "there is none"})
    monkeypatch.setattr(magics.Client, "create_group", interrupted)
    error = shell.run_cell("%makedip -n 2 --name train").error_in_exec
    assert isinstance(error, KeyboardInterrupt)
    shown = capsys.readouterr().out
    assert "group 'train' goes on starting" in shown and "`%makedip -k --name train`" in shown


def test_loading_twice_and_unloading(shell, script):
    ok(shell, "%load_ext ddip")
    ok(shell, "%autodip on")
    ok(shell, "x")
    assert codes(script) == ["x"]
    magics.unload(shell)
    ok(shell, "x = 5")
    assert len(script.cells) == 1
    with pytest.raises(UsageError, match="dip"):
        shell.run_cell_magic("dip", "", "x")


def test_help_texts(shell, capsys):
    for name in ("makedip", "dipush", "dipull", "autodip", "dipattach", "dipstack", "dipinfo"):
        assert f"%{name}" in shell.find_line_magic(name).__doc__
    assert "here, then on the ranks" in shell.find_cell_magic("dip").__doc__


def _rank_stack(rank, line, source):
    user = {"cell": 7, "execution_count": 3, "line": line, "function": "f", "source": source}
    frames = [
        {"file": "/lib/torch/x.py", "line": 12, "function": "all_reduce", "cell": None},
        {"file": "Cell In[3]", "line": line, "function": "f", "cell": 7},
        {"file": "Cell In[3]", "line": 20, "function": "<module>", "cell": 7},
        {"file": "/lib/IPython/shell.py", "line": 1, "function": "run_code", "cell": None},
    ]
    thread = {"thread": "0x1", "name": "MainThread", "current": True, "frames": frames}
    where = {"where": f"Cell In[3], line {line}", "user": user}
    text = f"[{rank}] busy, all of it\n  thread MainThread (0x1)\n"
    return {"rank": rank, "pid": 1, "state": "busy", **where, "threads": [thread], "text": text}


def test_dipstack(shell, script, capsys):
    ranks = [
        _rank_stack(r, 5 if r == 1 else 7, "sleep()" if r == 1 else "wait()") for r in (0, 1, 2)
    ]
    gone = {
        "rank": 3,
        "where": "the rank is dead",
        "user": None,
        "threads": [],
        "text": "[3] dead\n",
    }
    summary = [
        {**{key: ranks[0][key] for key in ("where", "user")}, "ranks": [0, 2]},
        {**{key: ranks[1][key] for key in ("where", "user")}, "ranks": [1]},
        {"where": "the rank is dead", "user": None, "ranks": [3]},
    ]
    answer = {"group": "default", "summary": summary, "differ": [1, 3], "ranks": [*ranks, gone]}
    script.answers["GET /v1/groups/default/stacks"] = (200, answer)
    ok(shell, "%dipstack")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "ranks 0, 2: Cell In[3], line 7: wait()",
        "rank 1: Cell In[3], line 5: sleep()   <- differs",
        "rank 3: the rank is dead   <- differs",
    ]
    assert lines[3:8] == [
        "",
        "rank 0, innermost first:",
        "  /lib/torch/x.py, line 12, in all_reduce",
        "  Cell In[3], line 7, in f",
        "  Cell In[3], line 20, in <module>",
    ]
    assert lines[9] == "rank 1, innermost first:" and len(lines) == 13
    ok(shell, "%dipstack --full")
    assert capsys.readouterr().out.count("all of it") == 3
    script.answers["GET /v1/groups/default/stacks?ranks=1"] = (200, {**answer, "differ": []})
    ok(shell, "%dipstack --ranks 1")
    assert "differs" not in capsys.readouterr().out
    script.answers.clear()
    with pytest.raises(DdipError, match="no such group"):
        ok(shell, "%dipstack")
