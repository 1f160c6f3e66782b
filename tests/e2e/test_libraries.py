# SPDX-License-Identifier: Apache-2.0
"""The apps accelerate and lightning: what their own documents say to write trains on all ranks."""

import json
import secrets

import pytest
from conftest import ROOT, fresh_daemon, printed

ACCELERATE = """
import json, torch, torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=8, shuffle=True)

def train():
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, batches = accelerator.prepare(model, optimizer, data)
    seen = 0
    for (x,) in batches:
        seen += len(x)
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    counts = accelerator.gather(torch.tensor([seen])).tolist()
    weights = [p.sum().item() for p in accelerator.unwrap_model(model).parameters()]
    print(json.dumps([accelerator.num_processes, counts, weights]))
"""
LIGHTNING = """
import json, torch, torch.distributed as dist, lightning as L
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(64, 2)), batch_size=8, shuffle=True)

class Model(L.LightningModule):
    seen = 0
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        self.seen += len(batch[0])
        if fail and index == 1 and self.trainer.global_rank == 1: raise LookupError("in the middle")
        return self.layer(batch[0]).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

fail = False
def train():
    model = Model()
    trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False)
    trainer.fit(model, data)
    weights = [p.sum().item() for p in model.parameters()]
    print("\\n" + json.dumps([trainer.world_size, model.seen, weights]))
"""


@pytest.fixture(scope="module")
def libraries_daemon(build):
    env = {"PYTHONPATH": str(ROOT / "tests/fakes/torchvision_ops")}  # torchmetrics looks for it
    with fresh_daemon(build, env=env) as daemon:
        yield daemon


@pytest.fixture
def make(libraries_daemon, tmp_path):
    """make(app, code): run(code, ...) of a new group with that app that has run the code."""

    def make(app, setup):
        name = f"l{secrets.token_hex(4)}"
        libraries_daemon.create(name=name, app=app, cwd=str(tmp_path), grace_s=1)

        def run(code, **more):
            body = {"code": code, "timeout_s": 60, **more}
            path = f"/v1/groups/{name}/cells"
            return libraries_daemon.request("POST", path, body, timeout=100).events

        assert run(setup)[-1]["status"] == "ok"
        return run

    return make


def results(events):
    """The last line of each rank, as JSON."""
    assert events[-1]["status"] == "ok", [e for e in events if e["type"] == "error"]
    ranks = map(int, events[-1]["ranks"])
    return {rank: json.loads(printed(events, rank).splitlines()[-1]) for rank in ranks}


@pytest.mark.timeout(200)
def test_accelerate(make):
    run = make("accelerate", ACCELERATE)
    for _ in range(2):  # an Accelerator of an earlier cell does no harm
        first, second = results(run("train()")).values()
        assert first == second and first[:2] == [2, [32, 32]]
    assert run("import time\nif rank: 1 / 0\ndist.barrier()")[-1]["status"] == "error"
    first, second = results(run("train()")).values()  # in a new generation
    assert first == second and first[:2] == [2, [32, 32]]
    [error] = [e for e in run("train()", ranks=[1]) if e["type"] == "error"]
    assert "would wait for ranks [0]" in error["evalue"]


@pytest.mark.timeout(200)
def test_lightning(make):
    run = make("lightning", LIGHTNING)
    for _ in range(2):
        first, second = results(run("train()")).values()
        assert first == second and first[:2] == [2, 32]
    events = run("fail = True\ntrain()")
    assert events[-1]["status"] == "error"
    assert "LookupError" in {e["ename"] for e in events if e["type"] == "error"}
    first, second = results(run("fail = False\ntrain()")).values()
    assert first == second and first[:2] == [2, 32]
    assert results(run("train()", ranks=[1]))[1][:2] == [1, 64]  # alone, on all of the data
    first, second = results(run("train()")).values()
    assert first == second and first[:2] == [2, 32]
