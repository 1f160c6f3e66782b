# SPDX-License-Identifier: Apache-2.0
"""The lesson notebooks: each as it is for one process, and with five lines of magics on two ranks.

Both run in real kernels, the second against a real daemon. Seeds are stated in the notebooks
(set_seed(42)). Those of fastai 1 run in an environment of its own: `make check-fastai-v1`.
"""

import pytest
from conftest import fresh_daemon
from lessons import ENVIRONMENT, Lesson, check_versions

# per lesson: the metric to compare, by how much it may differ, what both must reach. It may differ
# by the larger spread over seeds in docs/apps.md; where the steps are those of one process, with
# the same items in the same order, by what rounding may do
METRICS = {
    "tabular": ("accuracy", 0.053, lambda x: x > 0.85),
    "vision": ("accuracy", 0.056, lambda x: x > 0.85),
    "collab": ("mae", 0.05, lambda x: x < 3.5),
    "text": ("accuracy", 0.02, lambda x: x > 0.4),
    "sgd": ("accuracy", 0.02, lambda x: x > 0.85),
    "unet": ("dice", 0.02, lambda x: x > 0.9),
}
SPLIT = ("collab", "text", "sgd", "unet")  # share each batch out: the steps of one process
COUNT = """
class Seen(Callback):
    "What this process has trained on in the last epoch."
    def before_train(self): self.items, self.steps = 0, 0
    def after_batch(self):
        if self.training:
            self.items += find_bs(self.yb)
            self.steps += 1

defaults.callbacks.append(Seen)
"""
REPORT = """
import json
print("\\nREPORT " + json.dumps(dict(
    items=learn.seen.items, steps=learn.seen.steps, model=type(learn.model).__name__,
    weights=[round(t.double().sum().item(), 9) for t in learn.model.state_dict().values()],
    splits=[len(dl.dataset) for dl in learn.dls.loaders])))
"""


# the loops by hand of the lesson sgd: the rows that the model is given to learn from
BY_HAND = {
    "data": """
given = []
def note(module, args, result):
    if torch.is_grad_enabled() and type(module).__name__ == "Digits":
        given.append([(x_train == row).all(1).nonzero()[0].item() for row in args[0]])
torch.nn.modules.module.register_module_forward_hook(note)
""",
    "metrics-by-hand": """
import json
print("\\nREPORT " + json.dumps(dict(
    given=given, weights=[p.double().sum().item() for p in model.parameters()])))
""",
}


@pytest.mark.parametrize("lesson", [*METRICS, "v1-tabular", "v1-vision", "v1-text"])
def test_versions_differ_by_five_magics(lesson):
    check_versions(lesson)


@pytest.fixture(scope="module")
def lessons_daemon(build):
    with fresh_daemon(build, env=ENVIRONMENT) as daemon:
        yield daemon


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", METRICS)
def test_lesson(name, lessons_daemon, tmp_path):
    probes = BY_HAND if name == "sgd" else {}
    lesson = Lesson(name, tmp_path, COUNT, REPORT, [ENVIRONMENT] * 2, lessons_daemon, probes)
    lesson.check_shared(name in SPLIT)
    lesson.check_table()
    lesson.check_metric(*METRICS[name])
    if probes:
        check_loops_by_hand(lesson)
    assert not lessons_daemon.request("GET", "/v1/groups").json["groups"]


def check_loops_by_hand(lesson):
    """Each step's batch is shared out, every item is read once, and what is learnt is the same."""
    alone, [first, second] = lesson.reports("metrics-by-hand")
    assert first["weights"] == second["weights"] == pytest.approx(alone["weights"], abs=1e-2)
    halves = list(zip(first["given"], second["given"], strict=True))
    assert [a + b for a, b in halves] == alone["given"]
    assert all(len(a) == len(b) for a, b in halves)
    texts = (lesson.plain["metrics-by-hand"], lesson.ddip["metrics-by-hand"])
    here, there = (float(text.split()[-1]) for text in texts)
    assert here > 0.9 and here == pytest.approx(there, abs=0.02)
