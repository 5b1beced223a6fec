"""Backend gangline in other packages that create their own process groups."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from gangline.launcher.job import free_ports

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: object) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_layers_that_transformers_splits_over_ranks_give_what_one_rank_does() -> None:
    ranks = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_ports(1)[0])
    out = run(*ranks, "-m", "gangline", "run", SCRIPTS / "tensor_parallel.py")
    assert out.count("gangline (32, 32) True") == 2


@pytest.mark.skipif(
    importlib.util.find_spec("torchrec") is None, reason="needs torchrec: pip install torchrec fbgemm-gpu-cpu"
)
def test_tables_that_torchrec_splits_over_ranks_train_as_over_gloo() -> None:
    found = {}
    for backend, prefix in (("gloo", ()), ("gangline", ("-m", "gangline", "run"))):
        ranks = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_ports(1)[0])
        name, loss = run(*ranks, *prefix, SCRIPTS / "torchrec_embeddings.py").splitlines()[-1].split()
        found[name] = loss
        assert name == backend
    assert found["gloo"] == found["gangline"]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
def test_ray_train_takes_the_backend_by_its_name() -> None:
    if not any(one.name == "gangline" for one in entry_points(group="torch.backends")):
        pytest.skip("the installed gangline has no entry points; expected pip install -e .")
    assert "trained by DistributedDataParallel over gangline, equal: True" in run(SCRIPTS / "ray_train.py")
