"""Balanced loader for loops that read batches ahead: each batch has its weight when the loop trains it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from gangline.models.balance.balanced_loader import BalancedLoader
from gangline.models.balanced_batch import BalancedBatch


class QueuedWeights(BalancedLoader):
    """BalancedLoader whose loop says when it trains the next batch; batches are trained in the order of iteration."""

    _queue: deque[BalancedBatch]
    _trains_as_read = False

    def next_weight(self) -> BalancedBatch:
        """Begin to train the next batch, and return it."""
        following = self._queue.popleft()
        super()._begin_training(following)
        return following

    def _begin_training(self, batch: BalancedBatch) -> None:
        self._queue.append(batch)

    def __iter__(self) -> Iterator[Any]:
        """Return this rank's batches of an epoch. Collective."""
        self._queue = deque()
        return super().__iter__()
