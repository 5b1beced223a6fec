"""A rank, pinned to a core, that trains alone, under DistributedDataParallel, or with a balanced loader."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gangline.bench.workload.networks import convolutions
from gangline.collectives import torch_backend
from gangline.models.balance.balanced_loader import BalancedLoader
from gangline.models.balance.evaluation import balance

_CLASSES = 10
_PIXELS = 16
_BATCHES = 32  # global batches in an epoch


Prepare = Callable[[dict[str, Any]], dict[str, Any]]


def join() -> dict[str, Any]:
    """Join the group of the ranks."""
    return join_ranks(lambda rank, size: _Trainers(rank, size).prepare)


def join_ranks(prepare: Callable[[int, int], Prepare]) -> dict[str, Any]:
    """Join the group that RANK, WORLD_SIZE and RENDEZVOUS describe, over BENCH_BACKEND.

    Args:
        prepare: returns what prepares work on this rank, from the rank and the number of ranks.
    """
    assert torch_backend.__all__  # registers backend "gangline"
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rendezvous = f"file://{os.environ['RENDEZVOUS']}"
    dist.init_process_group(os.environ["BENCH_BACKEND"], init_method=rendezvous, rank=rank, world_size=size)
    return {
        "who": "gangline",
        "rank": rank,
        "size": size,
        "barrier": dist.barrier,
        "prepare": prepare(rank, size),
        "leave": dist.destroy_process_group,
    }


class _Trainers:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._balanced: BalancedLoader | None = None
        self._last_shares: list[int] = []

    def prepare(self, options: dict[str, Any]) -> dict[str, Any]:
        """Prepare ``call``: "ddp" and "balanced" train a step, "alone" and "share alone" some ``seconds``.

        Args:
            options: ``call``, ``batch_size`` (samples of each rank in an equal split) and ``seconds``. "share alone"
                has the batches of the last balanced one. "balanced" begins a new run.
        """
        self._batch_size = options["batch_size"]
        samples = _BATCHES * self._size * self._batch_size
        generator = torch.Generator().manual_seed(2)
        self._data = TensorDataset(
            torch.rand(samples, 3, _PIXELS, _PIXELS, generator=generator),
            torch.randint(_CLASSES, (samples,), generator=generator),
        )
        if options["call"] == "ddp":
            sampler: DistributedSampler[Any] = DistributedSampler(self._data, self._size, self._rank)
            return {"step": _step(DistributedDataParallel(convolutions()), self._loader(sampler=sampler))}
        if options["call"] == "balanced":
            if self._balanced is not None:
                self._balanced.close()
            model = DistributedDataParallel(convolutions())
            self._balanced = balance(model, self._loader(shuffle=True))
            return {"step": _step(model, self._balanced), "wait": self._end_batch, "report": self._report}
        return self._alone(options["seconds"], of_share=options["call"] == "share alone")

    def _alone(self, seconds: float, *, of_share: bool) -> dict[str, Any]:
        steps: dict[int, Callable[[], None]] = {}
        times: list[float] = []

        def train() -> None:
            batch = self._last_shares[self._rank] if of_share else self._batch_size
            if batch not in steps:
                steps[batch] = _step(convolutions(), DataLoader(self._data, batch, shuffle=True, drop_last=True))
            times[:] = [time.perf_counter()]
            while len(times) == 1 or times[-1] < times[0] + seconds:
                steps[batch]()
                times.append(time.perf_counter())

        return {"step": train, "report": lambda: {"seconds": [end - begin for begin, end in pairwise(times)]}}

    def _loader(self, **options: Any) -> DataLoader[Any]:
        return DataLoader(self._data, self._batch_size, drop_last=True, **options)

    def _end_batch(self) -> None:
        """End the open batch of the last balanced step: other candidates train on other data."""
        assert self._balanced is not None
        self._last_shares = self._balanced.shares or self._last_shares
        self._balanced._end_batch()
        if (timer := self._balanced._balance.timer) is not None:
            timer.pause()

    def _report(self) -> dict[str, Any]:
        """Return the samples of each rank in the last balanced batch."""
        return {"shares": self._last_shares}


def _step(model: nn.Module, loader: Iterable[Any]) -> Callable[[], None]:
    """Return a function that trains one step, over any number of epochs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return partial(_train, model, optimizer, _endless(loader))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> None:
    data, label = next(batches)
    optimizer.zero_grad()
    loss: torch.Tensor = cross_entropy(model(data), label)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _endless(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from loader
