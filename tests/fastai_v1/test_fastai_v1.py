# SPDX-License-Identifier: Apache-2.0
"""The app fastai_v1: cells that were written for fastai 1 and one process, on two ranks.

`make check-fastai-v1` runs this, with the interpreter of an environment that has fastai 1. The data
is scikit-learn's breast cancer table, 569 rows: nothing to download.
"""

import os
import runpy
import secrets
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from conftest import ROOT, build, fresh_daemon, wait_until  # noqa: E402, F401
from runner import Runner, downloads, errors, text  # noqa: E402

pytestmark = pytest.mark.timeout(300)

SHIMS = ROOT / "daemon/worker/ddip_worker/apps/fastai_v1/shims.py"
SETUP = """
from fastai.tabular import *
from fastai.callbacks import *
from sklearn.datasets import load_breast_cancer

df = load_breast_cancer(as_frame=True).frame
names = list(df.columns[:10])
df["target"] = df.target.map({0: "bad", 1: "good"})

def make(bs=32, rows=df, valid=None, **options):
    options = {"num_workers": 0, **options}
    items = TabularList.from_df(rows, cont_names=names, procs=[Normalize])
    items = items.split_by_rand_pct(0.2) if valid is None else items.split_by_idx(valid)
    data = items.label_from_df("target").databunch(bs=bs, **options)
    return tabular_learner(data, layers=[20, 10], metrics=accuracy)

class Count(Callback):
    items = batches = 0
    def on_batch_end(self, last_target, train, **kwargs):
        if train:
            self.items += len(last_target)
            self.batches += 1

class Do(Callback):
    "Calls do(number of the batch) after each training batch."
    def __init__(self, do): self.do = do
    def on_batch_end(self, train, num_batch, **kwargs):
        if train: self.do(num_batch)

def weights(learn):
    return [round(t.double().sum().item(), 12) for t in learn.model.state_dict().values()]

def show(*values):
    "One line of JSON."
    print("\\n" + json.dumps(values, default=float))
"""
CHECK_WHOLE = """
data = learn.data
samplers = [type(dl.dl.sampler).__name__ for dl in (data.train_dl, data.valid_dl)]
show(type(learn.model).__name__, samplers, len(data.train_dl))
"""


@pytest.fixture(scope="module")
def daemon(build):  # noqa: F811
    env = {"PYTHONPATH": str(ROOT / "tests/fakes/torchvision_ops"), "OMP_NUM_THREADS": "1"}
    with fresh_daemon(build, env=env) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def fastai(daemon, tmp_path_factory):
    """run(code, ranks=None, ...): the events of a cell, in a group that has run SETUP."""
    name = f"f{secrets.token_hex(4)}"
    folder = tmp_path_factory.mktemp("fastai")
    daemon.create(name=name, app="fastai_v1", cwd=str(folder), grace_s=1)
    run = Runner(daemon, name)
    run.ok(SETUP)
    yield run
    daemon.delete(name)


def check_whole(run):
    """The Learner is as it was before fit, the same on all ranks, and trains on."""
    whole = ["TabularModel", ["RandomSampler", "SequentialSampler"], 14]
    assert run.same(CHECK_WHOLE) == whole
    run.ok("learn.fit(1)")
    run.same("show(weights(learn))")
    assert run.same(CHECK_WHOLE) == whole


# --- training -------------------------------------------------------------------------------------


def test_plain_cells_train_on_all_ranks(fastai):
    code = "learn = make(); count = Count(); learn.fit_one_cycle(3, 1e-2, callbacks=[count])"
    events = fastai.ok(code)
    table = text(events, 0)
    assert table.count("train_loss") == 1 and "100.00%" in table
    assert "train_loss" not in text(events, 1) and "%" not in text(events, 1)
    # 456 training items: 228 each, in 7 whole batches of 32
    assert fastai.same("show(count.items, count.batches)") == [3 * 224, 3 * 7]
    fastai.same("show(weights(learn))")
    loss, accuracy = fastai.same("show(*learn.validate())")
    assert accuracy > 0.85 and loss < 0.4
    check_whole(fastai)


