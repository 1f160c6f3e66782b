# SPDX-License-Identifier: Apache-2.0
"""The app fastai_v2: cells that were written for one process, on two ranks.

The data is scikit-learn's breast cancer table, 569 rows: seconds to train, and nothing to download.
"""

import os
import secrets
import subprocess
import sys
import time

import psutil
import pytest
from runner import Runner, downloads, errors, text

pytestmark = pytest.mark.timeout(240)

SETUP = """
from fastai.tabular.all import *
from fastai.callback.tracker import *
from sklearn.datasets import load_breast_cancer

df = load_breast_cancer(as_frame=True).frame
names = list(df.columns[:10])
df["target"] = df.target.map({0: "bad", 1: "good"})

def make(bs=32, rows=df, valid=None, **options):
    dls = TabularDataLoaders.from_df(rows, y_names="target", cont_names=names, procs=[Normalize],
                                     valid_idx=valid, bs=bs, **options)
    return tabular_learner(dls, metrics=accuracy, layers=[20, 10])

class Count(Callback):
    order = 100
    items = batches = 0
    def after_batch(self):
        if self.training:
            self.items += len(self.yb[0])
            self.batches += 1

class Do(Callback):
    "Calls do(learn) after each training batch."
    order = 100
    def __init__(self, do): self.do = do
    def after_batch(self):
        if self.training: self.do(self.learn)

def weights(learn):
    model = learn.model
    return [round(t.double().sum().item(), 12) for t in [*model.parameters(), *model.buffers()]]

def show(*values):
    "One line of JSON."
    print("\\n" + json.dumps(values, default=str))
"""
# one line per rank: what it printed with show()
CHECK_WHOLE = """
kinds = {type(dl).__name__ for dl in learn.dls.loaders}
show(type(learn.model).__name__, sorted(kinds))
"""


@pytest.fixture(scope="module")
def fastai(daemon, tmp_path_factory):
    """run(code, ranks=None, ...): the events of a cell, in a group that has run SETUP."""
    name = f"f{secrets.token_hex(4)}"
    daemon.create(name=name, app="fastai_v2", cwd=str(tmp_path_factory.mktemp("fastai")), grace_s=1)
    run = Runner(daemon, name)
    run.ok(SETUP)
    yield run
    daemon.delete(name)


def check_whole(run):
    """The Learner is as it was before fit, the same on all ranks, and trains on."""
    assert run.same(CHECK_WHOLE) == ["TabularModel", ["TabWeightedDL"]]
    run.ok("learn.fit(1)")
    run.same("show(weights(learn))")
    assert run.same(CHECK_WHOLE)[0] == "TabularModel"


# --- training -------------------------------------------------------------------------------------


def test_plain_cells_train_on_all_ranks(fastai):
    events = fastai.ok("set_seed(1); learn = make()\nlearn.fit_one_cycle(3, 1e-2, cbs=Count())")
    table = text(events, 0)
    assert table.count("train_loss") == 1 and "100.00%" in table
    assert [
        line.split()[0] for line in table.splitlines() if "00:0" in line and "Epoch" not in line
    ]
    assert "train_loss" not in text(events, 1) and "%" not in text(events, 1)
    # 456 training items: 228 each, in 7 whole batches of 32
    events = fastai.ok(
        "c = Count(); learn.fit(1, cbs=c); show(c.items, c.batches, len(learn.dls.train_ds))"
    )
    assert [text(events, r).splitlines()[-1] for r in (0, 1)] == ["[224, 7, 456]"] * 2
    fastai.same("show(weights(learn))")
    loss, accuracy = fastai.same("show(*learn.validate())")
    assert accuracy > 0.9 and loss < 0.4
    check_whole(fastai)


def test_each_item_is_seen_once(fastai):
    """Indices of the items as they are read, with a batch size that leaves none over."""
    code = """
class Rows(Callback):
    rows = []
    def before_batch(self):
        if self.training: self.rows += self.xb[0][:, 0].tolist()
items = [(tensor([float(i)]), tensor([0.])) for i in range(320)]
dls = DataLoaders.from_dsets(items, items[:10], bs=32, shuffle=True, device="cpu")
seen = Rows()
Learner(dls, nn.Linear(1, 1), nn.MSELoss(), lr=1e-9).fit(1, cbs=seen)
show(seen.rows)
"""
    first, second = (set(rows) for [rows] in fastai.values(code))
    assert len(first) == len(second) == 160 and not first & second
    assert first | second == set(range(320))


