"""`gangline.balance` in real torch.distributed jobs, against one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, spawn, torch_backend

SAMPLES = 83
TOLERANCE = 1e-11


class Data(TensorDataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        super().__init__(
            torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator),
            torch.randint(3, (SAMPLES,), generator=generator),
            torch.arange(SAMPLES),
        )


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def distance(model: nn.Module, expected: nn.Module) -> float:
    """Return the largest distance of a parameter from the expected one, relative to its norm."""
    pairs = zip(model.state_dict().values(), expected.state_dict().values(), strict=True)
    return max(float((got - want).norm() / want.norm()) for got, want in pairs)


def join(comm: Communicator, path: str, backend: str) -> None:
    assert torch_backend
    dist.init_process_group(backend, init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)


def alone(batches: Sequence[Sequence[int]], accumulate: int = 1) -> nn.Module:
    """Train one process on the batches of indices."""
    model = network()
    optimizer = optimizer_of(model)
    data = Data()
    for number, indices in enumerate(batches, 1):
        features, labels, _ = (torch.stack(column) for column in zip(*(data[i] for i in indices), strict=True))
        (nn.functional.cross_entropy(model(features), labels) / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def ddp_steps(comm: Communicator, path: str, backend: str, loads: Any, epochs: int) -> float:
    join(comm, path, backend)
    model = DistributedDataParallel(network())
    optimizer = optimizer_of(model)
    loader = gangline.balance(model, DataLoader(Data(), batch_size=8, shuffle=True), loads=loads)
    seen: list[list[int]] = []
    sizes = []
    for _ in range(epochs):
        for features, labels, numbers in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            own: list[Any] = [None] * comm.size
            dist.all_gather_object(own, numbers[: loader.samples].tolist())
            seen.append([number for of_rank in own for number in of_rank])
            sizes.append([len(of_rank) for of_rank in own])
    steps = len(loader)
    for epoch in range(epochs):
        indices = sorted(number for batch in seen[epoch * steps : (epoch + 1) * steps] for number in batch)
        assert indices == list(range(SAMPLES))
    dist.destroy_process_group()
    assert sizes[0] == [17, 5, 2]
    return distance(model.module, alone(seen))


@pytest.mark.parametrize("backend", ["gloo", "gangline"])
def test_ddp_trains_as_one_process(backend: str, tmp_path: Path) -> None:
    found = spawn(ddp_steps, 3, str(tmp_path / "store"), backend, [10, 3, 1], 6, threads=1)
    assert max(found) < TOLERANCE
