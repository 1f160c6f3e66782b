#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows what ddipd does: `make demo`.

Runs the quickstart notebook in a real kernel against a ddipd of its own, then the same training by
curl. Exits with 1 unless the network is good, equal on all ranks, and trained on every sample.
"""

import argparse
import asyncio
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jinja2
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/e2e"))

import quickstart  # noqa: E402
from conftest import Daemon  # noqa: E402
from kernels import UnixKernelManager  # noqa: E402

GOOD_ENOUGH = 0.95
# nbconvert's page without the scripts that it would fetch: the notebook has neither formulas nor
# diagrams, and its figures are in the page
PAGE = """{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}{%- endblock -%}
{%- block html_head_js_mermaidjs -%}{%- endblock -%}
"""


def stop_on_sigterm():
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def say(text="", indent=0):
    for line in text.splitlines() or [""]:
        print(f"{' ' * indent}{line}".rstrip(), flush=True)


class Watched(NotebookClient):
    """Prints each cell when it starts, and its output as it comes."""

    def __init__(self, *args, **options):
        hooks = {"on_notebook_start": self._begins, "on_cell_start": self._starts}
        super().__init__(*args, **hooks, **options)
        self._rest = ""  # of a line that has not ended yet
        self._stopped = False

    def run(self, env):
        """Runs the notebook; a signal then ends it as KeyboardInterrupt."""
        try:
            self.execute(env=env)
        except (DeadKernelError, asyncio.CancelledError):
            if self._stopped:
                raise KeyboardInterrupt from None
            raise
        finally:
            stop_on_sigterm()  # nbclient has taken the handlers away

    def _begins(self, notebook):
        """Takes the signals from nbclient, whose handler and cleanup get into each other's way."""
        task = asyncio.current_task()

        def stop():
            self._stopped = True
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)

    def _starts(self, cell, cell_index):
        if self._rest:
            say(self._rest, indent=6)
        self._rest = ""
        first, *more = cell.source.splitlines()
        if cell.cell_type == "code":
            say(f"{first} ..." if more else first, indent=2)
        elif first.startswith("#"):
            say(f"\n{first.lstrip('# ')}")

    def process_message(self, msg, cell, cell_index):
        kind, content = msg["msg_type"], msg["content"]
        if kind == "stream":
            *lines, self._rest = (self._rest + content["text"]).split("\n")
            for line in lines:
                say(line, indent=6)
        elif "image/png" in content.get("data", ()):
            say("(a figure)", indent=6)
        return super().process_message(msg, cell, cell_index)


def run_notebook(daemon, out):
    """The executed notebook, which lies in `out` as .ipynb and as .html then."""
    notebook = nbformat.read(quickstart.NOTEBOOK, 4)
    client = Watched(
        notebook,
        kernel_name="python3",
        kernel_manager_class=UnixKernelManager,
        timeout=120,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(daemon.folder)}},
    )
    env = {
        **os.environ,
        "DDIP_RUNTIME_DIR": str(daemon.runtime_dir),
        "IPYTHONDIR": str(daemon.folder / "ipython"),  # nobody's startup files, nobody's history
    }
    try:
        client.run(env)
    finally:
        nbformat.write(notebook, out / "quickstart.ipynb")
        (out / "quickstart.html").write_text(page(notebook))
    return notebook


def page(notebook):
    logging.getLogger("traitlets").setLevel(logging.ERROR)  # it asks for alternative texts
    loader = jinja2.DictLoader({"page.html.j2": PAGE})
    exporter = HTMLExporter(extra_loaders=[loader], template_file="page.html.j2")
    return exporter.from_notebook_node(notebook, {"metadata": {"name": "ddipd quickstart"}})[0]


def curl(*words):
    """Shows a curl command, runs it, and shows its lines as they come; returns them."""
    command = ["curl", "-sSN", *words]
    say("$ " + " ".join(w if re.fullmatch(r"[-\w./:@]+", w) else f"'{w}'" for w in command), 2)
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            say(line if len(line) < 100 else f"{line[:97]}...", indent=6)
    if process.returncode:
        raise RuntimeError(f"curl exited with status {process.returncode}")
    return "\n".join(lines)