def test_each_item_is_seen_once(fastai):
    code = """
class Rows(Callback):
    def __init__(self): self.rows = {True: [], False: []}
    def on_batch_begin(self, last_input, train, **kwargs):
        self.rows[train] += last_input[:, 0].tolist()
items = TensorDataset(torch.arange(321.)[:, None], torch.zeros(321, 1))
data = DataBunch.create(items, items, bs=32, num_workers=0)
seen = Rows()
Learner(data, nn.Linear(1, 1), loss_func=nn.MSELoss()).fit(1, 1e-9, callbacks=[seen])
show(seen.rows[True], seen.rows[False])
"""
    (first, first_valid), (second, second_valid) = fastai.values(code)
    assert len(first) == len(second) == 160 and len(set(first + second)) == 320
    assert sorted(first_valid + second_valid) == list(range(321))


def test_split_batches_take_the_steps_of_one_process(fastai):
    """The losses of each step and the model they end in: as on one rank alone."""
    code = """
torch.manual_seed(3)
x = torch.randn(481, 4); items = TensorDataset(x, (x.sum(1) > 0).long())
data = DataBunch.create(items, items, bs=32, num_workers=0)
data.train_dl = data.train_dl.new(shuffle=False)
model = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 2)); count = Count()
learn = Learner(data, model, loss_func=nn.CrossEntropyLoss())
learn.fit(2, 1e-2, callbacks=[count])
show(count.batches, [float(loss) for loss in learn.recorder.losses], weights(learn), count.items)
"""
    [alone] = fastai.values(code, ranks=[0])
    try:
        together = fastai.same(code, app_command="ddp split_batches=True")
    finally:
        fastai.ok("", app_command="ddp split_batches=False")
    assert together[0] == alone[0] == 30 and alone[3] == 2 * together[3] == 960
    for ours, want in zip(together[1:3], alone[1:3], strict=True):
        assert ours == pytest.approx(want, abs=1e-5)


def test_a_loop_written_by_hand(fastai):
    code = """
items = TensorDataset(torch.randn(480, 4), torch.zeros(480, 1))
train_dl = DataBunch.create(items, items, bs=32, num_workers=0).train_dl
net = nn.Linear(4, 1)
"""
    fastai.ok(code)
    count = "show(type(net).__name__, len(train_dl), sum(len(y) for x, y in train_dl))"
    assert fastai.same(count, app_command="ddp net train_dl") == ["Wrapped", 7, 7 * 32]
    fastai.ok(code)
    command = "ddp net train_dl split_batches=True"
    try:
        assert fastai.same(count, app_command=command) == ["Wrapped", 15, 15 * 16]
    finally:
        fastai.ok("", app_command="ddp split_batches=False")


def test_metrics_are_those_of_all_items(fastai):
    """The table's numbers are those of validate(), which reads all items on each rank."""
    code = """
learn = make(valid=list(range(449, 510)))  # 61: of the ranks one has 31, one 30
learn.metrics = [accuracy, error_rate, AUROC(), Precision(), FBeta()]
learn.fit(2, 1e-2)
show([learn.recorder.val_losses[-1], *learn.recorder.metrics[-1]], learn.validate(),
     learn.recorder.losses[-3:], [type(m).__name__ for m in learn.metrics])
"""
    recorded, validated, _, kinds = fastai.same(code)
    assert recorded == pytest.approx(validated, abs=1e-6) and len(recorded) == 6
    assert kinds == ["function", "function", "AUROC", "Precision", "FBeta"]


def test_lr_find(fastai):
    code = """
def state(): return weights(learn), learn.opt.state_dict()["state"][0]["step"].item()
learn = make(); learn.fit(1); before = state()
learn.lr_find(); learn.recorder.plot(suggestion=True)
show(learn.recorder.min_grad_lr, len(learn.recorder.lrs), before == state(), os.listdir())
"""
    events = fastai.ok(code)
    assert text(events, 0).count("LR Finder is complete") == 1
    found, steps, unchanged, files = fastai.same(code)
    assert unchanged and 50 < steps <= 100 and 1e-7 < found < 10
    assert "models" not in files
    check_whole(fastai)