def test_metrics_are_those_of_all_items(fastai):
    """The table's numbers are those of validate(), which reads all items on each rank."""
    code = """
set_seed(3); learn = make(valid=list(range(449, 569)))
learn.metrics = [accuracy, RocAucBinary(), Precision(pos_label=1)]; learn.fit(1, 1e-2)
show(list(learn.recorder.values[-1])[1:], list(learn.validate()))
"""
    recorded, validated = fastai.same(code)
    assert recorded == pytest.approx(validated, abs=1e-6)
    # 61 items for two ranks: one is read twice, and does not count twice
    counted = "[AccumMetric(lambda p, t: float(len(t)), dim_argmax=-1), RocAucBinary()]"
    code = code.replace("569", "510").replace(
        "[accuracy, RocAucBinary(), Precision(pos_label=1)]", counted
    )
    recorded, validated = fastai.same(code)
    assert recorded[1:] == pytest.approx(validated[1:], abs=1e-6) and recorded[1] == 61


def test_split_batches_take_the_steps_of_one_process(fastai):
    """The losses of each step, the metric, and the place of each item: as on one rank alone."""
    code = """
set_seed(8); x = torch.randn(541, 4); items = list(zip(x, (x.sum(1) > 0).long()))
dls = DataLoaders.from_dsets(items[:480], items[480:], bs=32, shuffle=True)  # 61 to validate
model = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 2))
learn = Learner(dls, model, CrossEntropyLossFlat(), metrics=[accuracy, RocAucBinary()])
count = Count(); fetch = FetchPredsCallback(); learn.fit(2, 1e-2, cbs=[count, fetch])
show(count.batches, learn.recorder.losses, list(learn.recorder.values[-1])[::3],
     fetch.preds[0].tolist(), count.items)
"""
    code = code.replace("learn.recorder.losses", "[float(loss) for loss in learn.recorder.losses]")
    [alone] = fastai.values(code, ranks=[0])
    try:
        together = fastai.same(code, app_command="ddp split_batches=True")
    finally:
        fastai.ok("", app_command="ddp split_batches=False")
    assert together[0] == alone[0] == 30 and alone[4] == 2 * together[4] == 960
    for ours, want in zip(together[1:3], alone[1:3], strict=True):
        assert ours == pytest.approx(want, abs=1e-5)
    assert len(alone[3]) == len(together[3]) == 61
    for ours, want in zip(together[3], alone[3], strict=True):
        assert ours == pytest.approx(want, abs=1e-4)


def test_metrics_that_add_up_by_themselves(fastai):
    """Dice and its kind know nothing of ranks: their sums are those of all items all the same."""
    code = """
set_seed(9); x, y = torch.rand(40, 3, 4, 4), torch.randint(0, 3, (40, 4, 4))
dls = DataLoaders.from_dsets([*zip(x, y)], [*zip(x[:20], y[:20])], bs=5, device="cpu")
model = nn.Conv2d(3, 3, 1)
metrics = [DiceMulti(), JaccardCoeffMulti(), CorpusBLEUMetric(axis=1)]
learn = Learner(dls, model, CrossEntropyLossFlat(axis=1), lr=0.1, metrics=metrics)
def flat(learn):
    pred, y = learn.pred.flatten(2), learn.y.flatten(1)
    return SimpleNamespace(training=learn.training, pred=pred, y=y)
metrics[2].accumulate = lambda learn: CorpusBLEUMetric.accumulate(metrics[2], flat(learn))
learn.fit(1); show(list(learn.recorder.values[-1])[2:], list(learn.validate())[1:])
"""
    recorded, validated = fastai.same(code)
    assert recorded == pytest.approx(validated, abs=1e-6) and min(recorded) > 0


def test_lr_find(fastai):
    code = """
set_seed(2); learn = make(); learn.fit(1); before = weights(learn)
found = learn.lr_find(show_plot=False)
show(found, len(learn.recorder.lrs), weights(learn) == before)
"""
    found, steps, unchanged = fastai.same(code)
    assert unchanged and 50 < steps <= 100 and 1e-5 < found[0] < 1
    check_whole(fastai)


