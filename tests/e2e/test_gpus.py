# SPDX-License-Identifier: Apache-2.0
"""GPUs: what the daemon says without any, and which devices ranks get (fake libraries, no GPU)."""

import os
from pathlib import Path

import psutil
import pytest
from conftest import printed

ROOT = Path(__file__).resolve().parents[2]
SITE = {"PYTHONPATH": str(ROOT / "tests/fakes/torch_cuda")}


@pytest.fixture
def fakes(build):
    """Settings that name the fake libraries of the build."""
    folder = build / "fakes"
    if not folder.exists():
        pytest.fail("the fakes are not built: make unit")

    def settings(*names):
        known = {
            "cudart": "libcudart_fake.so",
            "nvml": "libnvml_fake.so",
            "nccl": "libnccl_fake.so",
        }
        options = []
        for name, file in known.items():
            path = folder / file if name in names else f"/no/such/{file}"
            options += [f"--{name}-library", str(path)]
        return options

    return settings


def info(daemon):
    return daemon.request("GET", "/v1/info").json


def test_this_machine_as_it_is(daemon):
    """Whatever there is: either devices, or a reason in words."""
    found = info(daemon)
    gpus = daemon.request("GET", "/v1/gpus").json
    for part in (found["cuda"], found["nccl"]):
        assert part["available"] == (part["reason"] is None)
    assert found["cuda"]["devices"] == len(gpus["gpus"])
    assert gpus["reason"] == found["cuda"]["reason"]


def test_without_a_driver(start_daemon, fakes):
    daemon = start_daemon(*fakes("cudart", "nccl"), env={"FAKE_CUDA_ERROR": "35"})
    found = info(daemon)
    assert not found["cuda"]["available"] and "driver" in found["cuda"]["reason"]
    assert found["nccl"]["available"] and found["nccl"]["version"]
    refused = daemon.request("POST", "/v1/groups", {"gpus": "all"})
    assert refused.status == 422
    assert found["cuda"]["reason"] in refused.json["detail"] and "ranks" in refused.json["hint"]
    assert daemon.create(ranks=1)["backend"] == "gloo"  # CPU ranks work all the same


def test_without_libraries(start_daemon, fakes):
    found = info(start_daemon(*fakes()))
    for part in ("cuda", "nccl"):
        assert not found[part]["available"] and "/no/such/" in found[part]["reason"], found


def test_gpus_without_nccl(start_daemon, fakes):
    daemon = start_daemon(*fakes("cudart", "nvml"))
    assert info(daemon)["cuda"]["devices"] == 4
    refused = daemon.request("POST", "/v1/groups", {"gpus": [0]})
    assert refused.status == 422 and "NCCL" in refused.json["detail"]


def test_listing(start_daemon, fakes):
    daemon = start_daemon(*fakes("cudart", "nvml", "nccl"), env={"FAKE_CUDA_ORDER": "2,0,1,3"})
    gpus = daemon.request("GET", "/v1/gpus").json["gpus"]
    assert [g["index"] for g in gpus] == [0, 1, 2, 3]
    assert len({g["uuid"] for g in gpus}) == 4
    assert all(g["memory_total_bytes"] > 0 and g["group"] is None for g in gpus)


@pytest.mark.timeout(180)
def test_ranks_get_the_devices_in_the_order_given(start_daemon, fakes):
    daemon = start_daemon(*fakes("cudart", "nvml", "nccl"), env={"FAKE_CUDA_ORDER": "2,0,1,3"})
    gpus = daemon.request("GET", "/v1/gpus").json["gpus"]
    choice = [2, gpus[0]["uuid"]]
    body = {"gpus": choice, "env": SITE, "name": "pair"}
    reply = daemon.request("POST", "/v1/groups", body, timeout=120)
    assert reply.status == 201, reply.text
    made = reply.json
    assert made["backend"] == "nccl" and made["world_size"] == 2
    uuids = [gpus[2]["uuid"], gpus[0]["uuid"]]
    assert [r["gpu"]["uuid"] for r in made["ranks"]] == uuids
    code = (
        "import os, torch; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['LOCAL_RANK'],"
        " torch.cuda.current_device())"
    )
    events = daemon.cell("pair", code).events
    visible = ",".join(uuids)
    assert [printed(events, rank) for rank in (0, 1)] == [f"{visible} 0 0\n", f"{visible} 1 1\n"]
    holders = {g["uuid"]: g["group"] for g in daemon.request("GET", "/v1/gpus").json["gpus"]}
    assert [holders[u] for u in uuids] == ["pair", "pair"]

    for bad in ([0, gpus[0]["uuid"]], [9], [], ["GPU-nonsense"]):
        assert daemon.request("POST", "/v1/groups", {"gpus": bad, "name": "x"}).status == 422

    # each generation has a unique id of its own, whose sockets no rank may inherit
    restarted = daemon.request("POST", "/v1/groups/pair/restart", timeout=120)
    assert restarted.json["generation"] == 2 and restarted.json["state"] == "ready"
    listening = {
        c.laddr
        for c in psutil.Process(daemon.pid).net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    }
    for rank in restarted.json["ranks"]:
        held = {c.laddr for c in psutil.Process(rank["pid"]).net_connections("tcp")}
        assert not held & listening
    assert daemon.delete("pair")


def test_real_nccl_library(start_daemon, build):
    """The library of the wheel, where it is installed: version and availability, no GPU needed."""
    import nvidia.nccl

    library = next(Path(nvidia.nccl.__path__[0]).glob("lib/libnccl.so*"))
    found = info(start_daemon("--nccl-library", str(library)))["nccl"]
    assert found["available"] and found["version"].startswith("2."), found
    assert os.path.exists(library)


def test_abort_reaches_nccl(start_daemon, fakes):
    """Ranks that wait for one that raised are released; NCCL's own abort is called in each."""
    daemon = start_daemon(*fakes("cudart", "nvml", "nccl"))
    body = {"gpus": [0, 1], "env": SITE, "grace_s": 0.5}
    made = daemon.request("POST", "/v1/groups", body, timeout=120)
    assert made.status == 201, made.text
    daemon.run(
        "default", "import torch, torch.distributed as dist, sitecustomize as fake; kept = 1"
    )
    before = daemon.run("default", "print(fake.aborts.count)")
    events = daemon.cell("default", "if rank: 1/0\ndist.all_reduce(torch.ones(1))").events
    assert events[-1]["ranks"] == {"0": "interrupted", "1": "error"}
    code = "x = torch.ones(1)\ndist.all_reduce(x)\nprint(int(x.item()), kept, fake.aborts.count)"
    total, kept, after = map(int, daemon.run("default", code).split())
    assert (total, kept) == (2, 1) and after >= int(before) + 2  # by the thread, and on leaving
