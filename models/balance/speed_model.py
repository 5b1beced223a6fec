"""Speed model: loads of contexts, workers or ranks from the times of their last shares."""

from __future__ import annotations

import heapq
import logging
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from gangline.kvstore.workload import holding, split_within

WINDOW = 8
"""Measurements of each member that decide the split, and between two changes of it."""
TRIAL_BATCHES = 3
"""Batches of an idle member's trial: one for warm-up, two measured."""
_MIN_SECONDS = 0.125  # of training in a measurement: preemptions are shorter than a window
_MIN_GAIN = 0.03  # relative gain in step time that a new split must promise
_MIN_GAIN_ON_ONE_DEVICE = 0.6  # the same over the equal split, on one device: a share 2.2 times slower than another
_STANDARD_ERRORS = 3.0  # of the measurements that the gain must exceed
_MIN_PROPORTION = 0.02  # of a share's time that depends on its cost
_AGAINST = -0.5  # relative change of a time to that of its share that no fixed part explains
_CHANGED_COST = 0.1  # relative change of a share from which its time shows how far times follow shares
_CHANGED_SPEED = 0.15  # relative change of a speed from which that is unknown again
_TRIAL_COST = 0.03  # maximum cost of a trial, relative to the time since the last one


class SpeedModel:
    """Loads of members (contexts, workers or ranks) whose speeds are measured.

    A step takes as long as its slowest share, so in the best split all shares finish together. A member's speed is the
    median of its last 8 measurements of cost per second, where cost is samples, or what a loader's ``lengths`` count.
    The split changes if that promises a gain above the error of the measurements. A member that would delay the others
    even with the smallest share is left idle, if it may, and tried again at the start of epochs.

    Where a part of a share's time does not depend on its cost, the speeds change with the split, and repeated changes
    approach the best one. If times do not follow the shares at all, splits would wander: how far they do is learned
    from each change.
    """

    loads: list[float]
    """Fractions of the batch, one per member, rounded to 4 digits, for `split_batch`."""

    def __init__(
        self,
        names: Sequence[str],
        logger: logging.Logger | None,
        *,
        minimum: int = 1,
        may_idle: bool = True,
        on_one_device: bool = False,
        parts: int | None = None,
    ) -> None:
        """Start with equal loads.

        Args:
            names: names of the members, for logs and checkpoints.
            logger: receives one line per change of the loads; None: the caller logs.
            minimum: smallest share that is not empty.
            may_idle: False: every member has a share.
            on_one_device: the members share one CPU or one GPU. Loads stay equal unless one member is much slower,
                because differences come from threads that wait for each other.
            parts: equal parts into which a batch can be cut, whatever its cost; None: a sample each.
        """
        self.names = list(names)
        self._logger, self._minimum, self._may_idle, self._parts = logger, minimum, may_idle, parts
        self._on_one_device = on_one_device and len(names) > 1
        self.caps: list[int | None] = [None] * len(names)
        """Maximum number of samples (or parts) of each member; None: no limit. New caps take effect at once."""
        self._reset()

    def _reset(self) -> None:
        self.loads = [round(1 / len(self.names), 4)] * len(self.names)
        self._windows: list[deque[float]] = [deque(maxlen=WINDOW) for _ in self.names]  # seconds per cost
        self._sizes = [0.0, 0.0]  # cost of the largest batch in the window before, and in this one
        self._since_trial = 0.0  # seconds of steps
        self._measured = 0  # measurements since the last change
        self._required = _MIN_GAIN  # relative gain from which the split changes
        self._proportion = 1.0  # change of a share's time relative to that of its cost, as the last change showed
        self._changed_from: list[tuple[int, float]] | None = None  # shares and rates before the last change
        self._changed_to: list[float] = []  # rates after it
        self._is_unlogged = True
        self._begin_measurement()

    def _begin_measurement(self) -> None:
        self._elapsed = 0.0  # seconds of its steps
        self._sums = [[0.0, 0.0] for _ in self.names]  # seconds and cost of each member

    def record(self, costs: Sequence[float], seconds: Sequence[float | None]) -> bool:
        """Record cost and seconds of each member's share of a batch; return True if the loads changed.

        A share that was not measured has None or 0 seconds.
        """
        self._sizes[-1] = max(self._sizes[-1], sum(costs))
        for sums, cost, took in zip(self._sums, costs, seconds, strict=True):
            if cost and took:
                sums[0] += took
                sums[1] += cost
        step = max((took or 0.0 for took in seconds), default=0.0)
        self._elapsed += step
        self._since_trial += step
        if self._elapsed < _MIN_SECONDS:
            return False
        for window, (took, cost) in zip(self._windows, self._sums, strict=True):
            window.extend([took / cost] if cost else [])
        self._begin_measurement()
        self._measured += 1
        if not self._measured % WINDOW:
            self._sizes = [self._sizes[-1], 0.0]
        return self._measured >= WINDOW and self._update_loads()

    @property
    def _size(self) -> int:
        """Samples (or parts) of a full batch; 0 before the first one."""
        return int(max(self._sizes)) if self._parts is None else self._parts

    def _update_loads(self) -> bool:
        """Derive the loads from the last measurements; log and return True if they changed."""
        if not self._size or not any(self._windows):
            return False
        rates, error = self._rates(), max(map(_relative_error, self._windows))
        before = split_within(self._size, self.loads)
        self._learn_proportion(before, rates, error)
        counts = self._better_split(before, rates, error)
        if changed := counts != before:
            self._changed_from = list(zip(before, rates, strict=True))
            self._set_counts(counts)
        if self._logger is not None and (changed or self._is_unlogged):
            self._is_unlogged = False
            self._log(self._logger)
        return changed

    def _better_split(self, before: list[int], rates: list[float], error: float) -> list[int]:
        """Return a split with a noticeably shorter step than the present split, else that one."""
        size = self._size
        caps = holding(self.caps, size)
        floors = [0 if self._may_idle else min(self._minimum, size // len(before))] * len(before)
        slopes = [self._proportion * rate for rate in rates]
        fixed = [(1 - self._proportion) * rate * count for rate, count in zip(rates, before, strict=True)]
        best = shortest_step(size, slopes, caps, floors, self._minimum, fixed)
        if any(cap is not None and count > cap for count, cap in zip(before, caps, strict=True)):
            return best
        required = max(_MIN_GAIN, _STANDARD_ERRORS * error)
        gain = step_seconds(before, rates) / step_seconds(best, slopes, fixed) - 1
        if self._on_one_device:
            equal = shortest_step(size, [1.0] * len(rates), caps, floors, self._minimum)
            over_equal = step_seconds(equal, slopes, fixed) / step_seconds(best, slopes, fixed) - 1
            if before != equal and over_equal <= _MIN_GAIN_ON_ONE_DEVICE / 2:
                return equal
            if before == equal:
                required = max(required, _MIN_GAIN_ON_ONE_DEVICE)
        self._required = required
        return best if gain > required else before

    def _learn_proportion(self, shares: list[int], rates: list[float], error: float) -> None:
        """Compare times before and after the last change: the largest response counts, for others may have slowed."""
        if self._changed_from is not None:
            self._changed_to = rates
            responses = [
                1 + math.log(rate / rate_before) / math.log(share / share_before)
                for (share_before, rate_before), share, rate in zip(self._changed_from, shares, rates, strict=True)
                if share and share_before and abs(share / share_before - 1) > _CHANGED_COST
            ]
            # A time that moves against its share shows another speed.
            response = max((one for one in responses if one > _AGAINST), default=1.0)
            self._proportion = min(max(response, _MIN_PROPORTION), 1.0)
            self._changed_from = None
        limit = max(_CHANGED_SPEED, _STANDARD_ERRORS * error)
        if any(abs(rate / after - 1) > limit for rate, after in zip(rates, self._changed_to, strict=False)):
            self._proportion, self._changed_to = 1.0, []

    def _rates(self) -> list[float]:
        """Return the median seconds per unit of cost of each member; one without measurements gets the average."""
        medians = [statistics.median(window) if window else None for window in self._windows]
        average = statistics.mean(rate for rate in medians if rate is not None)
        return [average if rate is None else rate for rate in medians]

    def _set_counts(self, counts: Sequence[int]) -> None:
        is_equal = max(counts) - min(counts) <= 1
        parts = [1] * len(counts) if is_equal else counts
        self.loads = [max(round(n / sum(parts), 4), 0.0001) if n else 0.0 for n in parts]
        self._measured = 0
        self._begin_measurement()

    def begin_epoch(self) -> bool:
        """Start a trial of idle members, unless waiting for them would cost too much; return True if one starts."""
        if all(self.loads) or not self._since_trial:
            return False
        idle = [member for member, load in enumerate(self.loads) if not load]
        rates, counts = self._rates(), split_within(self._size, self.loads)
        trial = self._minimum * max(rates[member] for member in idle)
        if TRIAL_BATCHES * (trial - step_seconds(counts, rates)) > _TRIAL_COST * self._since_trial:
            return False
        counts[counts.index(max(counts))] -= self._minimum * len(idle)
        for member in idle:
            counts[member] = self._minimum
            self._windows[member].clear()
        self._set_counts(counts)
        self._measured, self._since_trial = WINDOW - TRIAL_BATCHES, 0.0
        return True

    def state(self) -> dict[str, Any]:
        """Return loads and measurements as plain data."""
        rates = [*map(list, self._windows)]
        return {"contexts": self.names[:], "loads": self.loads[:], "rates": rates, "batch_size": max(self._sizes)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; with other members, start from equal loads and log a warning."""
        self._reset()
        if state["contexts"] != self.names:
            (self._logger or logging.getLogger("gangline")).warning(
                "work_load_list auto: the saved loads are those of %s; %s will be measured again",
                ", ".join(state["contexts"]),
                ", ".join(self.names),
            )
            return
        self.loads = [float(load) for load in state["loads"]]
        self._sizes[0] = float(state["batch_size"])
        for window, rates in zip(self._windows, state["rates"], strict=True):
            window.extend(map(float, rates))

    def why_kept(self) -> str:
        """Return what the next change of the loads needs."""
        if self._measured < WINDOW:
            return f"{self._measured} of {WINDOW} measurements"
        return f"no other gains more than {self._required:.0%}, the error of the measurements"

    def speeds(self) -> list[float]:
        """Return the cost per second of each member; empty before the first measurement."""
        return [1 / rate for rate in self._rates()] if any(self._windows) else []

    def _log(self, logger: logging.Logger) -> None:
        shares = ", ".join(f"{name} {load:.3g}" for name, load in zip(self.names, self.loads, strict=True))
        is_equal = self._on_one_device and len(set(self.loads)) == 1
        stays = "; contexts on one device stay equal unless one is much slower" if is_equal else ""
        unit = "samples" if self._parts is None else "units of length"
        logger.info("work_load_list auto: %s (%s %s/s)%s", shares, listed_rates(self.speeds()), unit, stays)


def listed_rates(rates: Sequence[float]) -> str:
    """Return rates for a log line, such as "100, 50 and 33"."""
    *others, last = [f"{rate:.0f}" for rate in rates]
    return f"{', '.join(others)} and {last}" if others else last


def _relative_error(rates: Sequence[float]) -> float:
    """Return the relative standard error of rates, without the largest one."""
    kept = sorted(rates)[: max(2, len(rates) - 1)]
    if len(kept) < 2:
        return 0.0
    mean = sum(kept) / len(kept)
    return math.sqrt(sum([(rate / mean - 1) ** 2 for rate in kept]) / (len(kept) - 1) / len(kept))


def step_seconds(counts: Sequence[float], rates: Sequence[float], fixed: Sequence[float] | None = None) -> float:
    """Return the time of a step: that of its slowest share."""
    constant = fixed or [0.0] * len(rates)
    return max([one + count * rate if count else 0.0 for one, count, rate in zip(constant, counts, rates, strict=True)])


def shortest_step(
    size: int,
    rates: Sequence[float],
    caps: Sequence[int | None],
    floors: Sequence[int],
    minimum: int = 1,
    fixed: Sequence[float] | None = None,
) -> list[int]:
    """Return the split of a batch of ``size`` whose slowest share finishes first.

    A share of n samples takes n times the member's rate, and its ``fixed`` time. Each sample goes to the member that
    finishes it first, which is optimal because times grow with the share. Shares are at least ``floors`` where these
    fit, at most ``caps``, and empty or at least ``minimum``.
    """
    most = [size if cap is None else cap for cap in caps]
    counts = [*map(min, floors, most)]
    if sum(counts) > size:
        counts = [0] * len(rates)
    constant = fixed or [0.0] * len(rates)
    speed = sum(1 / rate for rate in rates)
    sure = [int(size / (rate * speed)) for rate in rates]  # of all members, if nothing else changes the split
    if not any(constant) and all(count <= n <= cap for count, n, cap in zip(counts, sure, most, strict=True)):
        counts = sure

    def ends(place: int) -> Iterator[tuple[float, int]]:
        """Return the times at which a member finishes its following samples."""
        following = range(counts[place] + 1, most[place] + 1)
        return ((constant[place] + count * rates[place], place) for count in following)

    for _, place in islice(heapq.merge(*map(ends, range(len(rates)))), size - sum(counts)):
        counts[place] += 1
    return counts if minimum == 1 else split_within(size, counts, caps, minimum)
