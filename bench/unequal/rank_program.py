"""Rank of the bench: trains alone, under DistributedDataParallel, or with a balanced loader, when the driver asks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gangline.bench.unequal.timeline import Step
from gangline.collectives import torch_backend
from gangline.models.balance.balanced_loader import BalancedLoader, balance

_CLASSES = 10
_PIXELS = 16
_CHANNELS = 24
_BATCHES = 32  # global batches in an epoch


@dataclass(frozen=True)
class RankOptions:
    """What a rank needs to know."""

    rank: int
    size: int
    core: int
    store: str
    """File through which the ranks find each other."""
    batch_size: int
    """Samples of a rank in an equal split."""
    backend: str


def serve(connection: Connection) -> None:
    """Run what the driver asks for until it closes the connection.

    A request is (name, steps): "ddp" or "balanced" trains, "renew" begins a new balanced run, and "alone" and "share
    alone" train for so many seconds with batches of the equal split or of the balanced one. The answer holds the
    seconds (of each step, if alone), the number of steps, and the samples of each rank in the last batch; for "trace
    ddp" and "trace balanced" a list of `Step` instead of the seconds.
    """
    options: RankOptions = connection.recv()
    os.sched_setaffinity(0, {options.core})
    torch.set_num_threads(1)
    torch.manual_seed(1)
    assert torch_backend.__all__  # registers backend "gangline"
    dist.init_process_group(
        options.backend, init_method=f"file://{options.store}", rank=options.rank, world_size=options.size
    )
    trainers = _Trainers(options)
    while True:
        try:
            name, steps = connection.recv()
        except EOFError:
            return
        connection.send(trainers.run(name, steps))


class _Trainers:
    def __init__(self, options: RankOptions) -> None:
        self._options = options
        samples = _BATCHES * options.size * options.batch_size
        generator = torch.Generator().manual_seed(2)
        self._data = TensorDataset(
            torch.rand(samples, 3, _PIXELS, _PIXELS, generator=generator),
            torch.randint(_CLASSES, (samples,), generator=generator),
        )
        self._balanced: BalancedLoader | None = None
        self._models: dict[str, nn.Module] = {}
        self._steps: dict[str, Callable[[], Any]] = {"alone": self._alone(options.batch_size), "ddp": self._ddp()}
        self._alone_with = 0  # samples of a batch of "share alone"
        self._last_shares: list[int] = []

    def run(self, name: str, steps: float) -> tuple[float | list[float] | list[Step], int, list[int]]:
        if name == "renew":
            if self._balanced is not None:
                self._balanced.close()
            self._steps["balanced"] = self._renewed()
            return 0.0, 0, []
        if name.startswith("trace "):
            return self._trace(name.removeprefix("trace "), int(steps)), int(steps), self._shares()
        is_alone = name.endswith("alone")
        if name == "share alone" and self._alone_with != (share := self._shares()[self._options.rank]):
            self._steps[name], self._alone_with = self._alone(share), share
        step = self._steps[name]
        self._end_balanced_batch()
        dist.barrier()
        began = time.perf_counter()
        if is_alone:
            times = [began]
            while len(times) == 1 or times[-1] < began + steps:
                step()
                times.append(time.perf_counter())
            seconds = [end - begin for begin, end in pairwise(times)]
            return seconds, len(seconds), self._shares() if name == "share alone" else []
        for _ in range(int(steps)):
            step()
        dist.barrier()
        took = time.perf_counter() - began
        return took, int(steps), self._shares() if name == "balanced" else []

    def _shares(self) -> list[int]:
        """Return the samples of each rank in the last balanced batch."""
        if self._balanced is not None:
            self._last_shares = self._balanced.shares or self._last_shares
        return list(self._last_shares)

    def _end_balanced_batch(self) -> None:
        """End the batch that the last balanced step left open: other candidates train on data of their own."""
        self._shares()
        if self._balanced is not None:
            self._balanced._end_batch()
            if (timer := self._balanced._balance.timer) is not None:
                timer.pause()

    def _trace(self, name: str, steps: int) -> list[Step]:
        """Train steps and return when each began, had its last gradient, and ended."""
        last_gradient = 0.0

        def note(_: torch.Tensor) -> None:
            nonlocal last_gradient
            last_gradient = time.perf_counter()

        hooks = [
            parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            for parameter in self._models[name].parameters()
        ]
        times: list[Step] = []
        self._end_balanced_batch()
        dist.barrier()
        for _ in range(steps):
            began = time.perf_counter()
            self._steps[name]()
            times.append((began, last_gradient, time.perf_counter()))
        for hook in hooks:
            hook.remove()
        return times

    def _alone(self, batch_size: int) -> Callable[[], Any]:
        loader = DataLoader(self._data, batch_size, shuffle=True, drop_last=True)
        return _step(network(), loader)

    def _ddp(self) -> Callable[[], Any]:
        size, rank = self._options.size, self._options.rank
        sampler: DistributedSampler[Any] = DistributedSampler(self._data, size, rank)
        loader = DataLoader(self._data, self._options.batch_size, sampler=sampler, drop_last=True)
        self._models["ddp"] = DistributedDataParallel(network())
        return _step(self._models["ddp"], loader)

    def _renewed(self) -> Callable[[], Any]:
        model = self._models["balanced"] = DistributedDataParallel(network())
        loader = DataLoader(self._data, self._options.batch_size, shuffle=True, drop_last=True)
        self._balanced = balance(model, loader)
        return _step(model, self._balanced)


def network() -> nn.Module:
    """Return a convolutional network whose time is in its samples, not in its parameters."""
    layers: list[nn.Module] = []
    channels = 3
    for _ in range(4):
        layers += [nn.Conv2d(channels, _CHANNELS, 3, padding=1), nn.ReLU()]
        channels = _CHANNELS
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(_CHANNELS, _CLASSES))


def _step(model: nn.Module, loader: Iterable[Any]) -> Callable[[], None]:
    """Return a function that trains one step, over as many epochs as are asked for."""
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
