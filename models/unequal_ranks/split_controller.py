"""Split controller: the number of samples of each rank in each global batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gangline.collectives.workload import split_batch


class SplitController:
    """Decides how many samples of a global batch each rank gets; all ranks decide alike.

    Batches are drawn ahead of training by as many as ``horizon``, so new loads begin at a batch that no rank has drawn.
    """

    def __init__(self, loads: Sequence[float], horizon: int) -> None:
        """Start with these loads.

        Args:
            loads: one number above 0 per rank.
            horizon: most batches that a rank draws ahead of the one that it trains.
        """
        self._changes: list[tuple[int, list[float]]] = [(0, list(loads))]  # (first batch, loads), ascending
        self._horizon = horizon

    @property
    def loads(self) -> list[float]:
        """Latest loads, which may begin with a later batch."""
        return list(self._changes[-1][1])

    def set_loads(self, loads: Sequence[float], batch: int) -> None:
        """Use these loads from the first batch that no rank has drawn yet. All ranks must call it alike.

        Args:
            loads: one number above 0 per rank.
            batch: number of the batch that is being trained, counted from the start of the job.
        """
        self._changes = [change for change in self._changes if change[0] < batch + self._horizon]
        self._changes.append((batch + self._horizon, list(loads)))

    def counts(self, batch: int, size: int) -> list[int]:
        """Return each rank's number of samples in a global batch of ``size``; at least 1 where there are enough."""
        while len(self._changes) > 1 and self._changes[1][0] <= batch - 2 * self._horizon:
            self._changes.pop(0)  # not needed any more, not even by a rank that is behind
        loads = next(loads for first, loads in reversed(self._changes) if first <= batch)
        return [part.stop - part.start for part in split_batch(size, loads)]

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"loads": self.loads}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, if it is of as many ranks."""
        if len(state["loads"]) == len(self.loads):
            self._changes = [(0, list(state["loads"]))]
