"""Split controller: the number of samples of each rank in each global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gangline.collectives.workload import split_batch

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

    def __init__(self, loads: Sequence[float], horizon: int, caps: Caps | None = None) -> None:
        """Start with these loads.

        Args:
            loads: one number above 0 per rank.
            horizon: most batches that a rank draws ahead of the one that it trains.
            caps: maximum share of each rank; None: no limits.
        """
        self._changes: list[_Change] = [_Change(0, list(loads), list(caps or [None] * len(loads)))]  # ascending
        self._horizon = horizon

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
        """Return each rank's number of samples in a global batch of ``size``; at least 1 where there are enough."""
        while len(self._changes) > 1 and self._changes[1].first <= batch - 2 * self._horizon:
            self._changes.pop(0)  # not needed any more, not even by a rank that is behind
        change = next(change for change in reversed(self._changes) if change.first <= batch)
        return split_within(size, change.loads, change.caps)


def split_within(samples: int, loads: Sequence[float], caps: Caps) -> list[int]:
    """Split a batch by loads; what exceeds the cap of a rank goes to the others by their loads.

    Raises:
        ValueError: if the caps do not hold the batch.
    """
    check_room(samples, caps)
    counts = [0] * len(loads)
    open_ranks = list(range(len(loads)))
    left = samples
    while left and open_ranks:
        parts = split_batch(left, [loads[rank] for rank in open_ranks])
        wanted = {rank: part.stop - part.start for rank, part in zip(open_ranks, parts, strict=True)}
        full = [rank for rank in open_ranks if (cap := caps[rank]) is not None and wanted[rank] > cap]
        for rank in full or open_ranks:
            cap = caps[rank]
            counts[rank] = cap if full and cap is not None else wanted[rank]
            left -= counts[rank]
        open_ranks = [rank for rank in open_ranks if rank not in full] if full else []
    return counts


def check_room(global_batch: int, caps: Caps) -> None:
    """Check that a global batch fits into the ranks' memory; the arguments are equal on all ranks.

    Raises:
        ValueError: if a rank holds no sample, or all together hold less than the global batch.
    """
    full = [rank for rank, cap in enumerate(caps) if cap is not None and cap < 1]
    if full:
        raise ValueError(
            f"not even one sample fits into the memory of rank {', '.join(map(str, full))}; use a smaller model or "
            "sample there, or leave the rank out of the job"
        )
    known = [cap for cap in caps if cap is not None]
    if len(known) == len(caps) and sum(known) < global_batch:
        listed = ", ".join(f"rank {rank} {cap}" for rank, cap in enumerate(known))
        raise ValueError(
            f"the global batch of {global_batch} samples does not fit into the memory of the ranks: {listed}, together "
            f"{sum(known)}; pass global_batch={sum(known)} or less, and accumulate gradients over more batches"
        )


def checked_caps(memory: Sequence[int], size: int) -> list[int | None]:
    """Return the maximum shares that a user gave.

    Raises:
        ValueError: if there is not one number of at least 1 per rank.
    """
    caps: list[int | None] = list(memory)
    if len(caps) != size or not all(isinstance(cap, int) and cap >= 1 for cap in caps):
        raise ValueError(f"memory is {caps}; expected a maximum number of samples for each of {size} ranks, 1 or more")
    return caps
