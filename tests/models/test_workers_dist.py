"""Module over the stores of several workers trains as one process does, on the real digits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gangline
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


def train_in_three_fits(kvstore: str) -> tuple[State, list[str]]:
    """Train, fine-tune the last layer, and train again; return the weights and the keys of the fine-tuning's state."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    data = torch.randn(60, 6, dtype=torch.float64), torch.randint(0, 3, (60,))
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with Module(network, nn.CrossEntropyLoss(), "cpu") as module:

        def fit(optimizer: str, **params: float) -> None:
            module.fit(data, num_epoch=2, batch_size=12, kvstore=kvstore, optimizer=optimizer, optimizer_params=params)

        fit("sgd", lr=0.1, momentum=0.9)
        network[0].requires_grad_(False)
        fit("adam", lr=0.01)
        keys = sorted(module.optimizer_state().shapes)
        network[0].requires_grad_(True)
        fit("adam", lr=0.02)
        return module.get_params(), keys


def test_a_later_fit_with_another_optimizer_keeps_the_workers_store() -> None:
    def both() -> list[tuple[State, list[str]]]:
        return [train_in_three_fits("allreduce"), train_in_three_fits("dist_sync")]

    for (expected, trained), (weights, keys) in gangline.launch(both, workers=2, servers=1):
        assert keys == trained == ['"2.bias"', '"2.weight"']
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
