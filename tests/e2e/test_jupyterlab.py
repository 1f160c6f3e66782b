# SPDX-License-Identifier: Apache-2.0
"""JupyterLab and the classic notebook in a real browser: what users see, the buttons they press.

Nothing here waits for a fixed time: each step waits for what it needs to see, up to PATIENCE_S.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from conftest import ROOT, fresh_daemon, wait_until
from playwright.sync_api import sync_playwright

PATIENCE_S = 180  # on a machine that does much else
# what a user has chosen who has said no to news, and who sees all cells at once
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}
# Put into the page before a cell runs: keeps every bar that was ever to be seen below an element.
WATCH = """output => {
    window.bars = [];
    const look = () => {
        const shown = output.innerText.match(/.*[\\d.]+% \\[\\d+\\/\\d+.*/g) || [];
        if (shown.length && JSON.stringify(shown) != JSON.stringify(window.bars.at(-1)))
            window.bars.push(shown);
    };
    new MutationObserver(look).observe(
        output, {subtree: true, childList: true, characterData: true, attributes: true});
}"""


class Lab:
    """A JupyterLab server with folders of its own, and a browser."""

    def __init__(self, playwright, runtime_dir):
        self.folder = Path(tempfile.mkdtemp(prefix="ddip-lab-"))
        self.notebooks = self.folder / "notebooks"
        self.notebooks.mkdir()
        self._token = secrets.token_hex(16)
        for name, settings in SETTINGS.items():
            file = self.folder / f"settings/@jupyterlab/{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(settings))
        # everything but this machine is unreachable, whatever JupyterLab would like to load
        options = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        options += ["--no-sandbox"] if os.getuid() == 0 else []
        chromium = shutil.which("chromium")
        assert chromium, "no chromium: `make deps` installs it"
        self._browser = playwright.chromium.launch(executable_path=chromium, args=options)
        self._server = self._start({"DDIP_RUNTIME_DIR": str(runtime_dir), **environment()})

    def _start(self, more):
        env = {**os.environ, **more, "HOME": str(self.folder), "JUPYTER_TOKEN": self._token}
        for kind in ("config", "data", "runtime"):
            env[f"JUPYTER_{kind.upper()}_DIR"] = str(self.folder / kind)
        env["JUPYTERLAB_SETTINGS_DIR"] = str(self.folder / "settings")
        options = ["--no-browser", "--allow-root", "--ServerApp.port=0", "--ServerApp.ip=127.0.0.1"]
        options += [f"--ServerApp.root_dir={self.notebooks}", "--ServerApp.terminals_enabled=False"]
        options += ["--LabApp.extension_manager=readonly"]
        options += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
        with open(self.folder / "log", "w") as log:
            command = [sys.executable, "-m", "jupyterlab", *options]
            return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    def _url(self):
        """Where the server listens; its file is there, and half written, before it does."""
        urls = []

        def listens():
            assert self._server.poll() is None, (self.folder / "log").read_text()
            for file in (self.folder / "runtime").glob("jpserver-*.json"):
                with contextlib.suppress(ValueError), socket.socket() as probe:
                    server = json.loads(file.read_text())
                    if probe.connect_ex(("127.0.0.1", server["port"])) == 0:
                        urls.append(server["url"])
            return urls

        wait_until(listens, PATIENCE_S)
        return urls[0]

    def open(self, notebook, name):
        """A page with that notebook, its kernel ready."""
        # a workspace of its own: JupyterLab would open what the page before had open, in front
        page = self._open(notebook, name, "lab/workspaces/{0}/tree/{0}.ipynb")
        page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
        return page

    def open_classic(self, notebook, name):
        """The same in the classic notebook."""
        page = self._open(notebook, name, "notebooks/{0}.ipynb")
        page.locator("#kernel_indicator_icon.kernel_idle_icon").wait_for()
        return page

    def _open(self, notebook, name, path):
        nbformat.write(notebook, self.notebooks / f"{name}.ipynb")
        page = self._browser.new_page(viewport={"width": 1080, "height": 1560})
        page.set_default_timeout(PATIENCE_S * 1000)
        page.goto(f"{self._url()}{path.format(name)}?token={self._token}")
        return page

    def close(self):
        self._browser.close()
        below = psutil.Process(self._server.pid).children(recursive=True)
        self._server.terminate()
        self._server.wait(PATIENCE_S)
        for process in psutil.wait_procs(below, 10)[1]:
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def environment():
    """Of kernels and ranks: torchvision loads, and each has one thread."""
    return {"PYTHONPATH": str(ROOT / "tests/fakes/torchvision_ops"), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def lab_daemon(build):
    with fresh_daemon(build, env=environment()) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def lab(lab_daemon):
    with sync_playwright() as playwright:
        lab = Lab(playwright, lab_daemon.runtime_dir)
        yield lab
        lab.close()


def cell_with(page, words):
    return page.locator(".jp-CodeCell").filter(
        has=page.locator(".jp-InputArea-editor", has_text=words)
    )


def output(cell):
    return cell.locator(".jp-OutputArea-output").all_inner_texts()


def ended(cell):
    """Waits until a cell has a number."""
    cell.locator(".jp-InputPrompt", has_text=re.compile(r"\[\d+\]:")).wait_for()


def choose(page, menu, item):
    page.locator(".lm-MenuBar-itemLabel").get_by_text(menu, exact=True).click()
    page.locator(".lm-Menu-itemLabel").get_by_text(item, exact=True).click()


def screenshot(page, build, name, where=".jp-Notebook"):
    """Of the notebook without what is around it. DDIP_SCREENSHOTS: another folder."""
    folder = Path(os.environ.get("DDIP_SCREENSHOTS") or build / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    page.locator(where).screenshot(path=folder / f"{name}.png")


@pytest.mark.timeout(600)
def test_training(lab, build):
    """The vision lesson from its first cell to its last: one bar that moves, and one table."""
    page = lab.open(nbformat.read(ROOT / "docs/notebooks/vision-ddip.ipynb", 4), "vision")
    training = cell_with(page, "fit_one_cycle(4")
    training.locator(".jp-Cell-outputWrapper").evaluate(WATCH)
    choose(page, "Run", "Run All Cells")
    training.locator(".jp-OutputArea-output", has_text=re.compile(r"^1\s+\d\.", re.M)).wait_for()
    screenshot(page, build, "jupyterlab-training")
    ended(cell_with(page, "%makedip -k"))
    screenshot(page, build, "jupyterlab-trained")
    bars = page.evaluate("window.bars")
    assert len(bars) > 5 and all(len(shown) == 1 and len(shown[0]) < 80 for shown in bars)
    [shown] = output(training)
    assert shown.count("train_loss") == 1
    assert re.findall(r"^(\d)\s+[\d.]+\s+[\d.]+\s+[\d.]+\s+\d\d:\d\d", shown, re.M) == list("0123")
    assert re.search(r"accuracy 0\.[89]", "".join(output(cell_with(page, "learn.validate"))))
    assert page.locator(".jp-OutputArea-output img").count() == 2
    kinds = page.locator(".jp-OutputArea-output").evaluate_all(
        "all => all.map(e => e.dataset.mimeType)"
    )
    assert set(kinds) == {"application/vnd.jupyter.stdout", "image/png", "text/plain"}, kinds
    page.close()


def new_notebook(*cells):
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


BAR = """from tqdm import tqdm
import time
for _ in tqdm(range(20), ncols=60, mininterval=0): time.sleep(0.02)"""
RENDERED = {
    "%load_ext ddip": None,
    "%makedip -n 2 --name NAME": None,
    f"%%dip\n{BAR}": lambda shown: ended_bars(shown) == [""],
    f"%%dip --see all\n{BAR}": lambda shown: ended_bars(shown) == ["[0] ", "[1] "],
    "%%dip\nprint('\\x1b[31mred\\x1b[0m plain')": lambda shown: (
        shown.locator(".ansi-red-fg, .ansi-red-intense-fg").inner_text() == "red"
    ),
    "%%dip\nimport pandas\npandas.DataFrame({'name': ['a', 'b'], 'value': [1, 2]})": lambda shown: (
        shown.locator("table td").all_inner_texts() == ["a", "1", "b", "2"]
    ),
    "%%dip\nimport matplotlib.pyplot as plt\nplt.figure(figsize=(2, 1)).gca().plot([3, 1]);": (
        lambda shown: shown.locator("img").count() == 1
    ),
    "%%dip\nfrom IPython.display import clear_output\nfor i in range(9):\n"
    "    clear_output(wait=True)\n    print('pass', i)": lambda shown: (
        shown.inner_text().strip() == "pass 8"
    ),
    "%%dip\ndisplay('one', display_id='it'); print('middle')\n"
    "from IPython.display import update_display; update_display('two', display_id='it')": (
        lambda shown: shown.inner_text().split() == ["'two'", "middle"]
    ),
    "%%dip --see all\nif rank: raise ValueError('of one rank')": lambda shown: (
        "rank 1" in shown.inner_text() and "ValueError: of one rank" in shown.inner_text()
    ),
}


def ended_bars(shown):
    """What stands before each bar that is to be seen; all are at their end, on a line each."""
    lines = [line for line in shown.inner_text().splitlines() if "%" in line]
    assert all("100%" in line and "20/20" in line for line in lines), lines
    return [line.partition("100%")[0] for line in lines]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("front", ["lab", "classic"])
def test_rendering(lab, build, front):
    """What ranks show looks as it would from the notebook's own kernel."""
    cells = [code.replace("NAME", front) for code in RENDERED]
    if front == "lab":
        page = lab.open(new_notebook(*cells), front)
        choose(page, "Run", "Run All Cells")
        shown = page.locator(".jp-Notebook .jp-Cell-outputArea")
        failed = page.locator(".jp-OutputArea-output", has_text="of one rank")
    else:
        page = lab.open_classic(new_notebook(*cells), front)
        page.get_by_role("link", name="Cell", exact=True).click()
        page.locator("#run_all_cells").click()
        shown = page.locator(".code_cell .output_wrapper")
        failed = page.locator(".output_error, .output_stderr, .output", has_text="of one rank")
    failed.first.wait_for()
    where = ".jp-Notebook" if front == "lab" else "#notebook-container"
    screenshot(page, build, f"rendering-{front}", where)
    for i, (code, is_right) in enumerate(RENDERED.items()):
        assert is_right is None or is_right(shown.nth(i)), (code, shown.nth(i).inner_text())
    page.close()


@pytest.fixture(scope="module")
def page(lab, lab_daemon):
    """A notebook with the magics loaded, and a group for it."""
    lab_daemon.create()
    page = lab.open(new_notebook("%load_ext ddip"), "page")
    choose(page, "Run", "Run All Cells")
    ended(cell_with(page, "%load_ext"))
    return page


def run(page, code):
    """Types a new cell below the others, as a user does, and runs it."""
    cells = page.locator(".jp-CodeCell")
    count = cells.count()
    cells.last.locator(".jp-InputPrompt").click()
    page.keyboard.press("b")
    cells.nth(count).locator(".cm-content").click()
    page.keyboard.insert_text(code)
    page.keyboard.press("Control+Enter")
    return cells.nth(count)


@pytest.mark.timeout(600)
def test_stop_button(page, lab_daemon):
    """It interrupts the ranks; the cell ends at once, and what they know stays."""
    sleep = "kept = rank + 5\nprint('on', rank)\nimport time; time.sleep(600)"
    cell = run(page, f"%%dip --see all\n{sleep}")
    for rank in (0, 1):
        cell.get_by_text(f"[{rank}] on {rank}").wait_for()
    page.locator("[data-command='notebook:interrupt-kernel']").first.click()
    clicked = time.monotonic()
    ended(cell)
    assert time.monotonic() - clicked < 20
    shown = "".join(output(cell))
    assert "KeyboardInterrupt" in shown and "magics.py" not in shown
    record = lab_daemon.request("GET", "/v1/groups/default/cells").json["cells"][-1]
    assert record["status"] == "interrupted"
    assert {rank["status"] for rank in record["ranks"].values()} == {"interrupted"}
    after = run(page, "%%dip --see all\nprint('kept', kept)")
    ended(after)
    assert sorted("".join(output(after)).split("\n")) == ["", "[0] kept 5", "[1] kept 6"]


@pytest.mark.timeout(600)
def test_reload_in_mid_cell(page, lab, tmp_path):
    """What a page that was loaded again has missed, %dipattach shows, with all that was before."""
    go = tmp_path / "go"
    loop = f"""%%dip --see all
import os, time
for part in (1, 2):
    for step in range(5):
        print("part", part, "step", step)
    while not os.path.exists({str(go)!r}):
        time.sleep(0.05)
print("the end")"""
    cell = run(page, loop)
    for rank in (0, 1):
        cell.get_by_text(f"[{rank}] part 1 step 4").wait_for()
    choose(page, "File", "Save Notebook")
    saved = lab.notebooks / "page.ipynb"
    wait_until(lambda: "part 1 step 4" in saved.read_text(), PATIENCE_S)
    page.reload()
    cell.get_by_text("[1] part 1 step 4").wait_for()  # from the file
    go.touch()
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    attached = run(page, "%dipattach --see all")
    ended(attached)
    wanted = [f"part {part} step {step}" for part in (1, 2) for step in range(5)] + ["the end"]
    shown = "".join(output(attached)).splitlines()
    for rank in (0, 1):
        assert [line[4:] for line in shown if line.startswith(f"[{rank}] ")] == wanted
    assert len(shown) == 2 * len(wanted)
