"""Step times of one, two or more devices over the batch size: what was measured, what it predicts, how many pay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from gangline.usage_error import UsageError

_LEAST_GAIN = 1.05
"""Ratio of speeds from which more devices are advised."""
_SUSPICIOUS = 1.5
"""Ratio of speeds, per device, above which the measurement is not believed."""
_LARGEST_BATCH = 1 << 20
_LONGEST_STEP = 0.5
"""Seconds of a step up to which a batch size is measured to find the one from which all devices win."""
_REFINEMENTS = 5
"""Largest number of batch sizes that are measured for that."""
_NEAR = 1.15
"""Ratio to a measured batch size within which no other is measured."""


def fitted_sizes(batch_size: int, least: int) -> tuple[int, ...]:
    """Return the batch sizes to measure for predictions around a batch size; ``least`` is the smallest possible."""
    return tuple(
        sorted({max(size, least) for size in (batch_size // 2, round(1.4 * batch_size), 4 * max(batch_size, least))})
    )


@dataclass(frozen=True)
class StepTimes:
    """Step times of a number of devices: lines between the batch sizes that were measured."""

    count: int
    """Number of devices."""
    points: tuple[tuple[float, float], ...]
    """(batch size, seconds of a step), two or more, by ascending batch size."""

    def seconds(self, batch_size: float) -> float:
        """Return the predicted seconds of a step; beyond the points the line through the nearest two goes on."""
        pairs = list(pairwise(self.points))
        (size, seconds), (larger, longer) = next((pair for pair in pairs if batch_size <= pair[1][0]), pairs[-1])
        slope = max((longer - seconds) / (larger - size), 0.0)
        if batch_size < size:
            slope = min(slope, seconds / size)  # no step takes less than no time
        return seconds + slope * (batch_size - size)

    def wins_from(self, others: Sequence[StepTimes]) -> int | None:
        """Return the batch size from which a step is shorter than those of all others; None if there is none."""

        def wins(size: int) -> bool:
            return all(self.seconds(size) < other.seconds(size) for other in others)

        size = step = _LARGEST_BATCH
        if not wins(size):
            return None
        while step and size > 1:
            step = min(step, max(size // 50, 1))
            if wins(size - step):
                size -= step
            else:
                step //= 2
        return size


def refined(
    times: Sequence[StepTimes], measure: Callable[[int, int], tuple[float, float]], farthest: int
) -> list[StepTimes]:
    """Measure where the lines through the measured times meet, until they meet near a batch size that was measured.

    ``times`` are by ascending number of devices; ``measure`` returns samples and seconds of a step for a number of
    devices and a batch size, which fails with UsageError if memory does not suffice, for example. If the lines do not
    meet, the farthest batch size is measured.
    """
    times, tried = list(times), [size for size, _ in times[-1].points]
    while farthest > 1 and max(one.seconds(farthest) for one in times) > _LONGEST_STEP:
        farthest //= 2
    for _ in range(_REFINEMENTS):
        size = min(times[-1].wins_from(times[:-1]) or farthest, farthest)
        if size < times[-1].count or any(known / _NEAR <= size <= known * _NEAR for known in tried):
            break
        try:
            points = [measure(one.count, size) for one in times]
        except UsageError:
            break
        tried.append(size)
        times = [
            StepTimes(one.count, tuple(sorted((dict(one.points) | dict([point])).items())))
            for one, point in zip(times, points, strict=True)
        ]
    return times


@dataclass(frozen=True)
class Scaling:
    """Step times of several numbers of devices, and what they advise."""

    unit: str
    """"context" or "process"."""
    batch_size: int
    """Samples of all devices in a step that the advice is for."""
    times: tuple[StepTimes, ...]
    """By ascending number of devices."""

    @property
    def units(self) -> str:
        """Plural of the unit."""
        return f"{self.unit}es" if self.unit.endswith("s") else f"{self.unit}s"

    @property
    def best(self) -> StepTimes:
        """The fastest number of devices at the batch size; more devices must be noticeably faster than fewer."""
        best = self.times[0]
        for one in self.times[1:]:
            if best.seconds(self.batch_size) > _LEAST_GAIN * one.seconds(self.batch_size):
                best = one
        return best

    @property
    def wins_from(self) -> Mapping[int, int | None]:
        """Batch size from which each number of devices is faster than every smaller one; None: none."""
        return {one.count: one.wins_from(self.times[:index]) for index, one in enumerate(self.times)}

    @property
    def verdict(self) -> str:
        """Advice in a line."""
        size, first, last = self.batch_size, self.times[0], self.times[-1]
        if len(self.times) == 1:
            return f"one {self.unit} was measured; name more of them to compare"
        ratio = first.seconds(size) / last.seconds(size)
        text = f"with batches of {size}, {last.count} {self.units} are {ratio:.2f} times as fast as {first.count}"
        if ratio > _SUSPICIOUS * last.count:
            return f"{text}, which cannot be: other work disturbs this machine, or OMP_NUM_THREADS=1 is not set"
        if self.best is last:
            return f"{text}: keep them"
        wins_from = self.wins_from[last.count]
        if wins_from is None:
            return f"{text}, and no batch size makes them faster: train on {self.best.count}"
        return (
            f"{text}; from {wins_from} samples on they win: use a batch size of {1 << (2 * wins_from - 1).bit_length()}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return it for json.dumps."""
        return {**asdict(self), "best": self.best.count, "wins_from": self.wins_from, "verdict": self.verdict}

    def __str__(self) -> str:
        wins_from = self.wins_from
        lines = [
            f"{self.unit + ' count':<14} {'step at ' + str(self.batch_size):>13}  samples/s  faster from batch size"
        ]
        for one in self.times:
            seconds = one.seconds(self.batch_size)
            wins = "" if one is self.times[0] else str(wins_from[one.count] or "never")
            lines.append(f"{one.count:<14} {seconds * 1e3:>10.2f} ms {self.batch_size / seconds:>10.0f}  {wins:>22}")
        return "\n".join([*lines, "", f"Verdict: {self.verdict}"])
