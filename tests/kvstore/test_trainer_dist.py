"""Tests of `Trainer` over servers: unequal workers give the mean over all samples."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gangline.kvstore import KVStore, Trainer
from tests.kvstore.parameter_server.cases import run
from tests.kvstore.parameter_server.processes import run_job
from tests.kvstore.test_distributed_optimizer import Branches

pytestmark = pytest.mark.timeout(60)
STEPS, SIZES = 20, (5, 3)
THRESHOLDS = {"clip_gradient": 0.01, "clip_norm": 0.1, "clip_global_norm": 0.15}
CLIPPED = {"learning_rate": 0.02, "momentum": 0.9, "wd": 0.01}
OPTIMIZERS = {
    "sgd": ("sgd", {"learning_rate": 0.02, "momentum": 0.5}),
    "adam": ("adam", {"learning_rate": 0.01}),
    **{name: ("sgd", {**CLIPPED, name: at}) for name, at in THRESHOLDS.items()},
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


def branch_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    """Return the loss of a worker, which uses one of two halves of the network in a step."""
    data = torch.arange(5.0 * SIZES[rank]).view(SIZES[rank], 5).double().sin()
    loss: Tensor = model(data, goes_left=(rank + step) % 2 == 0).square().mean()
    return loss


def branches(kv: KVStore) -> dict[str, Tensor]:
    model = Branches()
    trainer = Trainer(model, "sgd", {"learning_rate": 0.1}, kv)
    for step in range(4):
        trainer.zero_grad()
        branch_loss(model, step, kv.rank).backward()  # type: ignore[no-untyped-call]
        trainer.step(SIZES[kv.rank])
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def told() -> list[list[Any]]:
    """Results of both cases on each worker of one job."""
    return run("dist_sync", 2, 1, [compressed, branches])


def test_the_samples_of_workers_that_do_not_use_a_parameter_count_in_its_mean(told: list[list[Any]]) -> None:
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for rank, size in enumerate(SIZES):
            (branch_loss(model, step, rank) * size / sum(SIZES)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for _, found in told:
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)


def compressed(kv: KVStore) -> tuple[Tensor, Tensor]:
    kv.init("w", torch.zeros(4))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    kv.push_weighted("w", torch.tensor([1.25, -1.5, 0.5, 0.0]), 3.0)
    out = torch.empty(4)
    kv.pull("w", out)
    residual = kv.compression_residuals()['"w"/0']
    kv.set_gradient_compression(None)
    return out, residual


def test_a_threshold_is_in_the_unit_of_a_workers_part_of_the_mean(told: list[list[Any]]) -> None:
    for (out, residual), _ in told:
        assert out.tolist() == [1.0, -1.0, 0.0, 0.0]
        assert residual.tolist() == [0.125, -0.25, 0.25, 0.0]
