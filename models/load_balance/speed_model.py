"""Speed model: loads of contexts from measured times of their shares."""

from __future__ import annotations

import heapq
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gangline.collectives.workload import split_batch

_MIN_GAIN = 0.015  # relative gain in step time that a new split must promise; without it splits would not settle
_DECAY = 0.7  # weight of a measurement relative to the next update's
_MAX_BATCHES = 16  # batches per update that add weight to its measurement
_ORIGIN_WEIGHT = 0.002  # weight of the assumption that an empty share takes no time
_OUTLIERS_FROM = 4  # batches from which the slowest one counts as the second slowest in sums
_MIN_SLOPE = 0.05  # part of a share's time that always counts as proportional to its samples
_CHANGED_SPEED = 1.3  # deviation from earlier times beyond which the context's speed has changed
_UPDATE_INTERVAL = 64  # maximum number of counted batches between two updates
_TRIAL_BATCHES = 3  # batches of an idle context's trial: one for warm-up, two measured
_TRIAL_COST = 0.03  # maximum cost of a trial, relative to the time since the last one


class SpeedModel:
    """Loads of contexts whose speeds are measured.

    A step takes as long as its slowest share, so the best split is the one whose shares finish together. The time of a
    share of n samples is modelled as fixed + per_sample * n: for each context a least-squares line through its
    measurements, with decaying weights. (After the functional performance models of Lastovetsky and Reddy, IJHPCA
    21(1), 2007.) A context on which a single sample would delay the others is left idle, and is tried again at the
    start of epochs.

    Call `record` after each batch, `begin_epoch` before each epoch, and `update_loads` when `due` is True.
    """

    loads: list[float]
    """Fractions of the batch, one per context, rounded to 4 digits, for `split_batch`."""

    def __init__(
        self,
        names: Sequence[str],
        logger: logging.Logger | None,
        least: int = 0,
        min_gain: float = _MIN_GAIN,
        *,
        averages: bool = False,
    ) -> None:
        """Start with equal loads.

        Args:
            names: names of the contexts, for logs and checkpoints.
            logger: receives one line per update of the loads; None: the caller logs.
            least: minimum number of samples of each context; 0: contexts may idle.
            min_gain: relative gain in step time that a new split must promise.
            averages: the time of a context is that of `totals` since the last update; False: the median.
        """
        self._logger = logger
        self._least = least
        self._min_gain = min_gain
        self._averages = averages
        self.caps: list[int | None] = [None] * len(names)
        """Maximum number of samples of each context; None: no limit. New caps take effect at the next update."""
        self._contexts = [_ContextSpeed(name) for name in names]
        self._reset()

    def _reset(self) -> None:
        self.loads = [round(1 / len(self._contexts), 4)] * len(self._contexts)
        self._sizes = [0, 0]  # largest batch before the last update, and since
        self._counted = 0
        self._next_update = 2
        self._since_trial = 0
        self._is_unlogged = True

    def record(self, samples: Sequence[int], seconds: Sequence[float | None]) -> None:
        """Record the times of a training batch.

        A context's first batch, and its first after a change of the loads, is warm-up and does not count.

        Args:
            samples: samples in each context's share.
            seconds: time of each share's forward and backward; None or 0: not measured.
        """
        size = sum(samples)
        self._sizes[-1] = max(self._sizes[-1], size)
        self._since_trial += 1
        counted = [
            context.record(size, n, took) for context, n, took in zip(self._contexts, samples, seconds, strict=True)
        ]
        self._counted += any(counted)

    def record_totals(
        self, size: int, batches: Sequence[int], samples: Sequence[int], seconds: Sequence[float]
    ) -> None:
        """Record sums over several batches, none of them warm-up.

        Args:
            size: samples in a batch, over all contexts.
            batches: number of measured batches of each context; 0: none was measured.
            samples: samples of each context in these batches.
            seconds: time of each context for these batches.
        """
        self._sizes[-1] = max(self._sizes[-1], size)
        for context, count, n, took in zip(self._contexts, batches, samples, seconds, strict=True):
            if count and n and took > 0:
                context.recorded.append(_Recorded(size, n / count, took / count, count))
        self._counted += max(batches)
        self._since_trial += max(batches)

    def due(self) -> bool:
        """Return True if the loads should be updated: after 2, 4, 8, ..., 64 counted batches, then after each 64."""
        return self._counted >= self._next_update

    def begin_epoch(self) -> None:
        """Update the loads, and start a trial of idle contexts if it costs little."""
        self.update_loads()
        self._try_idle_contexts()

    def update_loads(self) -> bool:
        """Derive the loads from what was recorded since the last update; log them the first time and if they change.

        Returns:
            True if they changed; they stay unless another split promises a noticeably shorter step.
        """
        self._next_update = next_update(self._counted)
        size = max(self._sizes)
        measured = [context.add_point(size, averages=self._averages) for context in self._contexts]
        if not any(measured):
            return False
        self._sizes = [self._sizes[-1], 0]
        fits = self._fits()
        best = shortest_step(size, fits, self._least, self.caps)
        current = self._split(size)
        changed = step_seconds(best, fits) * (1 + self._min_gain) < step_seconds(current, fits) or any(
            cap is not None and n > cap for n, cap in zip(current, self.caps, strict=True)
        )
        if changed:
            self._set_counts(best)
        if self._logger is not None and (changed or self._is_unlogged):
            self._is_unlogged = False
            self._log(self._logger, self._split(size))
        return changed

    def state(self) -> dict[str, Any]:
        """Return loads and measurements as plain data."""
        return {
            "contexts": [context.name for context in self._contexts],
            "loads": list(self.loads),
            "points": [[list(point) for point in context.points] for context in self._contexts],
            "batch_size": max(self._sizes),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; with other contexts, start from equal loads and log a warning."""
        names = [context.name for context in self._contexts]
        self._contexts = [_ContextSpeed(name) for name in names]
        self._reset()
        if state["contexts"] != names:
            (self._logger or logging.getLogger("gangline")).warning(
                "work_load_list auto: the saved loads are those of %s; %s will be measured again",
                ", ".join(state["contexts"]),
                ", ".join(names),
            )
            return
        self.loads = [float(load) for load in state["loads"]]
        self._sizes[0] = int(state["batch_size"])
        for context, points in zip(self._contexts, state["points"], strict=True):
            context.points = [(float(n), float(took), float(weight)) for n, took, weight in points]

    def _fits(self) -> list[LinearFit]:
        """Return the fit of each context; a context without measurements gets the average of the others."""
        known = [context.fit() for context in self._contexts if context.points]
        average = LinearFit(0.0, statistics.mean(fit.seconds(1000) / 1000 for fit in known))
        return [context.fit() if context.points else average for context in self._contexts]

    def _split(self, size: int) -> list[int]:
        return [part.stop - part.start for part in split_batch(size, self.loads)]

    def _set_counts(self, counts: Sequence[int]) -> None:
        self.loads = [max(round(n / sum(counts), 4), 0.0001) if n else 0.0 for n in counts]
        for context in self._contexts:
            context.warm = False  # shares of another size run other kernels and allocate memory

    def _try_idle_contexts(self) -> None:
        """Give idle contexts one sample for a few batches, unless waiting for them would cost too much."""
        if all(self.loads) or not self._counted:
            return
        fits, size = self._fits(), max(self._sizes)
        counts = self._split(size)
        step = step_seconds(counts, fits)
        trial = max(fit.seconds(1) for fit, load in zip(fits, self.loads, strict=True) if not load)
        if _TRIAL_BATCHES * (trial - step) > _TRIAL_COST * self._since_trial * step:
            return
        counts[counts.index(max(counts))] -= counts.count(0)
        self._set_counts([n or 1 for n in counts])
        self._next_update, self._since_trial = self._counted + _TRIAL_BATCHES - 1, 0

    def expected_seconds(self, counts: Sequence[int]) -> float:
        """Return the expected time of a step with these samples per context; 0 before the first update."""
        return step_seconds(counts, self._fits()) if any(context.points for context in self._contexts) else 0.0

    def rates(self, counts: Sequence[int]) -> list[float]:
        """Return the samples per second of each context alone with this share; empty before the first update."""
        if not any(context.points for context in self._contexts):
            return []
        return [max(n, 1) / fit.seconds(max(n, 1)) for n, fit in zip(counts, self._fits(), strict=True)]

    def _log(self, logger: logging.Logger, counts: Sequence[int]) -> None:
        shares = ", ".join(
            f"{context.name} {load:.3g}" for context, load in zip(self._contexts, self.loads, strict=True)
        )
        logger.info("work_load_list auto: %s (alone %s samples/s)", shares, listed_rates(self.rates(counts)))


def listed_rates(rates: Sequence[float]) -> str:
    """Return rates for a log line, such as "100, 50 and 33"."""
    *others, last = [f"{rate:.0f}" for rate in rates]
    return f"{', '.join(others)} and {last}" if others else last


@dataclass(frozen=True)
class LinearFit:
    """Linear model of a share's time."""

    fixed: float
    per_sample: float

    def seconds(self, samples: int) -> float:
        """Return the time of a share; an empty one takes none."""
        return self.fixed + self.per_sample * samples if samples else 0.0


class _Recorded(NamedTuple):
    """A measured share, or the average of several."""

    size: int  # samples in the batch
    samples: float  # in the share
    seconds: float  # of the share
    batches: int = 1


@dataclass
class _ContextSpeed:
    """Measurements of one context."""

    name: str
    points: list[tuple[float, float, float]] = field(default_factory=list)
    """(samples, seconds, weight), one per update of the loads, the latest last."""
    warm: bool = False
    recorded: list[_Recorded] = field(default_factory=list)
    """Shares since the last update."""

    def record(self, size: int, samples: int, seconds: float | None) -> bool:
        """Record a share; return False if it does not count."""
        if not samples or not seconds:
            return False
        counts, self.warm = self.warm, True
        if counts:
            self.recorded.append(_Recorded(size, samples, seconds))
        return counts

    def add_point(self, batch_size: int, *, averages: bool) -> bool:
        """Turn the recorded shares of full batches into a point; return False if there are none."""
        full = [share for share in self.recorded if 2 * share.size >= batch_size]
        self.recorded = []
        if not full:
            return False
        if averages:
            samples, seconds = (total / len(full) for total in totals([(each.samples, each.seconds) for each in full]))
        else:
            samples = float(statistics.median_low(share.samples for share in full))
            seconds = samples * statistics.median_low(share.seconds / share.samples for share in full)
        if self.points and not self._is_consistent(samples, seconds):
            self.points = []
        decayed = [(n, took, _DECAY * weight) for n, took, weight in self.points[-7:]]
        self.points = [*decayed, (samples, seconds, float(min(sum(share.batches for share in full), _MAX_BATCHES)))]
        return True

    def _is_consistent(self, samples: float, seconds: float) -> bool:
        """Return True if the time is between those predicted from the last point by fixed or proportional cost."""
        before, took, _ = self.points[-1]
        bounds = sorted((took, took * samples / before))
        return bounds[0] / _CHANGED_SPEED <= seconds <= bounds[1] * _CHANGED_SPEED

    def fit(self) -> LinearFit:
        """Fit a line to the points."""
        return fit_line(self.points)


def fit_line(points: Sequence[tuple[float, float, float]]) -> LinearFit:
    """Fit a line to (samples, seconds, weight) by least squares.

    Shares of similar size do not determine the slope; a small weight on a line through the origin then does.
    """
    weights = sum(weight for *_, weight in points)
    samples = sum(weight * n for n, _, weight in points) / weights
    seconds = sum(weight * took for _, took, weight in points) / weights
    variance = sum(weight * (n - samples) ** 2 for n, _, weight in points) / weights
    covariance = sum(weight * (n - samples) * (took - seconds) for n, took, weight in points) / weights
    slope = (covariance + _ORIGIN_WEIGHT * samples * seconds) / (variance + _ORIGIN_WEIGHT * samples**2)
    slope = min(max(slope, _MIN_SLOPE * seconds / samples), seconds / samples)
    return LinearFit(seconds - slope * samples, slope)


def step_seconds(counts: Sequence[int], fits: Sequence[LinearFit]) -> float:
    """Return the time of a step: that of its slowest share."""
    return max(fit.seconds(n) for n, fit in zip(counts, fits, strict=True))


def shortest_step(
    size: int, fits: Sequence[LinearFit], least: int = 0, caps: Sequence[int | None] | None = None
) -> list[int]:
    """Return the split of a batch of ``size`` whose slowest share finishes first.

    Each sample goes to the context that finishes it first, which is optimal since times grow with the share.

    Args:
        size: samples in the batch.
        fits: models of the contexts' times.
        least: minimum of a share, if the batch is large enough; 0: shares may be empty.
        caps: maximum of each share, None where there is no limit; None: no limits.

    Raises:
        ValueError: if the caps do not hold the batch.
    """
    most = [None] * len(fits) if caps is None else caps
    counts = [least if least * len(fits) <= size else 0] * len(fits)
    ends = [
        (fit.seconds(n + 1), index)
        for index, (fit, n, cap) in enumerate(zip(fits, counts, most, strict=True))
        if cap is None or n < cap
    ]
    heapq.heapify(ends)
    for _ in range(size - sum(counts)):
        if not ends:
            raise ValueError(f"a batch of {size} samples exceeds the maximum shares {list(most)} together")
        _, index = ends[0]
        counts[index] += 1
        if counts[index] == most[index]:
            heapq.heappop(ends)
        else:
            heapq.heapreplace(ends, (fits[index].seconds(counts[index] + 1), index))
    return counts


def next_update(counted: int) -> int:
    """Return the number of counted batches after which the next update is due: 2, 4, 8, ..., 64, 128, 192, ..."""
    return max(2, min(2 * counted, counted + _UPDATE_INTERVAL))


def totals(measured: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the sums of samples and seconds, without the worst of one stall.

    They are sums and not medians: a process with a CPU quota runs at full speed in most batches and pauses in some.
    """
    samples = sum(n for n, _ in measured)
    seconds = sum(took for _, took in measured)
    if len(measured) >= _OUTLIERS_FROM:
        *_, (second, _), (worst, n) = sorted((took / n, n) for n, took in measured)
        seconds -= (worst - second) * n
    return samples, seconds
