"""How near ``work_load_list="auto"`` comes to the best fixed split: `python -m gangline.bench.balance`.

Two CPU contexts whose speeds are known: a layer waits for each sample, on one context as many times longer as a
factor says. Waiting takes no core, so that what is measured is the split and not the machine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from gangline.bench.report import Row, in_turn, publish, spread
from gangline.collectives import cpu
from gangline.collectives.workload import split_batch
from gangline.models.module import Module

_SECONDS = 1e-3  # of a sample on the fast context, forward and backward
_FEATURES, _CLASSES = 8, 4
_SWEEP_STEPS = 9
Loads = Sequence[float] | str


def main(
    factors: Annotated[str, typer.Option(help="How many times slower the second context is, with commas.")] = "1,3,10",
    batch_size: Annotated[int, typer.Option(help="Samples in a batch, over both contexts.", min=2)] = 64,
    epochs: Annotated[int, typer.Option(help="Epochs in which loads may settle.", min=2)] = 4,
    batches: Annotated[int, typer.Option(help="Batches in an epoch, and in a run.", min=2)] = 10,
    runs: Annotated[int, typer.Option(help="Runs of each side, in turn.", min=1)] = 15,
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
) -> None:
    """Measure "auto" beside the best of all fixed splits; at last where the speeds change places in mid-training."""
    speeds = _parsed(factors)
    rows = [row for factor in speeds for row in measure([1, factor], [], batch_size, epochs, batches, runs)]
    most = max(speeds)
    if most > 1:
        rows += measure([most, 1], [1, most], batch_size, epochs, batches, runs)
    command = f"balance --factors {factors} --batch-size {batch_size} --epochs {epochs} --batches {batches}"
    publish(f"{command} --runs {runs}", rows, json)


def measure(
    slowness: Sequence[float], at_first: Sequence[float], batch_size: int, epochs: int, batches: int, runs: int
) -> list[Row]:
    """Samples per second with "auto", once settled, and with the best fixed split.

    Args:
        slowness: how many times longer a sample takes on each context.
        at_first: the same for a first half of "auto"'s epochs; empty: as later.
        batch_size: over the contexts.
        epochs: that "auto" trains before it is measured, in each half.
        batches: of an epoch, and of a run.
        runs: of each side, in turn.
    """
    data = torch.zeros(batch_size, _FEATURES)
    label = torch.zeros(batch_size, dtype=torch.long)
    best = _best_split(slowness, data, label)
    with ExitStack() as stack:
        auto = stack.enter_context(_module("auto", at_first or slowness))
        if at_first:
            _train(auto, data, label, batches, range(epochs))
            slow_down(auto, [_SECONDS * factor for factor in slowness])
        _train(auto, data, label, batches, range(epochs, 2 * epochs))
        fixed = stack.enter_context(_module(best, slowness))
        sides = {
            who: _timed(partial(module.forward_backward_update, data, label), batches, batch_size)
            for who, module in (("auto", auto), ("best fixed split", fixed))
        }
        speeds = in_turn(sides, runs)
        splits = {"auto": _counts(batch_size, auto.work_load_list), "best fixed split": best}
    return [
        {
            "who": who,
            "contexts": len(slowness),
            "slowness": _ratio(slowness),
            "at_first": _ratio(at_first or slowness),
            "batch_size": batch_size,
            "split": _ratio(splits[who]),
            "samples_per_s": statistics.median(of_side),
            "ratio_to_best": statistics.median(
                ours / theirs for ours, theirs in zip(of_side, speeds["best fixed split"], strict=True)
            ),
            **spread(of_side),
        }
        for who, of_side in speeds.items()
    ]


class Wait(nn.Module):
    """Passes its input on after a wait for each sample, half of it in forward and half in backward."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds
        """For a sample."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Wait, and pass ``data`` on; where it needs a gradient, backward waits as well."""
        passed: torch.Tensor = _Waiting.apply(data, self.seconds * len(data) / 2)  # type: ignore[no-untyped-call]
        return passed


class _Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class WaitingNetwork(nn.Module):
    """A linear layer, a wait, and another linear layer."""

    def __init__(self, features: int = _FEATURES, classes: int = _CLASSES) -> None:
        super().__init__()
        self.first = nn.Linear(features, features)
        self.wait = Wait()
        self.last = nn.Linear(features, classes)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """(samples, features) to (samples, classes)."""
        output: torch.Tensor = self.last(self.wait(self.first(data)))
        return output


def slow_down(module: Module, seconds: Sequence[float]) -> None:
    """Have the ``wait`` layer of each replica take so many seconds a sample, given for all contexts."""
    for replica in module.bound.replicas.all:
        wait = replica.network.get_submodule("wait")
        if not isinstance(wait, Wait):
            raise TypeError(f"the network's layer 'wait' is a {type(wait).__name__}; expected a Wait")
        wait.seconds = seconds[replica.context_index]


@contextmanager
def _module(loads: Loads, slowness: Sequence[float]) -> Iterator[Module]:
    contexts = [cpu(index) for index in range(len(slowness))]
    with Module(WaitingNetwork(), nn.CrossEntropyLoss(), contexts, loads) as module:
        slow_down(module, [_SECONDS * factor for factor in slowness])
        module.init_optimizer("device", "sgd", {"lr": 0.01})
        yield module


def _train(module: Module, data: torch.Tensor, label: torch.Tensor, batches: int, epochs: range) -> None:
    repeated = [(data, label)] * batches
    module.fit(repeated, num_epoch=epochs.stop, begin_epoch=epochs.start)


def _best_split(slowness: Sequence[float], data: torch.Tensor, label: torch.Tensor) -> list[int]:
    """The counts for two contexts whose step takes least, of all there are.

    Those that wait longer than a whole step of the best so far need no measuring.
    """
    size = len(data)
    fastest, best = math.inf, [size, 0]
    by_wait = sorted((_waits([first, size - first], slowness), first) for first in range(size + 1))
    for wait, first in by_wait:
        if wait >= fastest:
            break
        with _module([first, size - first], slowness) as module:
            step = partial(module.forward_backward_update, data, label)
            step()
            took = statistics.median(_seconds(step) for _ in range(_SWEEP_STEPS))
        if took < fastest:
            fastest, best = took, [first, size - first]
    return best


def _waits(counts: Sequence[int], slowness: Sequence[float]) -> float:
    """Seconds that the slowest share of a step waits."""
    return _SECONDS * max(n * factor for n, factor in zip(counts, slowness, strict=True))


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _timed(step: Callable[[], None], batches: int, batch_size: int) -> Callable[[], float]:
    def run() -> float:
        step()
        began = time.perf_counter()
        for _ in range(batches):
            step()
        return batches * batch_size / (time.perf_counter() - began)

    return run


def _counts(size: int, loads: Sequence[float]) -> list[int]:
    return [part.stop - part.start for part in split_batch(size, loads)]


def _ratio(numbers: Sequence[float]) -> str:
    return ":".join(f"{number:g}" for number in numbers)


def _parsed(factors: str) -> list[float]:
    try:
        found = [float(word) for word in factors.split(",")]
    except ValueError:
        raise ValueError(f"--factors is {factors!r}; expected numbers with commas, such as 1,3,10") from None
    if not all(1 <= factor <= 1000 for factor in found):
        raise ValueError(f"--factors is {factors!r}; expected numbers from 1 to 1000")
    return found


if __name__ == "__main__":
    typer.run(main)
