"""Speed model: loads of contexts, workers or ranks from measured times of their shares."""

from __future__ import annotations

import heapq
import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from gangline.collectives.workload import holding, split_batch, split_within

_MIN_GAIN = 0.03  # relative gain in step time that a new split must promise; without it splits would not settle
_MIN_GAIN_ON_ONE_DEVICE = 0.6  # the same over the equal split, on one device: a share 2.2 times slower than another
_GAIN_PER_SHIFT = 0.25  # the same, relative to a share's difference from an equal share
_CLEAR_GAIN = 0.15  # gain over the equal split that is kept despite noise
_STANDARD_ERRORS = 3.2  # of the measurements that a new split's gain must exceed
_MIN_SECONDS = 1.0  # of batches at a context's current speed before the split changes; preemptions are shorter
_SMALLEST_PART = 2  # a share may shrink to 1/2 of the smallest measured share
_DECAY = 0.7  # weight of a measurement relative to the next update's
_MAX_BATCHES = 16  # batches per update that add weight to its measurement
_ORIGIN_WEIGHT = 0.002  # weight of the assumption about the part of a time that is proportional to samples
_LEAST_ORIGIN_WEIGHT = 0.0001  # the same where times have no error
_FORGOTTEN = 0.05  # decay of the knowledge about that part per update
_OUTLIERS_FROM = 4  # number of batches from which averages replace the slowest by the second slowest
_MIN_SLOPE = 0.02  # minimum part of a share's time that is proportional to its samples
_CHANGED_SPEED = 1.3  # ratio to earlier times beyond which a context's speed has changed
_MIN_INTERVAL, _MAX_INTERVAL = 2, 64  # counted batches between two updates
_BLOCKS = 4  # blocks of an update's batches, whose averages estimate the variance
TRIAL_BATCHES = 3  # batches of an idle context's trial: one for warm-up, two measured
_TRIAL_COST = 0.03  # maximum cost of a trial, relative to the time since the last one


