"""`gangline bench balance`: ``work_load_list="auto"`` beside the best fixed split of a batch.

The speeds of the two CPU contexts are known: a layer waits for each sample, on one context longer by a known factor.
Waiting uses no core, so the split is measured and not the machine.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.bench.report.machine import command_line
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row, spread
from gangline.bench.workload.options import Json, Runs
from gangline.collectives.errors import UsageError

if TYPE_CHECKING:
    import torch

    from gangline.models.module import Module

_SECONDS = 1e-3  # of a sample on the fast context, forward and backward
_SWEEP_STEPS = 9
Loads = Sequence[float] | str


def balance(
    factors: Annotated[
        str, typer.Option(help="Factors by which the second context is slower, with commas.")
    ] = "1,3,10",
    batch_size: Annotated[int, typer.Option(help="Samples in a batch, over both contexts.", min=2)] = 64,
    epochs: Annotated[int, typer.Option(help="Epochs in which the loads may settle.", min=2)] = 4,
    batches: Annotated[int, typer.Option(help="Batches in an epoch, and in a run.", min=2)] = 10,
    runs: Runs = 15,
    json: Json = None,
) -> None:
    """Measure "auto" beside the best of all fixed splits; finally with speeds that change during training."""
    check_outputs(json)
    speeds = _parsed(factors)
    rows = [row for factor in speeds for row in measure([1, factor], [], batch_size, epochs, batches, runs)]
    most = max(speeds)
    if most > 1:
        rows += measure([most, 1], [1, most], batch_size, epochs, batches, runs)
    publish(command_line(), rows, json)


def measure(
    slowness: Sequence[float], at_first: Sequence[float], batch_size: int, epochs: int, batches: int, runs: int
) -> list[Row]:
    """Measure samples per second with "auto", after it has settled, and with the best fixed split.

    Args:
        slowness: factor by which a sample takes longer, for each context.
        at_first: the same for the first half of "auto"'s epochs; empty: as later.
        batch_size: samples over all contexts.
        epochs: epochs that "auto" trains before it is measured, in each half.
        batches: batches in an epoch, and in a run.
        runs: number of runs of each candidate, in turn.
    """
    import torch

    from gangline.bench.driver.candidates import in_turn
    from gangline.bench.workload.waiting_network import slow_down

    data = torch.zeros(batch_size, 8)
    label = torch.zeros(batch_size, dtype=torch.long)
    best = _best_split(slowness, data, label)
    with ExitStack() as stack:
        auto = stack.enter_context(_module("auto", at_first or slowness))
        if at_first:
            _train(auto, data, label, batches, range(epochs))
            slow_down(auto, [_SECONDS * factor for factor in slowness])
        _train(auto, data, label, batches, range(epochs, 2 * epochs))
        fixed = stack.enter_context(_module(best, slowness))
        timed = {
            who: _timed(partial(module.forward_backward_update, data, label), batches, batch_size)
            for who, module in (("auto", auto), ("best fixed split", fixed))
        }
        speeds = in_turn(timed, runs)
        splits = {"auto": _counts(batch_size, auto.work_load_list), "best fixed split": best}
    return [
        {
            "who": who,
            "contexts": len(slowness),
            "slowness": _ratio(slowness),
            "at_first": _ratio(at_first or slowness),
            "batch_size": batch_size,
            "split": _ratio(splits[who]),
            "samples_per_s": statistics.median(of_candidate),
            "ratio_to_best": statistics.median(
                own / other for own, other in zip(of_candidate, speeds["best fixed split"], strict=True)
            ),
            **spread(of_candidate),
        }
        for who, of_candidate in speeds.items()
    ]


@contextmanager
def _module(loads: Loads, slowness: Sequence[float]) -> Iterator[Module]:
    from torch import nn

    from gangline.bench.workload.waiting_network import WaitingNetwork, slow_down
    from gangline.collectives import cpu
    from gangline.models.module import Module

    contexts = [cpu(index) for index in range(len(slowness))]
    with Module(WaitingNetwork(), nn.CrossEntropyLoss(), contexts, loads) as module:
        slow_down(module, [_SECONDS * factor for factor in slowness])
        module.init_optimizer("device", "sgd", {"lr": 0.01})
        yield module


def _train(module: Module, data: torch.Tensor, label: torch.Tensor, batches: int, epochs: range) -> None:
    repeated = [(data, label)] * batches
    module.fit(repeated, num_epoch=epochs.stop, begin_epoch=epochs.start)


def _best_split(slowness: Sequence[float], data: torch.Tensor, label: torch.Tensor) -> list[int]:
    """Return the sample counts of two contexts with the fastest step.

    A split whose wait alone exceeds the fastest step so far is not measured.
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
    """Return the longest wait of a context in a step, in seconds."""
    return _SECONDS * max(n * factor for n, factor in zip(counts, slowness, strict=True))


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _timed(step: Callable[[], None], batches: int, batch_size: int) -> Callable[[], float]:
    def run() -> float:
        step()
        start = time.perf_counter()
        for _ in range(batches):
            step()
        return batches * batch_size / (time.perf_counter() - start)

    return run


def _counts(size: int, loads: Sequence[float]) -> list[int]:
    from gangline.collectives.workload import split_batch

    return [share.stop - share.start for share in split_batch(size, loads)]


def _ratio(numbers: Sequence[float]) -> str:
    return ":".join(f"{number:g}" for number in numbers)


def _parsed(factors: str) -> list[float]:
    try:
        found = [float(word) for word in factors.split(",")]
    except ValueError:
        raise UsageError(f"--factors is {factors!r}; expected numbers with commas, such as 1,3,10") from None
    if not all(1 <= factor <= 1000 for factor in found):
        raise UsageError(f"--factors is {factors!r}; expected numbers from 1 to 1000")
    return found
