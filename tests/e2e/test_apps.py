# SPDX-License-Identifier: Apache-2.0
"""Apps: third-party modules loaded by their path, Ddip's shape, and what goes wrong with them."""

import json
import secrets
import sys

import pytest
from conftest import printed

# every hook, in a package that nobody installed: it lies in the group's working folder
THIRD_PARTY = """
import os, torch.distributed as dist

from ddip_example.words import GREETING

seen = []

def initializer():
    dist.barrier()
    seen.append(f"initializer {dist.get_rank()} of {dist.get_world_size()}")

def rejoined(generation):
    dist.barrier()
    seen.append(f"rejoined {generation}")

def before_cell(ranks):
    seen.append(f"before {ranks}")

def after_cell(ranks, status):
    seen.append(f"after {ranks} {status}")

def greet(name, times=1):
    return " ".join([GREETING, name] * times)

def fail():
    raise LookupError("the command failed")

def set_verbose(level):
    seen.append(f"verbose {level}")

def finalizer():
    open(f"ended.{os.environ['RANK']}", "w").close()
"""
# as Ddip's fastai_v1.py: names and a way of working of 2020
OF_DDIP = """
import os
from types import SimpleNamespace

Config = SimpleNamespace(Verbose=False, calls=[])
imports = ["import math, textwrap", f"from {__name__} import initializer, finalizer, set_verbose",
           f"from {__name__} import Config as ddip_config"]

def set_verbose(verbose: bool = True):
    Config.Verbose = verbose

def silence():
    Config.calls.append("silence")

def initializer():
    Config.calls.append("initializer")
    return f"[Process {os.getpid()}] initialized"

def finalizer():
    open("finalized." + os.environ["RANK"], "w").close()
"""


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "ddip_example"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "words.py").write_text("GREETING = 'hello'\n")
    (package / "app.py").write_text(THIRD_PARTY)
    (package / "of_ddip.py").write_text(OF_DDIP)
    return tmp_path


@pytest.fixture
def make(daemon, folder):
    """make(app, ranks=2): the name of a group with that app, in the folder."""
    names = []

    def make(app, ranks=2):
        names.append(f"a{secrets.token_hex(4)}")
        daemon.create(ranks, name=names[-1], cwd=str(folder), app=app)
        return names[-1]

    yield make
    for name in names:
        daemon.request("DELETE", f"/v1/groups/{name}", timeout=30)


def execute(daemon, group, code, **more):
    body = {"code": code, **more}
    return daemon.request("POST", f"/v1/groups/{group}/cells", body).events


def errors(events):
    return [e for e in events if e["type"] == "error"]


def test_hooks_of_an_app(daemon, make, folder):
    group = make("ddip_example.app")
    code = "from ddip_example.app import seen; import json; print(json.dumps(seen)); seen.clear()"
    for rank in (0, 1):
        shown = json.loads(printed(execute(daemon, group, code, ranks=[rank]), rank))
        assert shown == [f"initializer {rank} of 2", f"before [{rank}]"]
    execute(daemon, group, "1 / 0")
    shown = json.loads(printed(execute(daemon, group, code)))
    assert shown == ["after [0] ok", "before [0, 1]", "after [0, 1] error", "before [0, 1]"]

    daemon.request("POST", f"/v1/groups/{group}/restart?ranks=1", timeout=60)
    events = execute(daemon, group, code)
    assert json.loads(printed(events, 0)) == ["after [0, 1] ok", "rejoined 2", "before [0, 1]"]
    assert json.loads(printed(events, 1)) == ["initializer 1 of 2", "before [0, 1]"]

    daemon.delete(group)
    assert {p.name for p in folder.glob("ended.*")} == {"ended.0", "ended.1"}


def test_initializer_and_rejoined_may_use_collectives_together(daemon, make):
    """One rank starts afresh while the other comes back: both hooks run in the same order of
    joining, so that a barrier in each of them matches."""
    group = make("ddip_example.app", 3)
    for _ in range(3):
        reply = daemon.request("POST", f"/v1/groups/{group}/restart?ranks=0,2", timeout=60)
        assert reply.json["state"] == "ready"


def test_commands(daemon, make):
    group = make("ddip_example.app")
    events = execute(daemon, group, "print('then the code')", app_command="greet 'you two' times=2")
    assert printed(events, 1) == "hello you two hello you two\nthen the code\n"
    events = execute(daemon, group, "print('not run')", app_command="fail")
    assert [e["ename"] for e in errors(events)] == ["LookupError"] * 2 and not printed(events)
    assert events[-1]["status"] == "error"
    [first, _] = errors(execute(daemon, group, "", app_command="before_cell [0]"))
    assert "no command 'before_cell'; it has fail, greet, set_verbose" in first["evalue"]


