"""Detection of a training loss that diverges."""

from __future__ import annotations

import math
from collections import deque

_EVERY = 10
"""Batches between two looks at the loss, each of which waits for the device."""
_RECENT = 5
"""Number of looks over which the loss is averaged."""
_RISE = 2.0
"""Rise of the loss, in units of its start, that counts as divergence."""


class DivergenceDetector:
    """Compares the training loss with its start, every few batches, until it has diverged."""

    def __init__(self) -> None:
        """Start before the first batch."""
        self._batches = 0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._is_over = False
        self.start = math.nan
        """Loss of the first batch."""

    def is_due(self) -> bool:
        """Count a batch; return True if `diverged` wants its loss."""
        self._batches += 1
        return not self._is_over and self._batches % _EVERY == 1

    def diverged(self, loss: float) -> float | None:
        """Return the recent loss if it is not finite or far above its start, the first time; otherwise None.

        Args:
            loss: mean loss of the last batch.
        """
        if math.isnan(self.start):
            self.start = loss
        self._recent.append(loss)
        mean = sum(self._recent) / len(self._recent)
        is_far_above = len(self._recent) == _RECENT and mean - self.start > _RISE * abs(self.start)
        self._is_over = is_far_above or not math.isfinite(loss)
        return mean if self._is_over else None
