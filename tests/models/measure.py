"""Small jobs that several tests run: contexts, data, a plain torch loop, distances of weights, and logged lines."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gangline import Context, Module, cpu


class Cut(BaseException):
    """Simulates a killed process: no code of gangline catches it."""


def contexts(count: int) -> list[Context]:
    return [cpu(index) for index in range(count)]


def labelled(
    samples: int, features: int, classes: int, *, seed: int = 7, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return random samples and their classes."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(samples, features, generator=generator, dtype=dtype)
    return data, torch.randint(classes, (samples,), generator=generator)


def mlp(*sizes: int, seed: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return linear layers of these sizes, with a tanh between two of them."""
    torch.manual_seed(seed)
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


class Branches(nn.Module):
    """Network with a branch for samples that begin with a positive number, and a layer that none uses."""

    def __init__(self, features: int, classes: int, width: int = 6) -> None:
        super().__init__()
        self.stem, self.branch = nn.Linear(features, width), nn.Linear(width, width)
        self.unused, self.head = nn.Linear(2, 2), nn.Linear(width, classes)

    def forward(self, data: Tensor) -> Any:
        hidden = self.stem(data).tanh()
        chosen = data[:, :1] > 0
        if chosen.any():
            hidden = hidden + torch.where(chosen, self.branch(hidden), 0)
        return self.head(hidden)


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: Tensor, function: Callable[[], object]) -> Tensor:
        ctx.function = function
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.function()
        return gradients[0], None


def in_backward(data: Tensor, function: Callable[[], object]) -> Tensor:
    """Return the data; the backward through them calls a function."""
    output: Tensor = _CallInBackward.apply(data, function)  # type: ignore[no-untyped-call]
    return output


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls a function with each operation of torch in this thread, its arguments and its result."""

    def __init__(self, see: Callable[[Any, Any, Any], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(func, args, out)
        return out


class Told:
    """Metric with a given value for each validation, of so many batches."""

    def __init__(self, values: Iterable[float], batches: int = 1) -> None:
        self._values = iter([value for value in values for _ in range(batches)])

    def __call__(self, label: Tensor, output: Tensor) -> float:
        return next(self._values)


def plain_loop(
    network: nn.Module,
    batches: Iterable[tuple[Any, Tensor]],
    *,
    loss: Callable[[Any, Tensor], Tensor] = nn.functional.cross_entropy,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    **arguments: Any,
) -> dict[str, Tensor]:
    """Train a copy of a network by a torch loop; return its weights."""
    network = copy.deepcopy(network)
    own = optimizer(network.parameters(), **arguments)
    for data, label in batches:
        own.zero_grad()
        loss(network(data), label).backward()
        own.step()
    return network.state_dict()


def spin(seconds: float) -> None:
    """Compute for some time."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@contextmanager
def gangline_lines(level: int = logging.INFO) -> Iterator[list[str]]:
    """Return a list that gets the lines which gangline logs in this process."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gangline")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def distance(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Return the largest ||a - b|| / max(||b||, 1e-12) over all tensors, with norms in float64."""
    assert ours.keys() == reference.keys()
    return max(
        float((ours[name].double() - value.double()).norm()) / max(float(value.double().norm()), 1e-12)
        for name, value in reference.items()
    )


def same_bits(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> bool:
    return ours.keys() == reference.keys() and all(torch.equal(ours[name], reference[name]) for name in reference)


def step_of(module: Module, early: bool, data: Any, label: Any) -> None:
    """Take a step whose gradients leave while backward runs, or after it."""
    if early:
        module.forward_backward_update(data, label)
    else:
        module.forward_backward(data, label)
        module.update()


def replicas_are_equal(module: Module) -> None:
    """Check that all replicas have the same bits, in parameters and buffers."""
    first, *others = [replica.network.state_dict() for replica in module.bound.replicas.all]
    for other in others:
        assert [name for name in first if not torch.equal(first[name].cpu(), other[name].cpu())] == []
