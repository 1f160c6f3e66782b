# SPDX-License-Identifier: Apache-2.0
"""The lesson notebooks for fastai 1, each for one process and with five magics on two ranks.

Both run in real kernels. The kernel without ranks has the app's shims, as docs/apps.md says; the
ranks have what their app does for them.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from conftest import ROOT, build, fresh_daemon  # noqa: E402, F401
from lessons import Lesson, check_versions  # noqa: E402

STAND_IN = ROOT / "tests/fakes/torchvision_ops"
SHIMS = ROOT / "daemon/worker/ddip_worker/apps/fastai_v1/shims.py"
# per lesson: the metric to compare, by how much it may differ, what both must reach
METRICS = {
    "v1-tabular": ("accuracy", 0.06, lambda x: x > 0.85),
    "v1-vision": ("accuracy", 0.08, lambda x: x > 0.85),
    "v1-text": ("accuracy", 0.15, lambda x: x > 0.5),
}
COUNT = """
class Seen(Callback):
    "What this process has trained on in the last epoch."
    def on_epoch_begin(self, **kwargs): self.items, self.steps = 0, 0
    def on_batch_end(self, train, last_target, **kwargs):
        if train:
            self.items += len(last_target)
            self.steps += 1

seen = Seen()
defaults.extra_callback_fns = [lambda learn: seen]
"""
REPORT = """
print("\\nREPORT " + json.dumps(dict(
    items=seen.items, steps=seen.steps, model=type(learn.model).__name__,
    weights=[round(t.double().sum().item(), 9) for t in learn.model.state_dict().values()],
    splits=[len(each) for each in (learn.data.train_ds, learn.data.valid_ds)])))
"""


def environments_in(folder):
    """Of the kernel without ranks, which gets the shims from folder, and of the other and of the
    ranks."""
    both = {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    paths = [str(STAND_IN / "sitecustomize.py"), str(SHIMS)]
    (folder / "sitecustomize.py").write_text(
        f"import runpy\nfor path in {paths}:\n    runpy.run_path(path)\n"
    )
    return {**both, "PYTHONPATH": str(folder)}, {**both, "PYTHONPATH": str(STAND_IN)}


@pytest.fixture(scope="module")
def environments(tmp_path_factory):
    return environments_in(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def daemon(build, environments):  # noqa: F811
    with fresh_daemon(build, env=environments[1]) as daemon:
        yield daemon


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", METRICS)
def test_lesson(name, daemon, environments, tmp_path):
    check_versions(name)
    lesson = Lesson(name, tmp_path, COUNT, REPORT, environments, daemon)
    lesson.check_shared(split=name == "v1-text")
    lesson.check_table()
    lesson.check_metric(*METRICS[name])
    assert not daemon.request("GET", "/v1/groups").json["groups"]
