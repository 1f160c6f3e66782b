# SPDX-License-Identifier: Apache-2.0
"""What only a machine with GPUs can prove: `make check-gpu`. torch must be a CUDA build."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from conftest import build, daemon, start_daemon  # noqa: E402, F401

TRAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(rank)
model = DDP(torch.nn.Linear(64, 64).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(32, 64, device="cuda")).square().mean().backward()
    optimizer.step()
total = sum(p.sum() for p in model.parameters()).item()
totals = [None] * world_size
dist.all_gather_object(totals, total)
print(len(set(totals)))
"""


@pytest.fixture(scope="module")
def gpus(daemon):  # noqa: F811
    found = daemon.request("GET", "/v1/info").json
    if not found["cuda"]["available"]:
        pytest.skip(f"needs a GPU: {found['cuda']['reason']}")
    assert found["nccl"]["available"], found["nccl"]["reason"]
    return daemon.request("GET", "/v1/gpus").json["gpus"]


@pytest.fixture
def group(daemon, gpus):  # noqa: F811
    body = {"gpus": "all", "grace_s": 1}
    made = daemon.request("POST", "/v1/groups", body, timeout=300)
    assert made.status == 201, made.text
    yield "default"
    daemon.delete("default")


def test_devices(gpus, daemon, group):  # noqa: F811
    """Each rank sees the device that the daemon says it has."""
    ranks = daemon.request("GET", f"/v1/groups/{group}").json["ranks"]
    code = "import torch\nstr(torch.cuda.get_device_properties(rank).uuid)"
    events = daemon.cell(group, code).events
    seen = {e["rank"]: e["data"]["text/plain"] for e in events if e["type"] == "execute_result"}
    for r in ranks:
        assert r["gpu"]["uuid"].removeprefix("GPU-") in seen[r["rank"]]


def test_ddp_trains(daemon, group):  # noqa: F811
    assert daemon.run(group, TRAIN) == "1\n"


def test_waiting_ranks_are_released(daemon, gpus, group):  # noqa: F811
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    daemon.run(group, TRAIN + "\nkept = 7")
    pids = [r["pid"] for r in daemon.request("GET", f"/v1/groups/{group}").json["ranks"]]
    code = "if rank == 1: 1/0\nx = torch.ones(1, device='cuda')\ndist.all_reduce(x)\nx.item()"
    events = daemon.cell(group, code).events
    assert [e["ename"] for e in events if e["type"] == "error"][0] == "ZeroDivisionError"
    assert events[-1]["ranks"]["0"] == "interrupted"
    code = "x = torch.ones(1, device='cuda')\ndist.all_reduce(x)\nprint(int(x.item()), kept)"
    assert daemon.run(group, code) == f"{len(gpus)} 7\n"
    assert pids == [r["pid"] for r in daemon.request("GET", f"/v1/groups/{group}").json["ranks"]]


def test_memory_is_given_back(daemon, gpus):  # noqa: F811
    before = [g["memory_used_bytes"] for g in daemon.request("GET", "/v1/gpus").json["gpus"]]
    daemon.request("POST", "/v1/groups", {"gpus": "all"}, timeout=300)
    daemon.run("default", "import torch; x = torch.zeros(1 << 28, device='cuda')")
    daemon.delete("default")
    after = [g["memory_used_bytes"] for g in daemon.request("GET", "/v1/gpus").json["gpus"]]
    assert all(b - a < 64 << 20 for a, b in zip(before, after, strict=True))
