"""When a device takes the next trial of a sweep, and when a trial is stopped early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from gangline.sweeps.trial import TrialResult

_LEAST_OTHERS = 3
"""Trials that a trial is compared with at least before it is stopped."""
_LEAST_REPORTS = 2


@dataclass
class Place:
    """A group of contexts that runs one trial at a time."""

    contexts: str
    durations: list[float] = field(default_factory=list)
    """Seconds of the trials that ran to their end here."""
    busy_since: float | None = None

    def seconds_left(self, now: float) -> float:
        """Return the time that the running trial is expected to take still; 0 if there is none."""
        if self.busy_since is None:
            return 0.0
        return max((fmean(self.durations) if self.durations else 0.0) - (now - self.busy_since), 0.0)


def takes_next(place: Place, others: Sequence[Place], waiting: int, now: float) -> bool:
    """Return whether an idle place takes one of the waiting trials.

    A slow one leaves the last trials to faster ones, if those would end all of them before it had ended one. Durations
    are those of earlier trials at each place; a place without any takes a trial.
    """
    known = [other for other in others if other.durations]
    if not place.durations or not known:
        return True
    free = [(other.seconds_left(now), fmean(other.durations)) for other in known]
    for _ in range(waiting):
        soonest = min(range(len(free)), key=lambda index: sum(free[index]))
        free[soonest] = sum(free[soonest]), free[soonest][1]
    return fmean(place.durations) <= max(left for left, _ in free)


def is_worse_than_median(trial: TrialResult, others: Sequence[TrialResult], *, maximize: bool) -> bool:
    """Return whether a trial's best value is worse than the median of what the others had reached at its step.

    The median stopping rule of Google Vizier (Golovin et al., 2017): of each other trial the mean of its values up to
    that step counts.
    """
    if len(trial.curve) < _LEAST_REPORTS:
        return False
    last = trial.curve[-1][0]
    means = [
        fmean(value for step, value in other.curve if step <= last)
        for other in others
        if other.curve and other.curve[-1][0] >= last
    ]
    if len(means) < _LEAST_OTHERS:
        return False
    values = [value for _, value in trial.curve]
    return max(values) < median(means) if maximize else min(values) > median(means)
