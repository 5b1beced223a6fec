"""Current batch: this rank's weight in the balanced batch that is being trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

NOTHING_COUNTS = 2.0**-40
"""Weight of a share of samples in which nothing counts: with 0, what other ranks' losses give to it would be lost."""


@dataclass(frozen=True)
class CurrentBatch:
    """A rank's part in a balanced batch."""

    weight: float = 1.0
    """Factor of this rank's gradients."""
    has_samples: bool = True
    """False: this rank's batch is one repeated sample, which does not count."""
    group: dist.ProcessGroup | None = None
    """The ranks that average gradients; None: all."""


_current = CurrentBatch()


def current_batch() -> CurrentBatch:
    """Return the batch that is being trained; outside of balanced batches one of weight 1."""
    return _current


def set_current_batch(batch: CurrentBatch | None) -> None:
    """Set the batch that is being trained; None: no balanced batch is."""
    global _current
    _current = batch or CurrentBatch()


def weighted(gradient: Tensor, weight: float) -> Tensor:
    """Return a gradient times a weight; zeros for weight 0, also if the gradient is NaN."""
    return gradient * weight if weight else torch.zeros_like(gradient)