def test_fine_tune_and_inference(fastai):
    code = """
set_seed(4); learn = make(); learn.fine_tune(2, 1e-2); learn.show_results()
preds, targets = learn.get_preds(); train, _ = learn.get_preds(ds_idx=0)
row, label, probabilities = learn.predict(df.iloc[0])
right = (preds.argmax(1) == targets.flatten()).float().mean().item()
probabilities = probabilities.tolist()
show(right, len(preds), len(train), label.item(), probabilities, weights(learn), *learn.validate())
"""
    right, count, of_training, _, _, _, _, accuracy = fastai.same(code)
    assert (count, of_training) == (113, 456) and right == pytest.approx(accuracy) and right > 0.8


def test_predictions_in_the_middle_of_fit(fastai):
    code = """
learn = make(); fetch = FetchPredsCallback(); learn.fit(1, cbs=fetch)
preds, targets = fetch.preds
want, _ = learn.get_preds()
show(len(preds), torch.allclose(preds, want, atol=1e-5))
"""
    assert fastai.same(code) == [113, True]


def test_torch_data_loaders(fastai):
    code = """
from torch.utils.data import DataLoader as TorchDL, TensorDataset
set_seed(5); x = torch.randn(200, 4); data = TensorDataset(x, x.sum(1, keepdim=True))
dls = DataLoaders(TorchDL(data, batch_size=10, shuffle=True), TorchDL(data, batch_size=10))
learn = Learner(dls, nn.Linear(4, 1), loss_func=nn.MSELoss(), lr=0.2)
count = Count(); learn.fit(3, cbs=count)
show(weights(learn), count.items, list(learn.recorder.values[-1]))
"""
    _, items, losses = fastai.same(code)
    assert items == 300 and losses[-1] < 0.1


def test_mixed_precision_and_accumulation(fastai):
    """fastai's callback runs, but it means GPUs, where this is unproven: on a CPU it casts nothing.
    So one that casts, in bfloat16, is here, too."""
    code = """
class Cast(Callback):
    order = MixedPrecision.order
    def before_batch(self):
        self.cast = torch.autocast("cpu", torch.bfloat16)
        self.cast.__enter__()
    def after_pred(self):
        self.kind = str(self.pred.dtype)
        self.learn.pred = to_float(self.pred)
    def after_loss(self): self.cast.__exit__(None, None, None)
set_seed(10); learn = make().to_bf16(); learn.fit(1); learn.to_fp32()
learn.fit(1, 1e-2, cbs=(c := Cast())); show(c.kind, learn.recorder.values[-1][2], weights(learn))
"""
    kind, accuracy, _ = fastai.same(code)
    assert kind == "torch.bfloat16" and accuracy > 0.7
    fastai.ok("learn = make().to_fp16(); learn.fit(1)\nlearn.to_fp32()")
    fastai.ok("learn.fit(1, cbs=[GradientAccumulation(64), GradientClip(1.0)])")
    check_whole(fastai)


def test_options_of_ddp(fastai):
    """A model with a part that is not used: DDP must be told."""
    code = """
learn = make(); learn.model.unused = nn.Linear(1, 1)
learn.create_opt(); learn.fit(1); show(weights(learn)[:-2])
"""
    found = errors(fastai(code))
    assert "find_unused_parameters=True" in found[0]["evalue"] + found[1]["evalue"]
    fastai.same(code, app_command="ddp find_unused_parameters=True")
    fastai.ok("learn = make()", app_command="ddp find_unused_parameters=False")
    check_whole(fastai)


def test_a_batch_too_large_for_a_share(fastai):
    found = errors(fastai("learn = make(bs=300); learn.fit(1)"))
    assert set(found) == {0, 1} and "smaller batch size" in found[1]["evalue"]


# --- what one rank decides ------------------------------------------------------------------------


def test_early_stopping_on_what_differs_between_ranks(fastai):
    code = """
learn = make(); learn.metrics = AvgMetric(lambda p, t: tensor(0.)), 
class Own(Metric):
    n = 0
    def accumulate(self, learn): pass
    def reset(self): self.n += 1
    value = property(lambda self: float(self.n if rank else -self.n))
    name = "own"
learn.metrics = Own()
learn.fit(6, cbs=[EarlyStoppingCallback("own", patience=2), SaveModelCallback("own")])
show(learn.epoch, weights(learn))
"""
    assert fastai.same(code)[0] == 2
    check_whole(fastai)


def test_loss_that_is_nan_on_one_rank(fastai):
    code = """
learn = make()
class Spoil(Callback):
    order = -20
    def after_loss(self):
        if self.training and rank == 1 and self.train_iter == 3: self.learn.loss *= float("nan")
learn.fit(2, cbs=[Spoil(), TerminateOnNaNCallback()]); show(learn.train_iter)
"""
    assert fastai.same(code) in ([3], [4])
    check_whole(fastai)


