# SPDX-License-Identifier: Apache-2.0
"""The magics in real kernels, against a real daemon and real ranks."""

import os
import queue
import re
import signal
import stat
import tempfile
import time
from pathlib import Path

import ddip
import kernels
import nbclient.exceptions
import pytest
from conftest import text

RANK = "import os, torch.distributed as dist\nrank = dist.get_rank()"


@pytest.fixture
def made(daemon):
    """Names of groups to delete afterwards."""
    names = []
    yield names
    with ddip.connect(daemon.socket) as client:
        for name in {each["name"] for each in client.groups()} & set(names):
            client.delete_group(name)


@pytest.fixture
def kernel(daemon):
    """(client, manager) of a kernel with the magics loaded, for what must be watched live."""
    env = {**os.environ, "DDIP_RUNTIME_DIR": str(daemon.runtime_dir)}
    manager, client = kernels.start(env)
    client.execute_interactive("%load_ext Ddip", timeout=30)
    yield client, manager
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def follow(client, message_id, seconds):
    """Yields (type, content, seconds since the start) of a request's output, until it is idle."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        try:
            message = client.get_iopub_msg(timeout=0.1)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != message_id:
            continue
        if message["content"].get("execution_state") == "idle":
            return
        yield message["msg_type"], message["content"], time.monotonic() - started
    pytest.fail(f"still busy after {seconds} s")


def test_a_session_from_start_to_end(notebook, made):
    made.append("default")
    cells = [
        "%load_ext Ddip",
        "%makedip -n 2",
        f"%%dip\n{RANK}\nprint('rank', rank)",
        "%%dip --see all\nprint('rank', rank)\nrank",
        "%%dip --ranks 1\nprint('rank', rank)",
        "%%dip everywhere\nx = 5\nprint('x', x)",
        "scale = 3\nhelper = lambda v: v * scale\nclass Thing:\n    size = 7",
        "%dipush scale helper Thing",
        "%%dip --see all\ny = helper(rank) + Thing.size\nprint(y)",
        "%dipull y\nprint('got', y)",
        "%dipull -r 1 y\nprint('got', y)",
        "%dipull -r all y rank\nprint('got', y, rank)",
        "%dipinfo",
        "%dipper ddp\nddp.pull('y', rank=1)",
        "%makedip -n 2",
        "%makedip -i",
        "%makedip -k",
        "%makedip -k",
    ]
    done = notebook(cells)
    shown = [text(cell) for cell in done.cells]
    assert "started a private one" not in shown[1] and "2 CPU ranks, gloo, ready" in shown[1]
    assert shown[2] == "rank 0\n"
    assert sorted(shown[3].splitlines()) == ["[0] 0", "[0] rank 0", "[1] 1", "[1] rank 1"]
    assert shown[4] == "rank 1\n"
    assert shown[5] == "x 5\nx 5\n"
    assert sorted(shown[8].split()) == sorted("[0] 7 [1] 10".split())
    assert (shown[9], shown[10], shown[11]) == ("got 7\n", "got 10\n", "got [7, 10] [0, 1]\n")
    assert "helper" in shown[12] and "ranks 0, 1" in shown[12] or "rank 1" in shown[12]
    assert shown[13] == "10\n"
    assert "was there already" in shown[14] and "rank 1: CPU" in shown[15]
    assert "ended group 'default'" in shown[16] and "there is no group" in shown[17]


def test_autodip(notebook, group):
    use = f"--name {group}"
    done = notebook(
        [
            "%load_ext ddip",
            f"%autodip -a '{use} --see all' on",
            f"{RANK}\nprint('r', rank)",
            "%%dip local\nwhere = 'notebook'\nprint(where)",
            f"%dipush where {use}",
            "print(where)",
            "%autodip",
            "%time here = 1",
            "%autodip off",
            "print('rank' in globals(), here)",
        ]
    )
    shown = [text(cell) for cell in done.cells]
    assert sorted(shown[2].split("\n")) == ["", "[0] r 0", "[1] r 1"]
    assert shown[3] == "notebook\n"
    assert sorted(shown[5].split("\n")) == ["", "[0] notebook", "[1] notebook"]
    assert "on, cells run as" in shown[6] and "off" in shown[8]
    assert shown[9] == "False 1\n"


def test_error_fails_the_cell_and_stops_the_notebook(notebook, group):
    cells = ["%load_ext Ddip", f"%%dip --name {group}\n{RANK}\nprint('before')\n1 / rank", "2"]
    with pytest.raises(nbclient.exceptions.CellExecutionError) as caught:
        notebook(cells)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", str(caught.value))
    assert "--- rank 0 ---" in shown and "ZeroDivisionError" in shown
    assert "magics.py" not in shown and "run_cell_magic" not in shown


def test_equal_errors_of_ranks_are_shown_once(kernel, group):
    client, _ = kernel
    outputs = []
    reply = client.execute_interactive(
        f"%%dip --name {group}\ndef f(): raise KeyError('same')\nf()",
        output_hook=outputs.append,
        timeout=30,
    )
    assert reply["content"]["status"] == "error"
    [error] = [m["content"] for m in outputs if m["msg_type"] == "error"]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))
    assert "--- ranks 0, 1 ---" in shown and shown.count("KeyError: 'same'") == 1


def test_error_of_an_unseen_rank_is_shown_and_the_next_cell_runs(kernel, group):
    client, _ = kernel
    code = f"%%dip --name {group}\n{RANK}\nif rank: raise ValueError('far')"
    started = time.monotonic()
    reply = client.execute_interactive(code, timeout=60, output_hook=lambda message: None)
    assert reply["content"]["status"] == "error" and time.monotonic() - started < 15
    assert "rank 1: ValueError: far" in reply["content"]["evalue"]
    code = f"%%dip --name {group}\ndist.barrier()\nprint(rank)"
    reply = client.execute_interactive(code, timeout=60, output_hook=lambda message: None)
    assert reply["content"]["status"] == "ok"


def test_first_line_shows_before_the_cell_ends(kernel, group):
    client, _ = kernel
    code = f"%%dip --name {group}\nprint('first')\nimport time; time.sleep(2)\nprint('last')"
    times = {}
    for kind, content, at in follow(client, client.execute(code), 30):
        if kind == "stream":
            times[content["text"].strip()] = at
    assert times["first"] < 1 and times["last"] >= 2


def test_interrupt_of_the_kernel_stops_the_ranks(kernel, group):
    client, manager = kernel
    client.execute_interactive(f"%%dip --name {group}\nkept = 1", timeout=30)
    code = f"%%dip --name {group}\nprint('on', flush=True)\nimport time; time.sleep(60)"
    error, stopped = None, None
    for kind, content, at in follow(client, client.execute(code), 30):
        if kind == "stream" and "on" in content["text"] and stopped is None:
            manager.interrupt_kernel()
            stopped = at
        if kind == "error":
            error = (content["ename"], "\n".join(content["traceback"]), at - stopped)
    assert error and error[0] == "DdipInterrupted" and error[2] < 3
    assert "KeyboardInterrupt" in error[1] and "magics.py" not in error[1]
    outputs = []
    reply = client.execute_interactive(
        f"%%dip --name {group}\nprint(kept)", timeout=30, output_hook=outputs.append
    )
    assert reply["content"]["status"] == "ok"
    assert any("1" in m["content"].get("text", "") for m in outputs)


def test_local_values_survive_an_interrupt_of_a_queued_cell(kernel, group, daemon):
    client, manager = kernel
    with ddip.connect(daemon.socket) as other:
        first = other.execute("import time; time.sleep(3); finished = True", group)
        code = f"%%dip --name {group}\nnever = 1"
        for kind, content, _ in follow(client, client.execute(code), 30):
            if kind == "stream" and "queue" in content["text"]:
                manager.interrupt_kernel()
        assert list(first)[-1]["status"] == "ok", "the interrupt hit another client's cell"
        assert other.pull("finished", group) is True


def test_output_survives_the_notebook(notebook, group):
    loop = "import time\nfor i in range(20):\n    print('step', i, flush=True)\n    time.sleep(0.1)"
    first = notebook(["%load_ext Ddip", f"%%dip --detach --name {group}\n{loop}"])
    number = re.search(r"%dipattach (\d+)", text(first.cells[1]))[1]
    second = notebook(["%load_ext Ddip", f"%dipattach {number} --name {group}"])
    assert text(second.cells[1]) == "".join(f"step {i}\n" for i in range(20))
    third = notebook(["%load_ext Ddip", f"%dipattach --name {group} --see all"])
    assert text(third.cells[1]).count("[1] step") == 20


def test_rich_output(notebook, group):
    code = (
        "from IPython.display import HTML, display, clear_output\n"
        "handle = display('one', display_id=True)\nhandle.update('two')\n"
        "display(HTML('<b>bold</b>'))\n40 + 2"
    )
    done = notebook(["%load_ext Ddip", f"%%dip --name {group}\n{code}"])
    data = [output.data for output in done.cells[1].outputs]
    assert data[0]["text/plain"] == "'two'" and data[1]["text/html"] == "<b>bold</b>"
    assert data[2]["text/plain"] == "42" and len(data) == 3


AS_HERE = """
from tqdm import tqdm
for _ in tqdm(range(5), bar_format="{l_bar}{bar}{n}", mininterval=0): pass
---
import pandas
pandas.DataFrame({"a": [1, 2], "b": ["x", "y"]})
---
print("\\x1b[31mred\\x1b[0m plain"); print("over\\rwritten")
---
from IPython.display import clear_output
for i in range(9):
    clear_output(wait=True)
    print("pass", i)