def test_inference_outside_of_fit(fastai):
    code = """
learn = make(); learn.fit_one_cycle(2, 1e-2); learn.show_results(rows=2)
preds, targets = learn.get_preds(); train, _ = learn.get_preds(DatasetType.Fix)
label, _, probabilities = learn.predict(df.iloc[0])
confusion = ClassificationInterpretation.from_learner(learn).confusion_matrix().sum()
right = (preds.argmax(1) == targets).float().mean()
show(right, len(preds), len(train), str(label), probabilities.tolist(), confusion,
     *learn.validate())
"""
    right, count, of_training, _, _, confusion, _, accuracy = fastai.same(code)
    assert (count, of_training, confusion) == (113, 456, 113) and right == pytest.approx(accuracy)


def test_what_else_ends_in_fit(fastai):
    code = """
learn = make(); learn.split([learn.model.layers[3]]); learn.freeze()
learn.fit_one_cycle(1, slice(1e-3, 1e-2)); learn.unfreeze(); learn.fit_fc(1, 1e-3)
learn.clip_grad(0.1); learn.callback_fns.append(ShowGraph)
learn.fit(2, [1e-3, 1e-3], callbacks=[CSVLogger(learn)])
learn.fit_one_cycle(2, start_epoch=1)
show(weights(learn), len(learn.layer_groups))
"""
    fastai.same(code)
    events = fastai.ok("learn = make(); learn.model.unused = nn.Linear(1, 1)")
    found = errors(fastai("learn.fit(1)"))
    assert "find_unused_parameters=True" in found[0]["evalue"] + found[1]["evalue"]
    events = fastai.ok("learn.fit(1)", app_command="ddp find_unused_parameters=True")
    assert "train_loss" in text(events, 0)
    fastai.ok("learn = make()", app_command="ddp find_unused_parameters=False")


def test_a_batch_too_large_for_a_share(fastai):
    found = errors(fastai("learn = make(bs=300); learn.fit(1)"))
    assert set(found) == {0, 1} and "smaller batch size" in found[1]["evalue"]


def test_workers_of_data_loaders(fastai, daemon):
    def children():
        group = daemon.request("GET", f"/v1/groups/{fastai.group}").json
        found = [psutil.Process(r["pid"]).children(recursive=True) for r in group["ranks"]]
        return [p for each in found for p in each if p.status() != psutil.STATUS_ZOMBIE]

    fastai.ok("learn = make(num_workers=2); learn.fit(1); learn.get_preds()")
    fastai.same("show(weights(learn))")
    wait_until(lambda: children() == [])


# --- text -----------------------------------------------------------------------------------------

TEXT = """
from fastai.text import *
from num2words import num2words
rows = pd.DataFrame({"label": [n % 2 for n in range(1000)], "text": [*map(num2words, range(1000))]})
train, valid = rows[:900], rows[900:]
words = Tokenizer(tok_func=BaseTokenizer)
options = dict(tokenizer=words, text_cols="text", label_cols="label")
small = {"emb_sz": 16, "n_hid": 16, "n_layers": 2}
"""