# --- when it goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["rank == 1", "rank == 0", "True"])
def test_exception_inside_fit(fastai, ranks):
    code = f"""
def fail(learn):
    if learn.train_iter == 3 and ({ranks}): raise LookupError("in the middle")
learn = make(); learn.fit(2, cbs=Do(fail))
"""
    events = fastai(code)
    assert "LookupError" in {e["ename"] for e in errors(events).values()}
    assert events[-1]["status"] == "error"
    check_whole(fastai)


def test_interrupted_fit(fastai):
    fastai.ok("learn = make(); learn.fit(1)")
    for seconds in (1.0, 1.3):
        events = fastai("learn.fit(500)", timeout_s=seconds)
        assert events[-1]["status"] == "interrupted"
        check_whole(fastai)  # and Adam's moments are the same again, else weights would part


def test_exception_is_caught_in_the_same_cell(fastai):
    code = """
def fail(learn): raise LookupError("in the middle")
learn = make()
try: learn.fit(1, cbs=Do(fail))
except LookupError: learn.fit(1)
show(weights(learn))
"""
    fastai.same(code)


# --- data that is not the same --------------------------------------------------------------------


def test_random_numbers_are_the_same_outside_of_fit(fastai):
    draw = "import random\nsplit = RandomSplitter()(df)[0][:5]\n"
    draw += "show(random.random(), np.random.rand(), torch.rand(1).item(), split)"
    first = fastai.same(draw)
    fastai.ok("learn = make(); learn.fit(1)")
    fastai.ok("torch.rand(7); random.random(); np.random.rand(3)", ranks=[1])
    assert fastai.same(draw) != first
    fastai.ok("random.seed(rank)")
    first, second = fastai.values("show(random.random())")
    assert first != second
    fastai.ok("set_seed(9)")
    assert fastai.same(draw) == fastai.same("set_seed(9)\n" + draw)


