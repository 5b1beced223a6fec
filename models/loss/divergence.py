"""Divergence: a training loss far above its start, and values that are not finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch

DIVERGED = "diverged"
"""Return value of `fit` if a loss or a weight was not finite."""
_EVERY = 10
"""Number of batches between checks of a loss on a GPU, each of which waits for the GPU."""
_RECENT = 50
"""Number of batches over which the loss is averaged."""
_RISE = 2.0
"""Rise of the loss, relative to its start, that counts as divergence."""


class LossRise:
    """Compares the recent training loss with its start, until it has risen far above."""

    def __init__(self, *, on_host: bool, batches_per_epoch: int | None) -> None:
        """Start before the first batch; ``on_host``: losses can be read without waiting for a GPU."""
        self.every = 1 if on_host else min(_EVERY, max(1, (batches_per_epoch or _RECENT) // 5))
        """Interval of checks in batches."""
        self._batches = 0
        self._recent: deque[float] = deque(maxlen=_RECENT // self.every)
        self._is_over = False
        self.start = math.nan
        """The first loss."""

    def is_due(self) -> bool:
        """Count a batch; return True if its loss must be checked."""
        self._batches += 1
        return (self._batches - 1) % self.every == 0

    def add(self, loss: float) -> None:
        """Add the mean loss of a batch, a finite number."""
        if math.isnan(self.start):
            self.start = loss
        self._recent.append(loss)

    def risen(self, *, ends_epoch: bool = False) -> float | None:
        """Return the recent loss if it is far above its start, the first time; otherwise None.

        At the end of an epoch any number of batches is enough; otherwise there must be `_RECENT`.
        """
        if self._is_over or not self._recent or not (ends_epoch or len(self._recent) == self._recent.maxlen):
            return None
        mean = sum(self._recent) / len(self._recent)
        self._is_over = mean - self.start > _RISE * abs(self.start)
        return mean if self._is_over else None


def first_non_finite(batch: Any, name: str) -> tuple[int, str] | None:
    """Return the first sample of a batch that holds inf or nan, and a text with the value and its position."""
    for path, tensor in _named(batch, name):
        if tensor.is_floating_point() or tensor.is_complex():
            places = torch.nonzero(~torch.isfinite(tensor))
            if len(places):
                sample, *place = places[0].tolist()
                where = f" at {place}" if place else ""
                return sample, f"{path} of that sample holds {tensor[tuple(places[0])].item():g}{where}"
    return None


def _named(batch: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch with their names."""
    if isinstance(batch, torch.Tensor):
        yield name, batch
    elif batch is not None:
        for key, part in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
            yield from _named(part, f"{name}[{key!r}]")
