"""Split controller: the number of samples of each rank in each global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gangline.collectives.workload import split_within

Caps = Sequence[int | None]
"""Maximum share of each rank; None: no limit."""


class _Change(NamedTuple):
    first: int  # global batch at which it takes effect
    loads: list[float]
    caps: list[int | None]


class SplitController:
    """Decides how many samples of a global batch each rank gets; all ranks decide alike.

    Batches are drawn ahead of training by as many as ``horizon``, so new loads begin at a batch that no rank has drawn.
    """

    def __init__(self, loads: Sequence[float], horizon: int, caps: Caps | None = None, minimum: int = 1) -> None:
        """Start with these loads.

        Args:
            loads: one number above 0 per rank.
            horizon: most batches that a rank draws ahead of the one that it trains.
            caps: maximum share of each rank; None: no limits.
            minimum: smallest share that is not empty.
        """
        self._changes: list[_Change] = [_Change(0, list(loads), list(caps or [None] * len(loads)))]  # ascending
        self._horizon = horizon
        self.minimum = minimum

    @property
    def loads(self) -> list[float]:
        """Latest loads, which may begin with a later batch."""
        return list(self._changes[-1].loads)

    def set_loads(self, loads: Sequence[float], caps: Caps, batch: int | None) -> None:
        """Use these loads from the first batch that no rank has drawn yet. All ranks must call it alike.

        Args:
            loads: one number above 0 per rank.
            caps: maximum share of each rank; None: no limit.
            batch: number of the batch that is being trained, counted from the start of the job; None: none was drawn.
        """
        first = 0 if batch is None else batch + self._horizon
        self._changes = [change for change in self._changes if change.first < first]
        self._changes.append(_Change(first, list(loads), list(caps)))

    def counts(self, batch: int, size: int) -> list[int]:
        """Return each rank's number of samples in a global batch of ``size``; none is empty where there are enough."""
        while len(self._changes) > 1 and self._changes[1].first <= batch - 2 * self._horizon:
            self._changes.pop(0)  # not needed any more, not even by a rank that is behind
        change = next(change for change in reversed(self._changes) if change.first <= batch)
        return split_within(size, change.loads, change.caps, self.minimum)


def checked_caps(memory: Sequence[int], size: int, global_batch: int) -> list[int | None]:
    """Return the maximum shares that a user gave.

    Raises:
        ValueError: if there is not one number of at least 1 per rank, or they do not hold a global batch.
    """
    caps = list(memory)
    if len(caps) != size or not all(isinstance(cap, int) and cap >= 1 for cap in caps):
        raise ValueError(f"memory is {caps}; expected a maximum number of samples for each of {size} ranks, 1 or more")
    if sum(caps) < global_batch:
        raise ValueError(
            f"memory is {caps}, together {sum(caps)} samples; expected the global batch of {global_batch} or more: "
            f"raise them, or pass global_batch={sum(caps)} and accumulate gradients over more batches"
        )
    return list(caps)
