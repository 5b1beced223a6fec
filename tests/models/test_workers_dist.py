"""Module over the stores of several workers trains as one process does, on the real digits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gangline import Module
from gangline.kvstore import KVStore
from gangline.models.data.datasets import digits
from tests.kvstore.parameter_server.processes import run_job

pytestmark = pytest.mark.timeout(110)

State = dict[str, Tensor]


def network() -> nn.Module:
    torch.manual_seed(11)
    layers = nn.Conv2d(1, 6, 5, stride=3), nn.Tanh(), nn.Flatten(), nn.Linear(6 * 8 * 8, 32), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(32, 10)).double()


def train(kvstore: str | KVStore | None, epochs: int = 3, rate: float = 0.2) -> tuple[float, State]:
    """Train three epochs of digits in float64 with a partial last batch; return accuracy and weights."""
    torch.set_num_threads(1)
    data = digits((1, 28, 28), torch.float64, 0)
    images, labels = data.train
    with Module(network(), nn.CrossEntropyLoss()) as module:
        module.fit(
            (images[:1000], labels[:1000]),
            num_epoch=epochs,
            batch_size=96,
            kvstore=kvstore or "local",
            optimizer_params={"learning_rate": rate, "momentum": 0.9, "wd": 1e-4},
        )
        [(_, accuracy)] = module.score(data.validation, "acc", batch_size=100)
        return accuracy, module.get_params()


def test_async_workers_learn() -> None:
    [(accuracy, weights), (_, other)] = run_job(train, 2, 1, "dist_async", 6, 0.02)
    assert accuracy > 0.85
    assert weights.keys() == other.keys()


# The command, as users start it


def lenet(*arguments: str, kv_store: str, rate: str = "0.1") -> float:
    own = Path(sys.executable).parent
    command = [*arguments, str(own / "gangline"), "train", "--network", "lenet", "--kv-store", kv_store]
    command += ["--num-epochs", "10", "--batch-size", "64", "--lr", rate, "--mom", "0.9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if "Validation-accuracy=" in line and "Epoch" not in line]
    found = re.search(r"Validation-accuracy=([\d.]+)$", line)
    assert found
    return float(found[1])


def launched(workers: int, servers: int, kv_store: str, **options: Any) -> float:
    own = str(Path(sys.executable).parent / "gangline")
    return lenet(own, "launch", "-n", str(workers), "-s", str(servers), "--", kv_store=kv_store, **options)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (4, 2)])
def test_lenet_learns_digits_with_every_store(workers: int, servers: int) -> None:
    alone = lenet(kv_store="local")
    assert alone >= 0.96
    for store in ("dist_sync", "dist_device_sync", "allreduce"):
        assert launched(workers, servers if "dist" in store else 0, store) == pytest.approx(alone, abs=0.02), store
    rate = 0.04 / workers  # each push is a separate update
    assert launched(workers, servers, "dist_async", rate=f"{rate}") >= 0.95
