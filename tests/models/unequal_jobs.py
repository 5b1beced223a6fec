"""Loaders and checks for tests of `gangline.balance` in real torch.distributed jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

import gangline
from gangline import BalancedLoader, Communicator, torch_backend

Batches = list[list[int]]


class Numbers(Dataset[Tensor]):
    """Samples that are their own index, with the seed of the worker that read them."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Tensor:
        worker = get_worker_info()
        return torch.tensor([index, -1 if worker is None else worker.id, torch.initial_seed() % 2**31])


class Listed(Sampler[Any]):
    """Draws from a list; with ``rank`` and ``num_replicas``, a part of it."""

    def __init__(self, items: Sequence[Any], rank: int | None = None, num_replicas: int = 1) -> None:
        self._items = items
        if rank is not None:
            self.rank, self.num_replicas = rank, num_replicas
            self._items = items[rank::num_replicas]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Stream(IterableDataset[Any]):
    """Samples of some numbers."""

    def __init__(self, numbers: Sequence[int], make: Callable[[int], Any]) -> None:
        self._numbers, self._make = numbers, make

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine = self._numbers if worker is None else self._numbers[worker.id :: worker.num_workers]
        return map(self._make, mine)


def join(comm: Communicator, path: str, backend: str = "gloo") -> None:
    assert torch_backend
    dist.init_process_group(backend, init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
    torch.manual_seed(comm.rank)  # ranks that shuffle differently


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def balanced(loader: DataLoader[Any], loads: Any = (3, 1), **options: Any) -> BalancedLoader:
    return gangline.balance(nn.Linear(1, 1), loader, loads=loads, **options)


def epoch_of(loader: BalancedLoader, steps: int | None = None) -> Batches:
    """Iterate an epoch, or some steps of it, and return its global batches; check counts, weights and steps."""
    own = []
    for batch in islice(loader, steps):
        numbers = (batch[:, 0] if batch.ndim == 2 else batch).tolist()
        assert len(numbers) == max(loader.samples, 1)
        assert loader.samples or loader.weight == 0
        own.append((numbers[: loader.samples], loader.weight))
    ranks = gathered(own)
    assert len({len(of_rank) for of_rank in ranks}) == 1
    found = list(zip(*ranks, strict=True))
    for parts in found:
        assert sum(weight for _, weight in parts) == pytest.approx(len(ranks))
    return [[number for numbers, _ in parts for number in numbers] for parts in found]


def cut(numbers: Sequence[int], size: int) -> Batches:
    return [list(numbers[begin : begin + size]) for begin in range(0, len(numbers), size)]


def flat(batches: Batches) -> list[int]:
    return [number for batch in batches for number in batch]