def run_by_curl(daemon, out):
    """What the training prints when curl sends it, each line with its rank in front."""
    script = out / "train.py"
    script.write_text(quickstart.training())
    to = ["--unix-socket", daemon.socket]
    curl(*to, "-d", '{"name": "by-curl", "ranks": 2}', "http://localhost/v1/groups")
    plain = ["-H", "Content-Type: text/x-python", "-H", "Accept: text/plain"]
    cells = "http://localhost/v1/groups/by-curl/cells"
    printed = curl(*to, *plain, "--data-binary", f"@{os.path.relpath(script)}", cells)
    curl(*to, "-X", "DELETE", "http://localhost/v1/groups/by-curl")
    return printed


def text_of(notebook, cell_id):
    [cell] = [c for c in notebook.cells if c["id"] == cell_id]
    return "".join(output.get("text", "") for output in cell.outputs)


def losses_in(text):
    return re.findall(r"epoch +\d+: loss ([\d.]+)", text)


def results(notebook, by_curl):
    """Prints what came out; returns what is wrong with it."""
    accuracy = float(re.search(r"[\d.]+$", text_of(notebook, "accuracy").strip())[0])
    samples = [int(n) for n in re.findall(r"trained on (\d+)", text_of(notebook, "samples"))]
    each = int(re.match(r"\d+", text_of(notebook, "data"))[0])
    losses = losses_in(text_of(notebook, "train"))
    equal = text_of(notebook, "weights-equal").endswith("yes\n")
    same = losses_in("\n".join(re.findall(r"^\[0\] (.*)", by_curl, re.M))) == losses

    added = " + ".join(map(str, samples))
    say("\nResults")
    say(f"accuracy on held-out digits:  {accuracy:.3f}", 2)
    say(f"samples per rank:             {added} = {len(losses)} epochs of {each}", 2)
    say(f"weights equal on all ranks:   {'yes' if equal else 'no'}", 2)
    say(f"same loss curve by curl:      {'yes' if same else 'no'}", 2)
    wrong = {
        f"the accuracy is below {GOOD_ENOUGH}": accuracy < GOOD_ENOUGH,
        f"{added} is not {len(losses)} times {each}": sum(samples) != len(losses) * each,
        "the ranks have different weights": not equal,
        "curl trained another network": not same,
    }
    return [what for what, is_so in wrong.items() if is_so]


def demo(build, out):
    """Runs everything; returns what went wrong."""
    # not in `out`: a Unix socket's path has room for 107 characters
    daemon = Daemon(build, tempfile.mkdtemp(prefix="ddip-"))
    try:
        daemon.start()
        say(f"ddipd runs (pid {daemon.pid}); its socket is {daemon.socket}")
        say(f"\nPart 1: {quickstart.NOTEBOOK.relative_to(ROOT)} in a Jupyter kernel")
        notebook = run_notebook(daemon, out)
        say("\nPart 2: the same training by curl")
        wrong = results(notebook, run_by_curl(daemon, out))
    except (CellExecutionError, TimeoutError, RuntimeError, AssertionError) as error:
        wrong = [str(error)]
    except KeyboardInterrupt:
        wrong = ["interrupted"]
    finally:
        code = daemon.stop()
        log = daemon.log.read_text()
        shutil.rmtree(daemon.folder, ignore_errors=True)
    if code:
        wrong.append(f"ddipd exited with status {code}; its log:\n{log}")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=Path("build"), help="where ddipd is")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="where results go")
    options = parser.parse_args()
    if not shutil.which("curl"):
        sys.exit("demo: curl is missing; install it (apt-get install curl)")
    if not (options.build / "ddipd").exists():
        sys.exit(f"demo: there is no {options.build}/ddipd; run `make`")
    stop_on_sigterm()
    pages = [options.out / "quickstart.ipynb", options.out / "quickstart.html"]
    options.out.mkdir(parents=True, exist_ok=True)
    for old in pages:
        old.unlink(missing_ok=True)
    started = time.monotonic()
    wrong = demo(options.build.resolve(), options.out.resolve())
    for path in pages:
        if path.exists():
            what = "as a web page:" if path.suffix == ".html" else "notebook with its output:"
            say(f"{what:29} {path}", 2)
    say(f"took {time.monotonic() - started:.0f} s", 2)
    for what in wrong:
        say(f"demo: FAILED: {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
