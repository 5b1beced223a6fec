"""`gangline train --advise`: how long a step of one, two or more contexts takes, and how many pay at a batch size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gangline.models import import_by_name
from gangline.models.data.batches import Batch, concat, num_samples, take
from gangline.models.data.sources import source
from gangline.models.load_balance.speed_model import LinearFit, fit_line
from gangline.models.module import Module

_BLOCKS = 7
"""Times that a batch size is measured; the median counts."""
_BLOCK_SECONDS = 0.15
_WARM_UP = 3  # steps
_LEAST_GAIN = 1.05
"""Ratio of speeds from which more contexts are advised."""
_LARGEST_BATCH = 1 << 20
_FARTHEST = 16
"""Largest batch size that is verified, in times the given one."""


@dataclass(frozen=True)
class ContextCount:
    """Model of the step time of a number of contexts."""

    contexts: int
    fit: LinearFit
    """Seconds of a step by the samples of its batch."""
    pays_from: int | None
    """Batch size from which it is faster than every smaller number of contexts; None: none."""


@dataclass(frozen=True)
class Check:
    """A batch size that was predicted, and then measured."""

    contexts: int
    batch_size: int
    predicted: float
    """Seconds of a step."""
    measured: float

    @property
    def error(self) -> float:
        """The prediction's error, relative to what was measured."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Scaling:
    """Step times of several numbers of contexts, and what they advise."""

    batch_size: int
    counts: tuple[ContextCount, ...]
    checks: tuple[Check, ...] = ()

    @property
    def best(self) -> ContextCount:
        """The fastest number of contexts at the batch size; more contexts must be noticeably faster than fewer."""
        best = self.counts[0]
        for one in self.counts[1:]:
            if best.fit.seconds(self.batch_size) > _LEAST_GAIN * one.fit.seconds(self.batch_size):
                best = one
        return best

    @property
    def verdict(self) -> str:
        """What to do, in a line."""
        size, last, first = self.batch_size, self.counts[-1], self.counts[0]
        ratio = first.fit.seconds(size) / last.fit.seconds(size)
        if len(self.counts) == 1:
            return "one context was measured; name more of them to compare"
        if self.best is last:
            return f"{last.contexts} contexts are {ratio:.2f} times as fast as one at batch size {size}: keep them"
        where = f"at batch size {size} {last.contexts} contexts are {ratio:.2f} times as fast as one"
        if last.pays_from is None:
            return f"{where}, and no batch size makes them faster: train on {self.best.contexts}"
        return f"{where}; from {last.pays_from} samples on they win: --batch-size {_round(2 * last.pays_from)}"

    def as_json(self) -> dict[str, Any]:
        """Return it for json.dumps."""
        return {**asdict(self), "best": self.best.contexts, "verdict": self.verdict}

    def __str__(self) -> str:
        lines = ["contexts    fixed  per sample  step at " + f"{self.batch_size:<6} samples/s  wins from batch size"]
        for one in self.counts:
            seconds = one.fit.seconds(self.batch_size)
            wins = "" if one.contexts == 1 else "never" if one.pays_from is None else str(one.pays_from)
            lines.append(
                f"{one.contexts:<8} {one.fit.fixed * 1e3:>6.2f} ms {one.fit.per_sample * 1e6:>8.1f} us "
                f"{seconds * 1e3:>11.2f} ms {self.batch_size / seconds:>11.0f}  {wins:>8}"
            )
        if self.checks:
            lines += ["", "contexts  batch size  predicted  measured   error"]
        lines += [
            f"{one.contexts:<8} {one.batch_size:>11} {one.predicted * 1e3:>7.2f} ms {one.measured * 1e3:>6.2f} ms "
            f"{one.error:>6.0%}"
            for one in self.checks
        ]
        return "\n".join([*lines, "", f"Verdict: {self.verdict}"])


def scaling_of(
    make_module: Callable[[int], Module], contexts: int, train: Any, batch_size: int, *, verifies: bool
) -> Scaling:
    """Measure steps of 1 to ``contexts`` contexts and fit their times: seconds = fixed + per_sample * batch size.

    Args:
        make_module: returns a module with an optimizer on so many contexts.
        contexts: largest number of contexts.
        train: training data, as `Module.fit` accepts them.
        batch_size: batch size that the advice is for; half of it and four times it are measured.
        verifies: measure other batch sizes as well, and beside them what the fit predicts: ``batch_size``, twice it,
            and the one from which all contexts win.
    """
    sizes = (max(batch_size // 2, contexts), 4 * batch_size)
    samples = _samples(train, sizes[-1])
    fits: list[LinearFit] = []
    for count in range(1, contexts + 1):
        with _measuring(make_module(count), samples) as seconds:
            fits.append(fit_line([(float(size), seconds(size), 1.0) for size in sizes]))
    counts = tuple(ContextCount(count, fit, _pays_from(fit, fits[: count - 1])) for count, fit in enumerate(fits, 1))
    found = Scaling(batch_size, counts)
    if not verifies:
        return found
    others = {batch_size, 2 * batch_size, counts[-1].pays_from or batch_size}
    checks = []
    for one in counts:
        with _measuring(make_module(one.contexts), samples) as seconds:
            chosen = sorted(size for size in others if size <= _FARTHEST * batch_size)
            checks += [Check(one.contexts, size, one.fit.seconds(size), seconds(size)) for size in chosen]
    return Scaling(batch_size, counts, tuple(checks))


def _pays_from(fit: LinearFit, others: Sequence[LinearFit]) -> int | None:
    """Return the smallest batch size from which a fit is below the others."""
    least = 0.0
    for other in others:
        gain, cost = other.per_sample - fit.per_sample, fit.fixed - other.fixed
        if gain <= 0:
            return None
        least = max(least, cost / gain)
    return int(least) + 1 if least < _LARGEST_BATCH else None


@contextmanager
def _measuring(module: Module, samples: tuple[Batch, Batch]) -> Iterator[Callable[[int], float]]:
    """Yield a function from a batch size to the median seconds of a step; close the module in the end."""

    def steps(data: Batch, label: Batch, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            module.forward_backward_update(data, label)
        for context in module.contexts:
            if context.device_type == "gpu":
                torch.cuda.synchronize(context.torch_device)
        return (time.perf_counter() - began) / count

    def seconds(size: int) -> float:
        data, label = (_repeated(one, size) for one in samples)
        steps(data, label, _WARM_UP)
        count = max(1, round(_BLOCK_SECONDS / steps(data, label, _WARM_UP)))
        return statistics.median(steps(data, label, count) for _ in range(_BLOCKS))

    try:
        yield seconds
    finally:
        module.close()


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


def _round(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length()
