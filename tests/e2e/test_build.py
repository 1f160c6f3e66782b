# SPDX-License-Identifier: Apache-2.0
"""Builds that differ from the usual one."""

import os
import subprocess
from pathlib import Path

import pytest
from conftest import fresh_daemon

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_build_without_cuda_headers(tmp_path):
    """No CUDA, NVML or NCCL header: all else works, and info says why there are no GPUs."""
    quiet = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "SANITIZE", "OPT")}
    command = ["make", "build", "-j2", f"B={tmp_path}", "WITH_CUDA=no", "OPT=-O0"]
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for part in ("CUDA runtime", "NVML", "NCCL"):
        assert f"{part}:" in built.stdout
    assert built.stdout.count("not found: built without it") == 3
    with fresh_daemon(tmp_path) as daemon:
        found = daemon.request("GET", "/v1/info").json
        for part in ("cuda", "nccl"):
            assert not found[part]["available"] and "built without" in found[part]["reason"]
        refused = daemon.request("POST", "/v1/groups", {"gpus": "all"})
        assert refused.status == 422 and "built without" in refused.json["detail"]
        daemon.create(ranks=1)
        assert daemon.run("default", "print(rank)") == "0\n"