DIFFERENT = {
    "number of training items": "learn = make(rows=df.iloc[: 500 + rank], valid=list(range(400)))",
    "validation items": "n = [*range(569)]; learn = make(valid=n[400:500] if rank else n[:100])",
    "training batch size": "learn = make(bs=16 + rank)",
    "model": "learn = make(); learn.model.layers[0][0] = nn.Linear(10, 20 + rank)",
    "vocabulary": """
rows = df.copy()
rows.loc[3, "target"] = "only-there" if rank else "bad"
learn = make(rows=rows, valid=list(range(100, 200)))
""",
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_would_train_different_things(fastai, what):
    events = fastai("set_seed(1)\n" + DIFFERENT[what] + "\nlearn.fit(1)")
    found = errors(events)
    assert set(found) == {0, 1} and found[0]["evalue"] == found[1]["evalue"]
    assert found[0]["ename"] == "RanksDiffer" and f"  {what}: " in found[0]["evalue"]
    if what == "vocabulary":
        assert "only rank 1 has only-there" in found[0]["evalue"]


# --- cells of some ranks --------------------------------------------------------------------------


def test_one_rank_trains_alone(fastai):
    fastai.ok("set_seed(6); learn = make(); learn.fit(1)")
    code = "count = Count(); learn.fit(1, cbs=count); show(count.items)"
    [[items]] = fastai.values(code, ranks=[1])
    assert items == 448  # 14 batches: the whole set
    events = fastai.ok("learn.fit(1); learn.save('alone'); learn.load('alone')", ranks=[1])
    assert "train_loss" in text(events, 1)
    first, second = fastai.values("show(weights(learn))")
    assert first != second
    check_whole(fastai)


def test_some_ranks_of_three(daemon, tmp_path):
    daemon.create(3, name="three", app="fastai", cwd=str(tmp_path))
    run = Runner(daemon, "three")
    run.ok(SETUP + "\nlearn = make()")
    found = errors(run("learn.fit(1)", ranks=[0, 2], timeout_s=20))
    assert set(found) == {0, 2} and "fit trains on all ranks together" in found[2]["evalue"]
    run.ok("learn.get_preds(); learn.predict(df.iloc[0])", ranks=[0, 2], timeout_s=20)
    run.ok("learn.fit(1)")
    run.same("show(weights(learn))")
    daemon.delete("three")


# --- Learners of other origin, files --------------------------------------------------------------


def test_save_load_export(fastai):
    code = """
set_seed(7); learn = make(); learn.fit(1, 1e-2); learn.save("one"); before = weights(learn)
learn.fit(1); learn.load("one"); again = weights(learn) == before
learn.export("one.pkl"); other = load_learner("one.pkl")
ours, others = (each.predict(df.iloc[0])[2].tolist() for each in (learn, other))
show(again, ours == others, os.getcwd())
"""
    again, same, folder = fastai.same(code)
    assert again and same
    # the file needs nothing of ddip
    code = "from fastai.tabular.all import *; print(load_learner('one.pkl').cbs)"
    env = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
    # and what comes from a file, or was made without callbacks, trains like any other
    fastai.ok("dls = learn.dls; learn = other; learn.dls = dls; learn.fit(1)")
    assert fastai.same(CHECK_WHOLE)[0] == "TabularModel"
    fastai.same("show(weights(learn))")
    cbs = "[TrainEvalCallback(), Recorder()]"
    fastai.ok(
        f"learn = TabularLearner(dls, learn.model, default_cbs=False, cbs={cbs}); learn.fit(1)"
    )
    fastai.same("show(weights(learn))")


def test_a_learner_made_in_the_notebook(fastai):
    import ddip

    code = "from fastai.tabular.all import *\nfrom sklearn.datasets import load_breast_cancer\n"
    code += SETUP[SETUP.index("df =") : SETUP.index("class Count")] + "learn = make()"
    namespace = {"__name__": "__main__"}
    exec(code, namespace)
    with ddip.connect(fastai.daemon.socket) as client:
        client.push({"learn": namespace["learn"]}, fastai.group)
    check_whole(fastai)


# --- processes and downloads ----------------------------------------------------------------------


def test_workers_of_data_loaders(fastai, daemon):
    def children():
        group = daemon.request("GET", f"/v1/groups/{fastai.group}").json
        ranks = [psutil.Process(rank["pid"]) for rank in group["ranks"]]
        found = [child for rank in ranks for child in rank.children(recursive=True)]
        return [child for child in found if child.status() != psutil.STATUS_ZOMBIE]

    code = "dls = make().dls; data = dls.train.new(dls.train.dataset, num_workers=2)\n"
    code += "learn = tabular_learner(DataLoaders(data, dls.valid.new(num_workers=2)), layers=[4])\n"
    fastai.ok(code + "count = Count(); learn.fit(2, cbs=count)")
    assert children() == []
    fail = "def fail(learn):\n    if learn.train_iter == 3: raise LookupError('now')\n"
    assert errors(fastai(fail + "learn.fit(1, cbs=Do(fail))"))
    fastai.ok("learn.fit(1)")
    events = fastai("learn.fit(500)", timeout_s=2)
    assert events[-1]["status"] in ("interrupted", "error")  # its workers are interrupted, too
    fastai.ok("learn.fit(1)")
    fastai.same("show(weights(learn))")
    deadline = time.monotonic() + 10
    while children() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children() == []


def test_downloads_happen_once(fastai, tmp_path):
    with downloads(tmp_path) as (url, asked):
        code = f"path = untar_data('{url}/data.tgz', base='{tmp_path}/home', %s); show(path.ls())"
        [files] = fastai.same(code % "")
        assert "labels.csv" in str(files) and asked == ["/data.tgz"]
        fastai.same(code % "force_download=True")
        assert asked == ["/data.tgz"] * 2
        found = errors(fastai(f"untar_data('{url}/missing.tgz', base='{tmp_path}/home')"))
        assert set(found) == {0, 1} and all("404" in e["evalue"] for e in found.values())
        assert asked[2:] == ["/missing.tgz"]
        fastai.ok(f"untar_data('{url}/data.tgz', base='{tmp_path}/other')", ranks=[1], timeout_s=20)


def test_fastai_is_missing(daemon, tmp_path):
    (tmp_path / "fastai.py").write_text("raise ModuleNotFoundError('No module named fastai')")
    body = {"name": "lacks", "ranks": 2, "app": "fastai", "env": {"PYTHONPATH": str(tmp_path)}}
    reply = daemon.request("POST", "/v1/groups", body, timeout=60)
    assert reply.status == 422 and reply.headers["content-type"] == "application/problem+json"
    assert reply.json["hint"] == f"{sys.executable} -m pip install fastai"
    assert daemon.request("GET", "/v1/groups/lacks").status == 404