class SpeedModel:
    """Loads of contexts whose speeds are measured.

    A step takes as long as its slowest share, so in the best split all shares finish together. The time of a share of n
    samples is modelled as fixed + per_sample * n: for each context a least-squares line through its measurements, with
    decaying weights. (After the functional performance models of Lastovetsky and Reddy, IJHPCA 21(1), 2007.) The split
    stays equal until another split promises a gain above the error of the measurements, and becomes equal again if the
    gain vanishes. A context that would delay the others even with a single sample is left idle and tried again at the
    start of epochs.

    Call `record` after each batch, `begin_epoch` before each epoch, and `update_loads` when `due` is True.
    """

    loads: list[float]
    """Fractions of the batch, one per context, rounded to 4 digits, for `split_batch`."""
    interval: int
    """Number of counted batches from the last update to the next one."""

    def __init__(
        self,
        names: Sequence[str],
        logger: logging.Logger | None,
        *,
        minimum: int = 1,
        may_idle: bool = True,
        averages: bool = False,
        on_one_device: bool = False,
        counts_first: bool = False,
    ) -> None:
        """Start with equal loads.

        Args:
            names: names of the contexts, for logs and checkpoints.
            logger: receives one line per update of the loads; None: the caller logs.
            minimum: smallest share that is not empty.
            may_idle: False: every context has a share.
            averages: average a context's times since the last update, without the slowest batch, instead of taking the
                median: a process with a CPU quota runs at full speed in most batches and pauses in some.
            on_one_device: the contexts share one CPU or one GPU. Loads stay equal unless one context is much slower,
                because differences come from threads that wait for each other.
            counts_first: first batches count too, because the caller excludes warm-up.
        """
        self._logger = logger
        self._minimum, self._may_idle, self._averages = minimum, may_idle, averages
        self._on_one_device = on_one_device and len(names) > 1
        self.caps: list[int | None] = [None] * len(names)
        """Maximum number of samples of each context; None: no limit. New caps take effect at the next update."""
        self.names = list(names)
        self._counts_first = counts_first
        self._reset()

    def _reset(self) -> None:
        self._contexts = [_ContextSpeed(name, warm=self._counts_first) for name in self.names]
        self.loads = [round(1 / len(self._contexts), 4)] * len(self._contexts)
        self._sizes = [0, 0]  # largest batch before and since the last update
        self._counted = 0  # batches
        self._next_update = self.interval = _MIN_INTERVAL
        self._since_trial = 0
        self._is_unlogged = True

    def record(self, samples: Sequence[int], seconds: Sequence[float | None]) -> None:
        """Record samples and seconds of each context's share of a training batch; None or 0: not measured.

        A context's first batch, and its first after a change of the loads, is warm-up and does not count.
        """
        size = sum(samples)
        self._sizes[-1] = max(self._sizes[-1], size)
        self._since_trial += 1
        counted = [
            context.record(size, n, took) for context, n, took in zip(self._contexts, samples, seconds, strict=True)
        ]
        self._counted += any(counted)

    def due(self) -> bool:
        """Return True if the loads should be updated: after another 2, 4, 8, ..., 64 batches, earlier after changes."""
        return self._counted >= self._next_update

    def begin_epoch(self) -> bool:
        """Update the loads, and start a trial of idle contexts if it costs little; return True if one starts."""
        self.update_loads()
        return self._try_idle_contexts()

    def update_loads(self) -> bool:
        """Derive the loads from the records since the last update; log and return True if they changed."""
        size = max(self._sizes)
        elapsed = max(sum(share.seconds for share in context.recorded) for context in self._contexts)
        measured = [context.add_point(size, elapsed, averages=self._averages) for context in self._contexts]
        if not any(measured):
            return False
        self._sizes = [self._sizes[-1], 0]
        before = self._split(size)
        counts = self._better_split(size, before)
        if changed := counts != before:
            self._set_counts(counts)
        if changed or any(context.suspect for context in self._contexts):
            self.interval = max(self.interval // 2, _MIN_INTERVAL)
        else:
            self.interval = min(2 * self.interval, _MAX_INTERVAL)
        self._next_update = self._counted + self.interval
        if self._logger is not None and (changed or self._is_unlogged):
            self._is_unlogged = False
            self._log(self._logger, size)
        return changed

    def _better_split(self, size: int, before: list[int]) -> list[int]:
        """Return a split with a noticeably shorter step than the equal and the current split, else one of these."""
        fits, caps = self._fits(), holding(self.caps, size)
        equal = split_within(size, [1] * len(fits), caps, self._minimum)
        best = shortest_step(size, fits, self._floors(size), caps)
        if self._minimum > 1:
            best = split_within(size, best, caps, self._minimum)
        seconds = [step_seconds(counts, fits) for counts in (equal, before, best)]
        over_equal, over_present = (other / seconds[2] - 1 for other in seconds[:2])
        least, errors = (_MIN_GAIN_ON_ONE_DEVICE, 2) if self._on_one_device else (_MIN_GAIN, 1)
        shift = max(abs(n - of_equal) / max(of_equal, 1) for n, of_equal in zip(best, equal, strict=True))
        required = max(_MIN_GAIN, errors * self._error())
        least = max(required, least, _GAIN_PER_SHIFT * min(shift, 1.0))
        if any(cap is not None and n > cap for n, cap in zip(before, caps, strict=True)):
            return best
        if any(context.points and context.seconds < _MIN_SECONDS for context in self._contexts):
            return before
        if before == equal:
            return best if over_equal > least else before
        if over_equal <= min(least / 2, _CLEAR_GAIN):
            return equal
        return best if over_present > _MIN_GAIN else before  # that some are slower is known

    def _floors(self, size: int) -> list[int]:
        """Return the smallest shares that the measurements support."""
        floors = [min((int(n) for n, *_ in context.points), default=0) // _SMALLEST_PART for context in self._contexts]
        least = 0 if self._may_idle else self._minimum
        floors = [max(floor, least) for floor in floors]
        return floors if sum(floors) <= size else [least] * len(floors)

    def _error(self) -> float:
        """Return the relative error of the contexts' times."""
        known = [context for context in self._contexts if context.points]
        weights = sum(point.weight for context in known for point in context.points)
        squares = statistics.mean(context.squared_error() for context in known)
        return _STANDARD_ERRORS * (1 + 4 / max(1.0, weights - len(known))) * math.sqrt(squares)

    def state(self) -> dict[str, Any]:
        """Return loads and measurements as plain data."""
        return {
            "contexts": list(self.names),
            "loads": list(self.loads),
            "points": [[list(point) for point in context.points] for context in self._contexts],
            "batch_size": max(self._sizes),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; with other contexts, start from equal loads and log a warning."""
        self._reset()
        if state["contexts"] != self.names:
            (self._logger or logging.getLogger("gangline")).warning(
                "work_load_list auto: the saved loads are those of %s; %s will be measured again",
                ", ".join(state["contexts"]),
                ", ".join(self.names),
            )
            return
        self.loads = [float(load) for load in state["loads"]]
        self._sizes[0] = int(state["batch_size"])
        for context, points in zip(self._contexts, state["points"], strict=True):
            context.points = [_Point(*map(float, point)) for point in points]

    def _fits(self) -> list[LinearFit]:
        """Return the fit of each context; a context without measurements gets the average of the others."""
        known = [context.fit() for context in self._contexts if context.points]
        average = LinearFit(0.0, statistics.mean(fit.seconds(1000) / 1000 for fit in known))
        return [context.fit() if context.points else average for context in self._contexts]

    def _split(self, size: int) -> list[int]:
        return [part.stop - part.start for part in split_batch(size, self.loads, self._minimum)]

    def _set_counts(self, counts: Sequence[int]) -> None:
        is_equal = max(counts) - min(counts) <= 1
        parts = [1] * len(counts) if is_equal else counts
        self.loads = [max(round(n / sum(parts), 4), 0.0001) if n else 0.0 for n in parts]
        for context in self._contexts:
            context.warm = self._counts_first  # shares of a new size run other kernels and allocate memory

    def _try_idle_contexts(self) -> bool:
        """Give idle contexts a smallest share for a few batches, unless waiting for them would cost too much."""
        if all(self.loads) or not self._counted:
            return False
        fits, size = self._fits(), max(self._sizes)
        counts = self._split(size)
        step = step_seconds(counts, fits)
        trial = max(fit.seconds(self._minimum) for fit, load in zip(fits, self.loads, strict=True) if not load)
        if TRIAL_BATCHES * (trial - step) > _TRIAL_COST * self._since_trial * step:
            return False
        counts[counts.index(max(counts))] -= self._minimum * counts.count(0)
        self._set_counts([n or self._minimum for n in counts])
        self._next_update, self._since_trial = self._counted + TRIAL_BATCHES - 1, 0
        return True

    def expected_seconds(self, counts: Sequence[int]) -> float:
        """Return the expected time of a step with these samples per context; 0 before the first update."""
        return step_seconds(counts, self._fits()) if any(context.points for context in self._contexts) else 0.0

    def rates(self, size: int) -> list[float]:
        """Return the samples per second of each context alone, with the whole batch; empty before the first update."""
        if not any(context.points for context in self._contexts):
            return []
        return [size / fit.seconds(size) for fit in self._fits()]

    def _log(self, logger: logging.Logger, size: int) -> None:
        shares = ", ".join(
            f"{context.name} {load:.3g}" for context, load in zip(self._contexts, self.loads, strict=True)
        )
        is_equal = self._on_one_device and len(set(self.loads)) == 1
        stays = "; contexts on one device stay equal unless one is much slower" if is_equal else ""
        logger.info("work_load_list auto: %s (alone %s samples/s)%s", shares, listed_rates(self.rates(size)), stays)


def listed_rates(rates: Sequence[float]) -> str:
    """Return rates for a log line, such as "100, 50 and 33"."""
    *others, last = [f"{rate:.0f}" for rate in rates]
    return f"{', '.join(others)} and {last}" if others else last


@dataclass(frozen=True)
class LinearFit:
    """Linear model of a share's time."""

    fixed: float
    per_sample: float

    def seconds(self, samples: float) -> float:
        """Return the time of a share; 0 for an empty share."""
        return self.fixed + self.per_sample * samples if samples else 0.0


class _Recorded(NamedTuple):
    """A measured share."""

    size: int  # samples in the batch
    samples: int  # in the share
    seconds: float  # of the share


class _Point(NamedTuple):
    """The shares of a context between two updates."""

    samples: float
    seconds: float
    weight: float
    error: float = 0.0
    """Relative standard error of the time."""


@dataclass
class _ContextSpeed:
    name: str
    points: list[_Point] = field(default_factory=list)
    """One per update of the loads, the latest last."""
    seconds: float = 0.0
    """Total time of the batches measured since the speed last changed."""
    warm: bool = False
    recorded: list[_Recorded] = field(default_factory=list)
    """Shares since the last update."""
    proportion: float = 1.0
    """Part of a share's time that is proportional to its samples, estimated from shares of several sizes."""
    suspect: _Point | None = None
    """The last point if it is slower than earlier points: if the next point confirms it, the speed has changed."""

    def record(self, size: int, samples: int, seconds: float | None) -> bool:
        """Record a share; return False if it does not count."""
        if not samples or not seconds:
            return False
        counts, self.warm = self.warm, True
        if counts:
            self.recorded.append(_Recorded(size, samples, seconds))
        return counts

    def add_point(self, batch_size: int, elapsed: float, *, averages: bool) -> bool:
        """Turn the recorded shares of full batches into a point; return False if there are none."""
        full = [share for share in self.recorded if 2 * share.size >= batch_size]
        self.recorded = []
        if not full:
            return False
        rates = [share.seconds / share.samples for share in full]
        if len(rates) >= _OUTLIERS_FROM:  # one stall
            rates[rates.index(max(rates))] = sorted(rates)[-2]
        samples = statistics.mean(share.samples for share in full)
        rate = statistics.mean(rates) if averages else statistics.median_low(rates)
        point = _Point(samples, samples * rate, float(min(len(full), _MAX_BATCHES)), _standard_error(rates) / rate)
        self.seconds += elapsed
        suspect, self.suspect = self.suspect, None
        if suspect is not None and _is_consistent(suspect, point):
            self.points, self.seconds = [suspect], elapsed
        elif self.points and not _is_consistent(self.points[-1], point):
            if point.seconds > self.points[-1].seconds * max(1.0, samples / self.points[-1].samples):
                self.suspect = point  # perhaps disturbed by other work
                return True
            self.points, self.seconds = [], elapsed
        self.points = [*(old._replace(weight=_DECAY * old.weight) for old in self.points[-7:]), point]
        fit = self.fit()
        known = fit.per_sample * samples / fit.seconds(samples)
        self.proportion = known + _FORGOTTEN * (1 - known)
        return True

    def fit(self) -> LinearFit:
        """Fit a line to the points; the larger their errors, the more it relies on `proportion`."""
        origin = max(_LEAST_ORIGIN_WEIGHT, 4 * self._within())
        return fit_line([point[:3] for point in self.points], origin, self.proportion)

    def _within(self) -> float:
        """Return the squared relative error of the average time, from the points' errors."""
        weights = sum(point.weight for point in self.points)
        return sum((point.weight * point.error) ** 2 for point in self.points) / weights**2

    def squared_error(self) -> float:
        """Return the squared relative error of the fit, from the points' errors and residuals."""
        fit, weights = self.fit(), sum(point.weight for point in self.points)
        if len(self.points) < 2:
            return self._within()
        squares = sum(point.weight * (point.seconds / fit.seconds(point.samples) - 1) ** 2 for point in self.points)
        number = weights**2 / sum(point.weight**2 for point in self.points)
        return max(self._within(), squares / weights / max(number - 1, 0.5))


def _is_consistent(last: _Point, point: _Point) -> bool:
    """Return True if a time is between those predicted from the last one by fixed or proportional cost."""
    bounds = sorted((last.seconds, last.seconds * point.samples / last.samples))
    tolerance = max(_CHANGED_SPEED, 1 + _STANDARD_ERRORS * math.hypot(last.error, point.error))
    return bounds[0] / tolerance <= point.seconds <= bounds[1] * tolerance


def _standard_error(rates: Sequence[float]) -> float:
    """Return the standard error of the average of successive rates, which may be slow for several batches in a row."""
    if len(rates) < 2:
        return 0.0
    error = statistics.stdev(rates) / math.sqrt(len(rates))
    if len(rates) < _BLOCKS**2:
        return error
    cuts = [len(rates) * block // _BLOCKS for block in range(_BLOCKS + 1)]
    blocks = [statistics.mean(rates[begin:end]) for begin, end in pairwise(cuts)]
    return max(error, statistics.stdev(blocks) / math.sqrt(_BLOCKS))


def fit_line(
    points: Sequence[tuple[float, float, float]], origin: float = _ORIGIN_WEIGHT, proportion: float = 1.0
) -> LinearFit:
    """Fit a line to (samples, seconds, weight) by least squares.

    Shares of similar size do not determine the slope. A prior of small weight ``origin`` then does: ``proportion`` is
    the part of the time that is proportional to samples; 1: a line through the origin.
    """
    weights = sum(weight for *_, weight in points)
    samples = sum(weight * n for n, _, weight in points) / weights
    seconds = sum(weight * took for _, took, weight in points) / weights
    variance = sum(weight * (n - samples) ** 2 for n, _, weight in points) / weights
    covariance = sum(weight * (n - samples) * (took - seconds) for n, took, weight in points) / weights
    slope = (covariance + origin * proportion * samples * seconds) / (variance + origin * samples**2)
    slope = min(max(slope, _MIN_SLOPE * seconds / samples), seconds / samples)
    return LinearFit(seconds - slope * samples, slope)


def step_seconds(counts: Sequence[int], fits: Sequence[LinearFit]) -> float:
    """Return the time of a step: that of its slowest share."""
    return max(fit.seconds(n) for n, fit in zip(counts, fits, strict=True))


def shortest_step(
    size: int,
    fits: Sequence[LinearFit],
    floors: Sequence[int] | None = None,
    caps: Sequence[int | None] | None = None,
) -> list[int]:
    """Return the split of a batch of ``size`` whose slowest share finishes first.

    Each sample goes to the context that finishes it first, which is optimal because times grow with the share. Shares
    are at most ``caps``, and at least ``floors`` if these fit into the batch.
    """
    most = [None] * len(fits) if caps is None else caps
    counts = [0] * len(fits)
    if floors is not None and sum(floors) <= size:
        counts = [floor if cap is None else min(floor, cap) for floor, cap in zip(floors, most, strict=True)]
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