def test_app_command_of_a_group_without_an_app(daemon, group):
    events = execute(daemon, group, "print('not run')", app_command="greet")
    assert "the app torch has no command 'greet'" in errors(events)[0]["evalue"]
    events = execute(daemon, group, "print('run')", app_command="set_verbose True")
    assert printed(events) == "run\n"  # %makedip -v says it to whatever app there is


def test_shape_of_ddip(daemon, make, folder):
    group = make("ddip_example.of_ddip")
    code = "print(math.pi > 3, textwrap.__name__, ddip_config)"
    events = execute(daemon, group, code, app_command="silence")
    want = "True textwrap namespace(Verbose=False, calls=['initializer', 'silence'])\n"
    assert printed(events, 0) == printed(events, 1) == want
    execute(daemon, group, "", app_command="set_verbose True")
    assert "Verbose=True" in printed(execute(daemon, group, "print(ddip_config)"))
    daemon.delete(group)
    assert {p.name for p in folder.glob("finalized.*")} == {"finalized.0", "finalized.1"}


BROKEN = {
    "raises": ("1 / 0", ["app raises", "ZeroDivisionError"]),
    "exits": ("import sys; sys.exit(3)", ["app exits", "SystemExit"]),
    "lacks": ("import no_such_library.part\nimports = []", ["no_such_library", "pip install"]),
    "needs": (
        "requires = {'no_such_library': 'its-package>=2'}",
        ["its-package>=2", "pip install 'its-package>=2'", sys.executable],
    ),
    "no_hooks": ("x = 1", ["is no app", "initializer"]),
    "late": ("def initializer(): raise OSError('no disk')", ["failed to start", "no disk"]),
    "bad_import": ("imports = ['import no_such_thing']", ["failed to start", "no_such_thing"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_app_that_will_not_do(daemon, folder, name):
    text, words = BROKEN[name]
    (folder / f"{name}.py").write_text(text)
    check_refused(daemon, folder, name, words)


def test_unknown_apps(daemon, folder):
    check_refused(
        daemon,
        folder,
        "nonsense",
        ["no app nonsense", "torch, fastai_v1, fastai_v2, fastai, accelerate", sys.executable],
    )
    check_refused(daemon, folder, "ddip_example.gone", ["no app ddip_example.gone"])


def test_fastai_v1_where_it_is_not(daemon, folder):
    """The tests' own environment has fastai 2; then one that has fastai 1, but newer setuptools."""
    install = f"{sys.executable} -m pip install"
    words = ["fastai_v1 needs fastai==1.0.61", "No module named", f"{install} fastai==1.0.61"]
    check_refused(daemon, folder, "fastai_v1", words)
    (folder / "fastai").mkdir()
    for name in ("__init__", "version"):
        (folder / "fastai" / f"{name}.py").write_text("")
    check_refused(daemon, folder, "fastai_v1", ["pkg_resources", f"{install} 'setuptools<81'"])


def check_refused(daemon, folder, app, words):
    before = set(daemon.processes())
    body = {"name": "refused", "ranks": 2, "cwd": str(folder), "app": app}
    reply = daemon.request("POST", "/v1/groups", body, timeout=30)
    assert reply.status == 422 and reply.headers["content-type"] == "application/problem+json"
    said = f"{reply.json['detail']} {reply.json.get('hint', '')}"
    assert not [word for word in words if word not in said], said
    assert daemon.request("GET", "/v1/groups/refused").status == 404
    assert set(daemon.processes()) <= before | template_of(daemon)


def template_of(daemon):
    """Templates stay: they are there for the next group."""
    return {p for p in daemon.processes() if p.ppid() == daemon.pid and not p.children()}


@pytest.mark.parametrize("app", ["", "a b", "a.", ".a", "a..b", "1a", "a.1", "a/b", "ü", "a" * 201])
def test_names_that_no_module_has(daemon, app):
    reply = daemon.request("POST", "/v1/groups", {"ranks": 1, "name": "refused", "app": app})
    assert reply.status == 422 and '"app" must name an app or a module' in reply.json["detail"]


def test_longest_name(daemon, folder):
    name = "a" * 200
    (folder / f"{name}.py").write_text("imports = []")
    daemon.create(1, name="longest", cwd=str(folder), app=name)
    daemon.delete("longest")


COLLECTIVES = [
    "dist.all_reduce(torch.ones(1))",
    "dist.barrier()",
    "dist.broadcast_object_list([1], src=0)",
    "dist.all_gather_object([None, None], 1)",
    "dist.new_group([0])",
    "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))",
    "ddp(torch.ones(1, 1))",
]


@pytest.mark.parametrize("code", COLLECTIVES)
def test_collective_on_some_ranks_is_an_error(daemon, subset_group, code):
    events = execute(daemon, subset_group, code, ranks=[1], timeout_s=20)
    [error] = errors(events)
    assert error["ename"] == "RuntimeError" and error["rank"] == 1
    assert "would wait for ranks [0], but this cell runs on [1] only" in error["evalue"]


def test_group_of_the_ranks_of_a_cell(daemon, make):
    group = make("torch", 3)
    code = """
import torch, torch.distributed as dist
pair = dist.new_group([0, 2], use_local_synchronization=True)
x = torch.ones(1)
dist.all_reduce(x, group=pair)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1), process_group=pair)
ddp(torch.ones(1, 1)).sum().backward()
print(x.item())
if rank == 0: dist.send(x, 2)
else: dist.recv(x, 0)
"""
    events = execute(daemon, group, code, ranks=[0, 2], timeout_s=60)
    assert not errors(events) and printed(events, 2) == "2.0\n"


FIRST = """
import time
from ddip_worker.apps.first import rank0_first
def work(what):
    if rank == 0: time.sleep(0.2)
    order.append((time.monotonic(), rank))
    if what == "fail": raise OSError("no network")
    return what
order = []
"""


def test_rank_0_goes_first(daemon, group):
    execute(daemon, group, FIRST)
    events = execute(daemon, group, "print(rank0_first(work, 'a'), rank0_first(work, what='b'))")
    assert printed(events, 0) == printed(events, 1) == "a b\n"
    orders = [printed(execute(daemon, group, "print(order)", ranks=[r]), r) for r in (0, 1)]
    first, second = (sorted(eval(order)) for order in orders)
    assert first[0] < second[0] and first[1] < second[1]
    # nobody waits for ranks that the cell does not run on
    events = execute(daemon, group, "print(rank0_first(work, 'alone'))", ranks=[1], timeout_s=20)
    assert printed(events, 1) == "alone\n"


def test_what_rank_0_raised_is_raised_on_all(daemon, group):
    execute(daemon, group, FIRST)
    shown = errors(execute(daemon, group, "rank0_first(work, 'fail')", timeout_s=20))
    assert {(e["rank"], e["ename"]) for e in shown} == {(0, "OSError"), (1, "RuntimeError")}
    assert all("no network" in e["evalue"] for e in shown)
    events = execute(daemon, group, "print(rank0_first(work, 'again'))")
    assert printed(events, 1) == "again\n"


def test_waiting_for_rank_0_can_be_interrupted(daemon, group):
    execute(daemon, group, FIRST)
    events = execute(daemon, group, "if rank: rank0_first(work, 'never')", timeout_s=0.5)
    assert events[-1]["ranks"] == {"0": "ok", "1": "interrupted"}


@pytest.fixture(scope="module")
def subset_group(daemon):
    name = f"a{secrets.token_hex(4)}"
    daemon.create(name=name)
    code = "import torch, torch.distributed as dist\n"
    code += "ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))"
    daemon.run(name, code)
    yield name
    daemon.request("DELETE", f"/v1/groups/{name}", timeout=30)


def test_magics(notebook, folder, monkeypatch):
    monkeypatch.chdir(folder)
    cells = [
        "%load_ext Ddip",
        "%makedip -n 2 -a ddip_example.of_ddip",
        "%%dip --see all -a silence\nprint(ddip_config)",
        "%autodip on -a '--see all --appcmd \"silence\"'",
        "print(len(ddip_config.calls))",
        "%autodip off",
        "%makedip -v on",
        "%%dip\nprint(ddip_config.Verbose)",
        "%makedip -n 2 -a ddip_example.of_ddip",
        "%makedip -n 2 -a torch",
    ]
    node = notebook(cells, allow_errors=True)
    text = ["".join(o.get("text", "") for o in cell.outputs) for cell in node.cells]
    assert "ddip_example.of_ddip, ready" in text[1]
    assert text[2].count("calls=['initializer', 'silence']") == 2
    assert sorted(text[4].splitlines()) == ["[0] 3", "[1] 3"]
    assert "running on all ranks" in text[7]
    assert "\nTrue\n" in text[7] and "attached" in text[8]
    assert "is there already" in str(node.cells[9].outputs)