---
from IPython.display import display, update_display
display("one", display_id="it"); print("between"); update_display("two", display_id="it")
---
%matplotlib inline
import matplotlib.pyplot as plt
plt.figure(figsize=(1, 1)).gca().plot([3, 1])
---
import sys
print("out"); print("err", file=sys.stderr); print("out again")
---
from IPython.display import HTML, Markdown
display(HTML("<b>b</b>"), Markdown("*m*"))
""".strip().split("\n---\n")


def test_output_of_a_rank_looks_like_the_notebook_s_own(notebook, group):
    both = [cell for code in AS_HERE for cell in (code, f"%%dip --name {group}\n{code}")]
    cells = notebook(["%load_ext Ddip", *both]).cells[1:]
    for here, there in zip(cells[::2], cells[1::2], strict=True):
        assert seen_of(there) == seen_of(here) != []


def seen_of(cell):
    """What is seen of a cell, whatever pieces a stream came in; of a figure that there is one."""
    seen = []
    for output in cell.outputs:
        if output.output_type != "stream":
            figure = {"image/png": "a figure"} if "image/png" in output.data else {}
            words = {k: re.sub("0x[0-9a-f]+", "0x", v) for k, v in output.data.items()}
            seen.append(figure or words)
        elif seen and output.name in seen[-1]:
            seen[-1] = output.name, seen[-1][1] + output.text
        else:
            seen.append((output.name, output.text))
    return seen


def test_long_output_is_bounded_and_nothing_lost(notebook, group):
    """The magic that the notice names shows what was left out."""
    lines = "".join(f"line {i:05}\n" for i in range(2000))
    loop = "for i in range(2000):\n    print(f'line {i:05}')"
    env = {"DDIP_OUTPUT_LIMIT": "5000"}
    done = notebook(["%load_ext Ddip", f"%%dip --name {group}\n{loop}"], env=env)
    shown, told = text(done.cells[1], "stdout"), text(done.cells[1], "stderr")
    assert len(shown) < 8000 and shown.startswith("line 00000\n") and lines.endswith(shown[-1000:])
    (way,) = set(re.findall("`(%dipattach .*?)`", told))
    again = notebook(["%load_ext Ddip", way], env=env)
    assert text(again.cells[1]) == lines


def test_quiet(kernel, group):
    client, _ = kernel
    code = f"%%dip -q --name {group}\nprint('first')\nimport time; time.sleep(1)\nprint('last')"
    times = [at for kind, _, at in follow(client, client.execute(code), 30) if kind == "stream"]
    assert times and min(times) >= 1


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%dipush nothing_here", "not defined in the notebook: nothing_here"),
        ("%dipull nothing_there", "nothing_there"),
        ("%%dip --name nowhere\n1", "nowhere"),
        ("%dipattach --name nowhere", "nowhere"),
    ],
)
def test_refusals_are_short(kernel, group, cell, words):
    client, _ = kernel
    line, *rest = cell.split("\n")
    named = line if "--name" in line else f"{line} --name {group}"
    reply = client.execute_interactive("\n".join([named, *rest]), timeout=30)["content"]
    assert reply["status"] == "error" and words in reply["evalue"]
    assert len(reply["traceback"]) == 1 and "magics.py" not in reply["traceback"][0]


def test_other_shape_is_refused_and_replaced(notebook, made):
    made.append("shape")
    first = notebook(
        [
            "%load_ext Ddip",
            "%makedip -n 2 --name shape",
            "try:\n    get_ipython().run_line_magic('makedip', '-n 1 --name shape')\n"
            "except Exception as error:\n    print(error)",
            "%makedip -r -n 1 --name shape",
            "%%dip\nimport torch.distributed as dist\nprint(dist.get_world_size())",
        ]
    )
    shown = [text(cell) for cell in first.cells]
    assert "-r to replace it" in shown[2] and "1 CPU ranks" in shown[3] and shown[4] == "1\n"


def test_all_gpus_without_gpus(kernel, daemon):
    with ddip.connect(daemon.socket) as other:
        if other.info()["cuda"]["available"]:
            pytest.skip("needs a machine without GPUs")
    client, _ = kernel
    reply = client.execute_interactive("%makedip -g all --name gpus", timeout=30)["content"]
    assert reply["status"] == "error" and "%makedip -n 2" in reply["evalue"]


def test_private_daemon_is_started(notebook):
    with tempfile.TemporaryDirectory(prefix="ddip") as folder:  # short: a socket's path is bounded
        env = {"DDIP_RUNTIME_DIR": f"{folder}/run", "XDG_STATE_HOME": folder}
        try:
            cells = ["%load_ext Ddip", "%makedip -n 1", "%%dip\nprint('works')", "%makedip -k"]
            done = notebook(cells, env=env)
            assert "started a private one" in text(done.cells[1])
            assert text(done.cells[2]) == "works\n"
            log = Path(folder, "run/ddipd.log")
            assert stat.S_IMODE(log.stat().st_mode) == 0o600
            again = notebook(["%load_ext Ddip", "%makedip -i"], env=env)
            assert "pid" in text(again.cells[1])
        finally:
            pid = Path(folder, "run/ddipd.pid")
            if pid.exists():
                os.kill(int(pid.read_text()), signal.SIGINT)
                deadline = time.monotonic() + 10
                while pid.exists() and time.monotonic() < deadline:
                    time.sleep(0.05)


def test_no_daemon_and_no_binary(notebook, tmp_path):
    env = {"DDIP_RUNTIME_DIR": str(tmp_path), "DDIPD": str(tmp_path / "missing")}
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="set DDIPD"):
        notebook(["%load_ext Ddip", "%makedip -n 2"], env=env)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="no ddipd is running"):
        notebook(["%load_ext Ddip", "%%dip\n1"], env=env)


def test_stacks_in_a_notebook(notebook, group, daemon):
    """%dipstack of a running cell; a cell that was stopped says by itself where ranks waited."""
    daemon.run(group, "import time, torch, torch.distributed as dist")
    wait = "if rank == 1:\n    time.sleep(60)\ndist.all_reduce(torch.ones(2))"
    done = notebook(
        [
            "%load_ext Ddip",
            f"%%dip --detach --name {group}\n{wait}",
            f"import time; time.sleep(.5)\n%dipstack --name {group}",
            f"%dipper c\nc.interrupt({group!r}); c.interrupt({group!r})",
            f"%%dip --name {group} --timeout 1\n{wait}",
        ],
        allow_errors=True,
    )
    shown = text(done.cells[2])
    assert (
        "rank 0: Cell In[" in shown and "line 3: dist.all_reduce(torch.ones(2))   <- dif" in shown
    )
    assert "rank 1: Cell In[" in shown and "line 2: time.sleep(60)   <- differs" in shown
    (failed,) = [o for o in done.cells[4].outputs if o["output_type"] == "error"]
    told = "\n".join(failed["traceback"])
    assert re.search(r"rank 0 was at Cell In\[\d+\], line 3: dist.all_reduce\(torch.ones", told)
    assert re.search(r"rank 1 was at Cell In\[\d+\], line 2: time.sleep\(60\)", told)