def test_language_model_and_classifier(fastai):
    code = """
class Rows(Callback):
    def __init__(self): self.rows = []
    def on_batch_begin(self, last_input, train, **kwargs):
        if train: self.rows += last_input.tolist()
language = TextLMDataBunch.from_df(".", train, valid, bs=8, bptt=10, **options)
learn = language_model_learner(language, AWD_LSTM, pretrained=False, drop_mult=0.5,
                               config={**awd_lstm_lm_config, **small})
learn.lr_find(); rows = Rows(); learn.fit_one_cycle(2, 1e-2, callbacks=[rows])
learn.save_encoder("encoder")
show(len(rows.rows), rows.rows[:8], weights(learn), *learn.validate(), len(language.train_dl))
"""
    fastai.ok(TEXT)
    ranks = fastai.values(code)
    (count, first, *same), (other, second, *same_there) = ranks
    assert same == same_there
    # all of the text is read, each row of 10 words by one rank
    steps = -(-same[-1] // 2)
    assert count == other == 2 * steps * 8 and not {*map(tuple, first)} & {*map(tuple, second)}
    code = """
data = TextClasDataBunch.from_df(".", train, valid, vocab=language.vocab, bs=32, **options)
learn = text_classifier_learner(data, AWD_LSTM, pretrained=False,
                                config={**awd_lstm_clas_config, **small})
learn.load_encoder("encoder"); learn.fit_one_cycle(1, 1e-2)
recorded = [learn.recorder.val_losses[-1], *learn.recorder.metrics[-1]]
preds, targets = learn.get_preds(ordered=True)
show(recorded, learn.validate(), weights(learn), str(learn.predict("one hundred and two")[0]))
"""
    recorded, validated, *_ = fastai.same(code)
    assert recorded == pytest.approx(validated, abs=1e-5)


# --- what one rank decides ------------------------------------------------------------------------


def test_callbacks_that_stop_save_and_load(fastai):
    code = """
class Own(Callback):
    "A metric that gets better on one rank, and worse on the other."
    name, n = "own", 0
    def on_epoch_end(self, last_metrics, **kwargs):
        self.n += 1
        return add_metrics(last_metrics, tensor(float(self.n if rank else -self.n)))
learn = make(); learn.metrics = [Own()]
learn.fit(6, callbacks=[EarlyStoppingCallback(learn, "own", patience=2),
                        SaveModelCallback(learn, monitor="own"),
                        ReduceLROnPlateauCallback(learn, "own")])
show(len(learn.recorder.nb_batches), weights(learn), learn.opt.lr)
"""
    epochs, _, lr = fastai.same(code)
    assert epochs == 4 and lr < 3e-3
    check_whole(fastai)


def test_loss_that_is_nan_on_one_rank(fastai):
    code = """
learn = make(); count = Count()
def loss(out, target):
    loss = F.cross_entropy(out, target)
    return loss * float("nan") if rank == 1 and count.batches == 3 else loss
learn.loss_func = loss
learn.fit(2, callbacks=[count, TerminateOnNaNCallback()]); show(count.batches)
"""
    assert fastai.same(code) == [4]
    fastai.ok("learn = make(); learn.fit(1)")
    check_whole(fastai)


# --- when it goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["rank == 1", "True"])
def test_exception_inside_fit(fastai, ranks):
    code = f"""
def fail(number):
    if number == 3 and ({ranks}): raise LookupError("in the middle")
learn = make(); learn.fit(2, callbacks=[Do(fail)])
"""
    events = fastai(code)
    assert "LookupError" in {e["ename"] for e in errors(events).values()}
    assert events[-1]["status"] == "error"
    check_whole(fastai)


def test_interrupted_fit(fastai):
    fastai.ok("learn = make(); learn.fit(1)")
    events = fastai("learn.fit(500)", timeout_s=1.5)
    assert events[-1]["status"] == "interrupted"
    check_whole(fastai)  # and Adam's moments are the same again, else weights would part


DIFFERENT = {
    "number of training items": "learn = make(rows=df.iloc[: 500 + rank], valid=list(range(400)))",
    "validation rows": "n = [*range(569)]; learn = make(valid=n[400:500] if rank else n[:100])",
    "training batch size": "learn = make(bs=16 + rank)",
    "model": "learn = make(); learn.model.layers[0] = nn.Linear(10, 20 + rank)",
    "classes": """
rows = df.copy()
rows.loc[3, "target"] = "only-there" if rank else "bad"
learn = make(rows=rows, valid=list(range(100, 200)))
""",
    "vocabulary": """
rows["text"] = rows.text + (" only-there" if rank else " other")
data = TextLMDataBunch.from_df(".", rows[:900], rows[900:], bs=8, bptt=10, **options)
learn = language_model_learner(data, AWD_LSTM, pretrained=False,
                               config={**awd_lstm_lm_config, **small})
""",
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_would_train_different_things(fastai, what):
    fastai.ok(TEXT)
    found = errors(fastai(DIFFERENT[what] + "\nlearn.fit(1)"))
    assert set(found) == {0, 1} and found[0]["evalue"] == found[1]["evalue"]
    assert found[0]["ename"] == "RanksDiffer" and f"  {what}: " in found[0]["evalue"]
    if what in ("classes", "vocabulary"):
        assert "only rank 1 has only-there" in found[0]["evalue"]


def test_random_numbers_are_the_same_outside_of_fit(fastai):
    draw = "show(random.random(), np.random.rand(), torch.rand(1).item())"
    first = fastai.same(draw)
    fastai.ok("learn = make(); learn.fit(1)")
    assert fastai.same(draw) != first


# --- cells of some ranks --------------------------------------------------------------------------


def test_one_rank_trains_alone(fastai):
    fastai.ok("learn = make(); learn.fit(1)")
    code = "count = Count(); learn.fit(1, callbacks=[count]); show(count.items)"
    [[items]] = fastai.values(code, ranks=[1])
    assert items == 448  # 14 batches: the whole set
    code = "learn.fit(1); learn.save('alone'); learn.load('alone'); learn.lr_find()"
    events = fastai.ok(code, ranks=[1])
    assert "train_loss" in text(events, 1)
    first, second = fastai.values("show(weights(learn))")
    assert first != second
    check_whole(fastai)


def test_some_ranks_of_three(daemon, tmp_path):
    daemon.create(3, name="three", app="fastai_v1", cwd=str(tmp_path))
    run = Runner(daemon, "three")
    run.ok(SETUP + "\nlearn = make()")
    found = errors(run("learn.fit(1)", ranks=[0, 2], timeout_s=20))
    assert set(found) == {0, 2} and "fit trains on all ranks together" in found[2]["evalue"]
    run.ok("learn.get_preds(); learn.predict(df.iloc[0])", ranks=[0, 2], timeout_s=20)
    run.ok("learn.fit(1)")
    run.same("show(weights(learn))")
    daemon.delete("three")


# --- files ----------------------------------------------------------------------------------------


def test_save_load_export(fastai, tmp_path):
    code = """
learn = make(); learn.fit(1, 1e-2); learn.save("one"); before = weights(learn)
learn.fit(1); learn.load("one"); again = weights(learn) == before
learn.export("one.pkl"); other = load_learner(".", "one.pkl")
ours, others = (each.predict(df.iloc[0])[2].tolist() for each in (learn, other))
show(again, ours == others, os.getcwd())
"""
    again, same, folder = fastai.same(code)
    assert again and same
    # the file needs nothing of ddip, but for a kernel without ranks the shims
    (tmp_path / "sitecustomize.py").symlink_to(SHIMS)
    code = "from fastai.tabular import *; print(load_learner('.', 'one.pkl').callbacks)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True)
    assert done.returncode == 0 and done.stdout.strip() == b"[]", done.stderr
    # and what comes from a file trains like any other
    fastai.ok("other.data = learn.data; learn = other; learn.fit(1)")
    fastai.same("show(weights(learn))")


def test_a_learner_made_in_the_notebook(fastai):
    import ddip

    runpy.run_path(str(SHIMS))
    namespace = {"__name__": "__main__"}
    exec(SETUP + "\nlearn = make()", namespace)
    with ddip.connect(fastai.daemon.socket) as client:
        client.push({"learn": namespace["learn"]}, fastai.group)
    check_whole(fastai)


def test_downloads_happen_once(fastai, tmp_path):
    with downloads(tmp_path) as (url, asked):
        home = tmp_path / "home"
        home.mkdir()
        code = f"path = untar_data('{url}/data', fname='{home}/data.tgz', dest='{home}', %s)\n"
        code += "show([str(p) for p in path.ls()])"
        [[file]] = fastai.same(code % "")
        assert file.endswith("labels.csv") and asked == ["/data.tgz"]
        fastai.same(code % "force_download=True")
        assert asked == ["/data.tgz"] * 2
        path = tmp_path / "missing"
        found = errors(fastai(f"untar_data('{url}/gone', fname='{path}.tgz', dest='{path}')"))
        assert set(found) == {0, 1} and asked[2:] == ["/gone.tgz"]
