"""Measure steps of one, two or more contexts, and how many pay at a batch size: `gangline advise --scale`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gangline.advise.scaling import Check, Scaling, StepTimes, checked_sizes, fitted_sizes, refined
from gangline.models import import_by_name
from gangline.models.data.batches import Batch, concat, num_samples, take
from gangline.models.data.sources import source
from gangline.models.module import Module

_BLOCKS = 7
"""Times that a batch size is measured; the median counts."""
_BLOCK_SECONDS = 0.15
_WARM_UP = 3  # steps
_FARTHEST = 128
"""Largest batch size that is measured, in times the given one."""


def scaling_of(
    make_module: Callable[[int], Module], contexts: int, train: Any, batch_size: int, *, verifies: bool
) -> Scaling:
    """Measure steps of 1 to ``contexts`` contexts at the batch sizes that predict those around the given one.

    The batch size from which all contexts win is found by `refined`. ``verifies``: measure other batch sizes as well,
    beside what is predicted for them: those of `checked_sizes`, the one from which all contexts win, and twice that.
    """
    fitted = fitted_sizes(batch_size, contexts)
    checked = checked_sizes(batch_size) if verifies else ()
    samples = _samples(train, _FARTHEST * batch_size)

    def measured(count: int, sizes: Sequence[int]) -> dict[int, float]:
        with make_module(count) as module:
            return _step_seconds(module, samples, sizes)

    times, checks = [], []
    for count in range(1, contexts + 1):
        seconds = measured(count, (*fitted, *checked))
        times.append(StepTimes(count, tuple((size, seconds[size]) for size in fitted)))
        checks += [Check(count, size, times[-1].seconds(size), seconds[size]) for size in checked]
    if contexts == 1:
        return Scaling("context", batch_size, tuple(times), tuple(checks))
    times = refined(times, lambda count, size: measured(count, (size,))[size], _FARTHEST * batch_size)
    wins_from = times[-1].wins_from(times[:-1])
    if verifies and wins_from and wins_from <= _FARTHEST * batch_size:
        for one in times:
            seconds = measured(one.count, (wins_from, 2 * wins_from))
            checks += [Check(one.count, size, one.seconds(size), took) for size, took in seconds.items()]
    return Scaling("context", batch_size, tuple(times), tuple(checks))


def _step_seconds(module: Module, samples: tuple[Batch, Batch], sizes: Sequence[int]) -> dict[int, float]:
    """Return the median seconds of a step at each batch size.

    The batch sizes are measured in turn, so what disturbs the machine for a while disturbs all of them.
    """

    def steps(batch: tuple[Batch, Batch], count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            module.forward_backward_update(*batch)
        for context in module.contexts:
            if context.device_type == "gpu":
                torch.cuda.synchronize(context.torch_device)
        return (time.perf_counter() - began) / count

    batches = {size: (_repeated(samples[0], size), _repeated(samples[1], size)) for size in sizes}
    counts = {}
    for size, batch in batches.items():
        steps(batch, _WARM_UP)
        counts[size] = max(1, round(_BLOCK_SECONDS / steps(batch, _WARM_UP)))
    blocks = [{size: steps(batch, counts[size]) for size, batch in batches.items()} for _ in range(_BLOCKS)]
    return {size: statistics.median(block[size] for block in blocks) for size in batches}


def _samples(train: Any, most: int) -> tuple[Batch, Batch]:
    """Return up to ``most`` samples of the training data; of batches, the first one."""
    read = source(train, None if import_by_name.has_batches(train) else most, shuffle=False, seed=0, what="data")
    try:
        data, label, *_ = next(iter(read.epoch(0)))
        return concat([data], torch.device("cpu")), concat([label], torch.device("cpu"))
    finally:
        read.close()


def _repeated(batch: Batch, size: int) -> Batch:
    """Return so many samples, which are repeated if there are fewer."""
    own = num_samples(batch, "data")
    whole = [batch] * (size // own) + ([take(batch, slice(0, size % own))] if size % own else [])
    return whole[0] if len(whole) == 1 else concat(whole, torch.device("cpu"))
