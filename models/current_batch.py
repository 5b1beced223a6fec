"""Current batch: this rank's weight in the balanced batch that is being trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

NOTHING_COUNTS = 2.0**-40
"""Weight of a share whose count is 0: a weight of 0 would lose gradients from other ranks' losses."""


@dataclass(frozen=True)
class CurrentBatch:
    """A rank's part in a balanced batch."""

    weight: float = 1.0
    """Factor of this rank's gradients."""
    has_samples: bool = True
    """False if this rank's batch only repeats a sample with weight 0."""
    group: dist.ProcessGroup | None = None
    """The ranks that average gradients; None: all."""


_current = CurrentBatch()


def current_batch() -> CurrentBatch:
    """Return the batch that is being trained; a batch of weight 1 outside of balanced batches."""
    return _current


def set_current_batch(batch: CurrentBatch | None) -> None:
    """Set the batch that is being trained; None: no balanced batch."""
    global _current
    _current = batch or CurrentBatch()


def weighted(gradient: Tensor, weight: float) -> Tensor:
    """Return a gradient times a weight; zeros for weight 0, also if the gradient is NaN."""
    return gradient * weight if weight else torch.zeros_like(gradient)
