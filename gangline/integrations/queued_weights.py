"""Loader that keeps each batch's weight until the loop that read the batch ahead trains it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gangline.models.unequal_ranks.balanced_loader import BalancedLoader


class QueuedWeight(NamedTuple):
    """What a batch counts on this rank."""

    weight: float
    """Factor of the gradient."""
    samples: int
    """Samples of this rank; 0 if the batch is one repeated sample without weight."""


class QueuedWeights(BalancedLoader):
    """BalancedLoader that does not scale gradients, but hands out the weights for the loop to do so."""

    def __init__(self, model: torch.nn.Module, loader: Any, **options: Any) -> None:
        """Split a loader; the options are those of `balance`."""
        super().__init__(model, loader, loss_reduction="normalized", **options)
        self._queue: deque[QueuedWeight] = deque()

    def next_weight(self) -> QueuedWeight:
        """Return the weight of the next batch to train; batches are trained in the order of iteration."""
        return self._queue.popleft()

    def __iter__(self) -> Iterator[Any]:
        """Return this rank's batches of an epoch. Collective."""
        self._queue.clear()
        for batch in super().__iter__():
            self._queue.append(QueuedWeight(self.weight, self.samples))
            yield batch


def scaled(gradient: Tensor, weight: float) -> Tensor:
    """Return a gradient times a weight; zeros for weight 0, also if the gradient is NaN."""
    return gradient * weight if weight else torch.zeros_like(gradient)
