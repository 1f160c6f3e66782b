# SPDX-License-Identifier: Apache-2.0
"""Runs a lesson notebook as it is for one process, and with magics on two ranks, and compares."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import kernels
import nbformat
from conftest import ROOT

FOLDER = ROOT / "docs/notebooks"
# of kernels and ranks: torchvision loads, and each has one thread
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "tests/fakes/torchvision_ops"),
    "OMP_NUM_THREADS": "1",
    "MPLBACKEND": "agg",
}


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", 4)


def source_lines(notebook):
    return [line for cell in notebook.cells for line in cell.source.splitlines()]


def check_versions(lesson):
    """They differ by five lines of magics, and say where their data comes from."""
    plain, ddip = read(f"{lesson}-plain"), read(f"{lesson}-ddip")
    ids = {cell.id for cell in plain.cells}
    added = [cell for cell in ddip.cells if cell.id not in ids]
    lines = [line for cell in added for line in cell.source.splitlines()]
    assert len(lines) <= 5 and all(line.startswith("%") for line in lines)
    assert [cell for cell in ddip.cells if cell.id in ids] == plain.cells
    assert not any(line.startswith("%") for line in source_lines(plain))
    for notebook in (plain, ddip):
        nbformat.validate(notebook)
        assert not any(
            cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells
        )
        assert "nothing is" in notebook.cells[0].source.lower()  # downloaded: it says so
        assert not re.search(
            "https?://|untar_data|pretrained=True", "\n".join(source_lines(notebook))
        )


def run(notebook, folder, env):
    """Executes it in a kernel of its own; returns its text by cell id."""
    from nbclient import NotebookClient

    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook,
        timeout=200,
        kernel_name="python3",
        kernel_manager_class=kernels.UnixKernelManager,
        resources=resources,
    )
    client.execute(env={**os.environ, **env})
    return {
        cell.id: "".join(o.get("text", "") for o in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def metric(text, name):
    return float(re.search(rf"{name} ([\d.]+)", text["metrics"])[1])


class Lesson:
    """Both versions, run side by side: neither uses both cores all the time.

    count is put in after the imports of either version, and report before its end: it prints
    REPORT and the JSON of items, steps, model, weights, splits. probes: code after other cells, by
    their ids; what is after "metrics-by-hand" reports, too.
    """

    def __init__(self, name, folder, count, report, environment, daemon, probes=None):
        self.name, self.probes = name, {"imports": count, "metrics": report, **(probes or {})}
        env = {**environment[1], "DDIP_RUNTIME_DIR": str(daemon.runtime_dir)}
        folders = [folder / "plain", folder / "ddip"]
        for each in folders:
            each.mkdir()
        with ThreadPoolExecutor(2) as both:
            runs = (
                both.submit(self._run, "plain", "", folders[0], environment[0]),
                both.submit(self._run, "ddip", "%%dip --see all\n", folders[1], env),
            )
        self.plain, self.ddip = (each.result() for each in runs)

    def _run(self, version, prefix, folder, env):
        notebook = read(f"{self.name}-{version}")
        for after, code in self.probes.items():
            at = next(i for i, cell in enumerate(notebook.cells) if cell.id == after)
            code = prefix + code if after.startswith("metrics") else code
            notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(code, id=f"after-{after}"))
        return run(notebook, folder, env)

    def reports(self, after="metrics"):
        """What was reported in one process, and by rank."""
        plain, ddip = (_reports(text[f"after-{after}"]) for text in (self.plain, self.ddip))
        return plain[0], ddip

    def check_shared(self, split=False):
        """Two ranks trained one model, each on its share of the items; split: of each batch."""
        alone, [first, second] = self.reports()
        assert first["weights"] == second["weights"] and first["model"] == alone["model"]
        assert first["splits"] == second["splits"] == alone["splits"]
        # the ranks share the items of an epoch, but for a batch that is left over
        batch = alone["items"] / alone["steps"]
        assert first["items"] == second["items"] and first["steps"] == second["steps"]
        assert abs(first["items"] + second["items"] - alone["items"]) <= 2 * batch
        if split:
            assert first["steps"] == alone["steps"]
        else:
            assert abs(2 * first["steps"] - alone["steps"]) <= 2

    def check_table(self):
        """There is one, from rank 0, with a row for each epoch."""
        source = "\n".join(source_lines(read(f"{self.name}-plain")))
        [epochs] = re.findall(r"fit_one_cycle\((\d+)", source)
        table = self.ddip["train"].replace("\r", "\n")
        assert table.count("train_loss") == 1
        assert len(re.findall(r"^\d+ +\d+\.\d+ +\d+\.\d+ ", table, re.M)) == int(epochs)

    def check_metric(self, name, tolerance, good):
        here, there = metric(self.plain, name), metric(self.ddip, name)
        print(f"{self.name}: {name} {here:.4f} in one process, {there:.4f} on two ranks")
        assert good(here) and good(there) and abs(here - there) <= tolerance


def _reports(text):
    """By rank."""
    found = re.findall(r"^(\[\d\] )?REPORT (.*)$", text, re.M)
    return [json.loads(report) for _, report in sorted(found)]
