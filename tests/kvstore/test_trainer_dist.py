"""Tests of `Trainer` over servers: unequal workers give the mean over all samples."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

from gangline.kvstore import Trainer
from tests.kvstore.parameter_server.processes import run_job

pytestmark = pytest.mark.timeout(60)
STEPS, SIZES = 8, (5, 3)
OPTIMIZERS = {
    "sgd": ("sgd", {"learning_rate": 0.02, "momentum": 0.5}),
    "adam": ("adam", {"learning_rate": 0.01}),
}


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    size = sum(SIZES)
    return torch.randn(size, 7, generator=generator).double(), torch.randn(size, 2, generator=generator).double()


def plain_loop(optimizer: tuple[str, dict[str, float]], kvstore: str, mine: slice) -> list[Tensor]:
    model = network()
    trainer = Trainer(model.parameters(), *optimizer, kvstore)
    for step in range(STEPS):
        data, target = (part[mine] for part in batch(step))
        trainer.zero_grad()
        loss = nn.functional.mse_loss(model(data), target)
        loss.backward()
        trainer.step(len(data))
    trainer.kvstore.close()
    return [parameter.detach() for parameter in model.parameters()]


def play(optimizer: tuple[str, dict[str, float]], store: str) -> list[Tensor]:
    rank = int(os.environ["DMLC_WORKER_ID"])
    return plain_loop(optimizer, store, slice(0, SIZES[0]) if rank == 0 else slice(SIZES[0], None))


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one == "adam" else pytest.mark.slow) for one in OPTIMIZERS],
)
def test_workers_with_unequal_batches_train_as_one_process(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    alone = plain_loop(optimizer, "local", slice(None))
    for weights in run_job(play, 2, 2, optimizer, "dist_sync"):
        for got, expected in zip(weights, alone, strict=True):
            assert torch.linalg.norm(got - expected) / torch.linalg.norm(expected) < 1e-11
