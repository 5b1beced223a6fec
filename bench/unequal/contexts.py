"""`gangline bench balance`: ``work_load_list="auto"`` beside the best fixed split of a batch.

The speeds of the two CPU contexts are known: a layer waits for each sample, on one context longer by a known factor.
Waiting uses no core, so the split is measured and not the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Annotated

import torch
import typer
from torch import nn

from gangline import cpu
from gangline.bench.driver.harness import in_turn
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import Row, spread, times_as_fast
from gangline.bench.unequal.waiting_network import WaitingNetwork, slow_down
from gangline.bench.workload.options import Json, Runs
from gangline.bench.workload.sizes import factors as parse_factors
from gangline.kvstore.workload import split_batch
from gangline.models.module import Module

_SECONDS = 1e-3  # of a sample on the fast context, forward and backward
_BEST = "best fixed split"


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
    """Measure "auto" beside the best fixed split; finally with speeds that change during training."""
    check_outputs(json)
    speeds = parse_factors(factors, "--factors", 1000)
    rows = [row for factor in speeds for row in measure([1, factor], [], batch_size, epochs, batches, runs)]
    most = max(speeds)
    if most > 1:
        rows += measure([most, 1], [1, most], batch_size, epochs, batches, runs)
    publish(rows, json)


def measure(
    slowness: Sequence[float], at_first: Sequence[float], batch_size: int, epochs: int, batches: int, runs: int
) -> list[Row]:
    """Measure samples per second with "auto", in its steady state, and with the optimal fixed split.

    Args:
        slowness: factor by which a sample takes longer, for each context.
        at_first: the same for the first half of "auto"'s epochs; empty: as later.
        batch_size: samples over all contexts.
        epochs: epochs that "auto" trains before it is measured, in each half.
        batches: batches in an epoch, and in a run.
        runs: number of runs of each candidate, in turn.
    """
    data, label = torch.zeros(batch_size, 8), torch.zeros(batch_size, dtype=torch.long)
    repeated = [(data, label)] * batches
    first = min(range(batch_size + 1), key=lambda count: max(count * slowness[0], (batch_size - count) * slowness[1]))
    best = [first, batch_size - first]
    with ExitStack() as stack:
        auto = stack.enter_context(_module("auto", at_first or slowness))
        if at_first:
            auto.fit(repeated, num_epoch=epochs)
            slow_down(auto, [_SECONDS * factor for factor in slowness])
        auto.fit(repeated, num_epoch=2 * epochs, begin_epoch=epochs)
        fixed = stack.enter_context(_module(best, slowness))
        steps = {
            who: partial(module.forward_backward_update, data, label)
            for who, module in (("auto", auto), (_BEST, fixed))
        }
        seconds = in_turn({who: _timed(step, batches) for who, step in steps.items()}, runs)
        shares = split_batch(batch_size, auto.work_load_list)
    splits = {"auto": [share.stop - share.start for share in shares], _BEST: best}
    rates = {who: [batch_size / each for each in of_candidate] for who, of_candidate in seconds.items()}
    return [
        {
            "who": who,
            "contexts": len(slowness),
            "slowness": _listed(slowness),
            "at_first": _listed(at_first or slowness),
            "batch_size": batch_size,
            "split": _listed(splits[who]),
            "samples_per_s": statistics.median(rates[who]),
            "ratio_to_best": times_as_fast(of_candidate, seconds[_BEST]),
            **spread(rates[who]),
        }
        for who, of_candidate in seconds.items()
    ]


@contextmanager
def _module(loads: Sequence[float] | str, slowness: Sequence[float]) -> Iterator[Module]:
    contexts = [cpu(index) for index in range(len(slowness))]
    with Module(WaitingNetwork(), nn.CrossEntropyLoss(), contexts, loads) as module:
        slow_down(module, [_SECONDS * factor for factor in slowness])
        module.init_optimizer("device", "sgd", {"lr": 0.01})
        yield module


def _timed(step: Callable[[], None], batches: int) -> Callable[[], float]:
    """Return a function that measures the seconds of a step."""

    def run() -> float:
        step()
        start = time.perf_counter()
        for _ in range(batches):
            step()
        return (time.perf_counter() - start) / batches

    return run


def _listed(numbers: Sequence[float]) -> str:
    return ":".join(f"{number:g}" for number in numbers)
