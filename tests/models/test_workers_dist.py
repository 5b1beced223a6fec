"""Module over the stores of several workers trains as one process does, on the real digits."""

from __future__ import annotations

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
