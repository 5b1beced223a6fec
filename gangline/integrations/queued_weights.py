"""Balanced loader for loops that read batches ahead: each batch has its weight when the loop trains it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from gangline.models.balance.balanced_loader import BalancedLoader


class QueuedWeight(NamedTuple):
    """Weight of a batch on this rank."""

    weight: float
    """Factor of the gradient."""
    samples: int
    """Samples of this rank; 0 if the batch is one repeated sample without weight."""


class QueuedWeights(BalancedLoader):
    """BalancedLoader whose loop says when it trains the next batch; batches are trained in the order of iteration."""

    _queue: deque[QueuedWeight]
    _trains_as_read = False

    def next_weight(self) -> QueuedWeight:
        """Begin to train the next batch, and return its weight."""
        following = self._queue.popleft()
        self.use_weight(following)
        return following

    def use_weight(self, weight: QueuedWeight) -> None:
        """Train the current batch with this weight."""
        super()._begin_training(*weight)

    def _begin_training(self, weight: float, samples: int) -> None:
        self._queue.append(QueuedWeight(weight, samples))

    def __iter__(self) -> Iterator[Any]:
        """Return this rank's batches of an epoch. Collective."""
        self._queue = deque()
        return super().__iter__()
