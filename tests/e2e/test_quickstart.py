# SPDX-License-Identifier: Apache-2.0
"""The quickstart notebook: the demo that shows it, and its training compared with torchrun's."""

import os
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests"))

import quickstart  # noqa: E402


def processes_with(mark):
    """(pid, name) of each living process that has the mark in its environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder.name, (folder / "comm").read_text()))
        except OSError:  # it has ended, or is someone else's
            pass
    return found


def test_the_notebook_is_stored_clean():
    notebook = nbformat.read(quickstart.NOTEBOOK, 4)
    nbformat.validate(notebook)
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert not cell.metadata and re.fullmatch(r"[a-z-]+", cell["id"])


@pytest.mark.timeout(600)
def test_demo(build, tmp_path):
    mark = f"DDIP_TEST_MARK={secrets.token_hex(8)}"
    env = {**os.environ, "DDIP_TEST_MARK": mark.partition("=")[2]}
    demo = [sys.executable, ROOT / "tests/demo.py", "--build", build, "--out", tmp_path]
    done = subprocess.run(demo, env=env, capture_output=True, text=True)
    shown = done.stdout
    assert done.returncode == 0, shown + done.stderr
    assert float(re.search(r"accuracy on held-out digits: +([\d.]+)", shown)[1]) >= 0.95
    assert "7200 + 7200 = 10 epochs of 1440\n" in shown
    assert re.search("weights equal on all ranks: +yes\n", shown)
    assert re.search("same loss curve by curl: +yes\n", shown)
    assert (
        str(tmp_path / "quickstart.ipynb") in shown and str(tmp_path / "quickstart.html") in shown
    )

    executed = nbformat.read(tmp_path / "quickstart.ipynb", 4)
    nbformat.validate(executed)
    page = (tmp_path / "quickstart.html").read_text()
    assert page.count('src="data:image/png;base64,') == 2
    for epoch in range(1, 11):
        assert re.search(rf"epoch {epoch:2}: loss [\d.]+, [\d.]+ s\n", page)
    assert not re.search(r"""(src|href|import)\W*["'(]*https?://""", page)  # read without a network

    folder = Path(re.search(r"its socket is (\S+)/run/ddipd.sock", shown)[1])
    assert folder.name.startswith("ddip-") and not folder.exists()
    deadline = time.monotonic() + 5  # a killed kernel's threads may take a moment
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_demo_says_what_is_missing(build, tmp_path):
    demo = [sys.executable, ROOT / "tests/demo.py", "--out", tmp_path / "out", "--build"]
    env = {**os.environ, "PATH": str(tmp_path)}
    without_curl = subprocess.run([*demo, build], env=env, capture_output=True, text=True)
    assert without_curl.returncode == 1 and "curl is missing" in without_curl.stderr
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    not_built = subprocess.run([*demo, tmp_path], capture_output=True, text=True)
    assert not_built.returncode == 1 and "run `make`" in not_built.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def raced(daemon):
    """Results of the training by torchrun and by ddipd, round by round."""
    daemon.create(name="raced")
    yield quickstart.race(lambda code: daemon.run("raced", code), rounds=7)
    daemon.delete("raced")


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_training_is_torchrun_s_training(raced):
    """The same losses to the last bit: the same code, seeds, shares of the data, one thread per
    rank, and a sum over two ranks, which does not depend on their order."""
    expected, losses = (side[-1]["losses"] for side in raced)
    assert losses == expected
    assert len(losses) == 16 and losses[-1] < 0.1 < losses[0]


@pytest.mark.alone
@pytest.mark.timeout(600)
def test_training_is_as_fast_as_torchrun_s(raced):
    """A loose bound, for noisy machines; tests/bench/bench_training.py measures it precisely."""
    by_torchrun, by_ddipd = (statistics.median(each["speed"] for each in side) for side in raced)
    bound = 0.1 if "DDIP_WORKER_PRELOAD" in os.environ else 0.8  # sanitizers slow our ranks alone
    assert by_ddipd / by_torchrun > bound, (by_torchrun, by_ddipd)
