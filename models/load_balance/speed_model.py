"""Balance: the loads of contexts whose speeds are measured while they train (``work_load_list="auto"``)."""

from __future__ import annotations

import heapq
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gangline.collectives.workload import split_batch

_WORTH = 0.015  # a new split must promise a step this much shorter, or the old one stays: so splits settle
_MEMORY = 0.7  # what a measurement counts at the next look, beside those made since
_MOST_BATCHES = 16  # more batches of one look make its measurement no surer
_NO_FIXED_COST = 0.002  # weight of the assumption that a share without samples takes no time
_LEAST_SLOPE = 0.05  # of the time of a share, the part that always counts as growing with its samples
_OTHER_SPEED = 1.3  # a time this far from what earlier ones allow: the context's speed has changed
_TRIAL_BATCHES = 3  # what an idle context is tried with: one to warm up, two measured
_TRIAL_COST = 0.03  # of the time since the last trial, what the next may cost


class AutoLoads:
    """The loads of contexts whose speeds are measured.

    A step takes as long as its slowest share, so the best split is the one whose shares end together. How long a share
    of n samples takes is taken to be fixed + per_sample * n: for each context a least-squares line through what was
    measured, older looks fading. (After the functional performance models of Lastovetsky and Reddy, IJHPCA 21(1),
    2007.) A context on which a single sample would hold up the others idles, and is tried again as epochs begin.

    Feed it with `record` after each batch, call `begin_epoch`, and `look` where `due` says so.
    """

    loads: list[float]
    """One a context, what `split_batch` takes: parts of the batch, to 4 digits."""

    def __init__(self, names: Sequence[str], logger: logging.Logger) -> None:
        """Begin with equal loads.

        Args:
            names: the contexts', for logs and checkpoints.
            logger: gets a line a look.
        """
        self._logger = logger
        self._contexts = [_Speed(name) for name in names]
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.loads = [round(1 / len(self._contexts), 4)] * len(self._contexts)
        self._sizes = [0, 0]  # the largest batch before the last look, and since
        self._counted = 0
        self._next_look: int | None = 2
        self._first_epoch = True
        self._since_trial = 0

    def record(self, samples: Sequence[int], seconds: Sequence[float | None]) -> None:
        """Note what a training batch took.

        The first batch of a context, and its first after a change of the loads, is warm-up and does not count.

        Args:
            samples: of each context's share.
            seconds: of each share's forward and backward; None, or 0: not measured.
        """
        size = sum(samples)
        self._sizes[-1] = max(self._sizes[-1], size)
        self._since_trial += 1
        counts = [
            context.note(size, n, took) for context, n, took in zip(self._contexts, samples, seconds, strict=True)
        ]
        self._counted += any(counts)

    def due(self) -> bool:
        """Whether to look now: in the first epoch after 2, 4, 8, ... counted batches, later only in trials."""
        return self._next_look is not None and self._counted >= self._next_look

    def begin_epoch(self) -> None:
        """Look again, and give contexts that idle a trial where it costs little."""
        self._first_epoch = self._first_epoch and not self._counted
        self.look()
        self._try_idle()

    def look(self) -> bool:
        """Settle the loads by what was recorded since the last look, and log them.

        Returns:
            Whether they changed; they stay where another split promises no shorter step worth the name.
        """
        self._next_look = max(2, 2 * self._counted) if self._first_epoch else None
        size = max(self._sizes)
        measured = [context.settle(size) for context in self._contexts]
        if not any(measured):
            return False
        self._sizes = [self._sizes[-1], 0]
        lines = self._lines()
        best = _shortest_step(size, lines)
        changed = _step_seconds(best, lines) * (1 + _WORTH) < _step_seconds(self._split(size), lines)
        if changed:
            self._take(best)
        self._log(self._split(size), lines)
        return changed

    def state(self) -> dict[str, Any]:
        """The loads and what they rest on, as plain data."""
        return {
            "contexts": [context.name for context in self._contexts],
            "loads": list(self.loads),
            "points": [[list(point) for point in context.points] for context in self._contexts],
            "batch_size": max(self._sizes),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned; with other contexts, from equal loads, and the log says so."""
        names = [context.name for context in self._contexts]
        self._contexts = [_Speed(name) for name in names]
        self._begin_anew()
        if state["contexts"] != names:
            self._logger.warning(
                "work_load_list auto: the loads saved are of %s; those of %s are measured anew",
                ", ".join(state["contexts"]),
                ", ".join(names),
            )
            return
        self.loads = [float(load) for load in state["loads"]]
        self._sizes[0] = int(state["batch_size"])
        for context, points in zip(self._contexts, state["points"], strict=True):
            context.points = [(float(n), float(took), float(weight)) for n, took, weight in points]

    def _lines(self) -> list[_Line]:
        """Each context's; one that was never measured counts as an average one."""
        known = [context.line() for context in self._contexts if context.points]
        average = _Line(0.0, statistics.mean(line.seconds(1000) / 1000 for line in known))
        return [context.line() if context.points else average for context in self._contexts]

    def _split(self, size: int) -> list[int]:
        return [part.stop - part.start for part in split_batch(size, self.loads)]

    def _take(self, counts: Sequence[int]) -> None:
        self.loads = [max(round(n / sum(counts), 4), 0.0001) if n else 0.0 for n in counts]
        for context in self._contexts:
            context.warm = False  # shares of another size meet other kernels and fresh memory

    def _try_idle(self) -> None:
        """Give contexts that idle one sample for a few batches, unless waiting for them would cost too much."""
        if all(self.loads) or not self._counted:
            return
        lines, size = self._lines(), max(self._sizes)
        counts = self._split(size)
        step = _step_seconds(counts, lines)
        tried = max(line.seconds(1) for line, load in zip(lines, self.loads, strict=True) if not load)
        if _TRIAL_BATCHES * (tried - step) > _TRIAL_COST * self._since_trial * step:
            return
        counts[counts.index(max(counts))] -= counts.count(0)
        self._take([n or 1 for n in counts])
        self._next_look, self._since_trial = self._counted + _TRIAL_BATCHES - 1, 0

    def _log(self, counts: Sequence[int], lines: Sequence[_Line]) -> None:
        shares = ", ".join(
            f"{context.name} {load:.4f}" for context, load in zip(self._contexts, self.loads, strict=True)
        )
        *speeds, last = [f"{max(n, 1) / line.seconds(max(n, 1)):.1f}" for n, line in zip(counts, lines, strict=True)]
        self._logger.info(
            "work_load_list auto: %s (%s samples/s)", shares, f"{', '.join(speeds)} and {last}" if speeds else last
        )


@dataclass(frozen=True)
class _Line:
    """How long a share takes, by its samples."""

    fixed: float
    per_sample: float

    def seconds(self, samples: int) -> float:
        """Of a share; an empty one takes none."""
        return self.fixed + self.per_sample * samples if samples else 0.0


@dataclass
class _Speed:
    """What is known of one context's speed."""

    name: str
    points: list[tuple[float, float, float]] = field(default_factory=list)
    """(samples, seconds, weight), one a look, the latest last."""
    warm: bool = False
    recorded: list[tuple[int, int, float]] = field(default_factory=list)
    """(samples of the batch, of the share, seconds of the share) since the last look."""

    def note(self, size: int, samples: int, seconds: float | None) -> bool:
        """Record a share; False where it does not count."""
        if not samples or not seconds:
            return False
        counts, self.warm = self.warm, True
        if counts:
            self.recorded.append((size, samples, seconds))
        return counts

    def settle(self, batch_size: int) -> bool:
        """Make a point of what was recorded, partial batches aside; False where there is nothing."""
        whole = [(n, seconds) for size, n, seconds in self.recorded if 2 * size >= batch_size]
        self.recorded = []
        if not whole:
            return False
        samples = float(statistics.median_low(n for n, _ in whole))
        seconds = samples * statistics.median_low(seconds / n for n, seconds in whole)
        if self.points and not self._allows(samples, seconds):
            self.points = []
        faded = [(n, took, _MEMORY * weight) for n, took, weight in self.points[-7:]]
        self.points = [*faded, (samples, seconds, float(min(len(whole), _MOST_BATCHES)))]
        return True

    def _allows(self, samples: float, seconds: float) -> bool:
        """Whether a context as fast as at the last look could take this long: fixed cost only, or none at all."""
        before, took, _ = self.points[-1]
        bounds = sorted((took, took * samples / before))
        return bounds[0] / _OTHER_SPEED <= seconds <= bounds[1] * _OTHER_SPEED

    def line(self) -> _Line:
        """The least-squares line through the points.

        Shares of about one size say nothing of the slope; a little weight on a line through the origin settles it then.
        """
        weights = sum(weight for *_, weight in self.points)
        samples = sum(weight * n for n, _, weight in self.points) / weights
        seconds = sum(weight * took for _, took, weight in self.points) / weights
        spread = sum(weight * (n - samples) ** 2 for n, _, weight in self.points) / weights
        rise = sum(weight * (n - samples) * (took - seconds) for n, took, weight in self.points) / weights
        slope = (rise + _NO_FIXED_COST * samples * seconds) / (spread + _NO_FIXED_COST * samples**2)
        slope = min(max(slope, _LEAST_SLOPE * seconds / samples), seconds / samples)
        return _Line(seconds - slope * samples, slope)


def _step_seconds(counts: Sequence[int], lines: Sequence[_Line]) -> float:
    return max(line.seconds(n) for n, line in zip(counts, lines, strict=True))


def _shortest_step(size: int, lines: Sequence[_Line]) -> list[int]:
    """The split of a batch of ``size`` whose slowest share is over first; a share may be empty.

    Each sample goes where it is done first, which is best since shares only take longer as they grow.
    """
    counts = [0] * len(lines)
    ends = [(line.seconds(1), index) for index, line in enumerate(lines)]
    heapq.heapify(ends)
    for _ in range(size):
        _, index = ends[0]
        counts[index] += 1
        heapq.heapreplace(ends, (lines[index].seconds(counts[index] + 1), index))
    return counts
