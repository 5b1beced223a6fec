"""State of a training run that checkpoints store beside weights and optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass
class Position:
    """Position of a run in its data, from which it can be resumed."""

    epoch: int = 0
    """Epochs completed."""
    batch: int = 0
    """Batches completed of the current epoch."""
    plan: dict[str, Any] = field(default_factory=dict)
    """Sampling of that epoch: seed, shuffle, batch size, number of samples."""
    random: dict[str, Any] = field(default_factory=dict)
    """Random states of the host at the start of that epoch."""


class Stateful(Protocol):
    """An object whose state checkpoints store, such as a callback or a learning-rate scheduler."""

    def state(self) -> dict[str, Any]:
        """Return plain data."""

    def load_state(self, state: Mapping[str, Any], /) -> None:
        """Restore what `state` returned."""


@dataclass
class RunState:
    """State of a module's training run."""

    seed: int = 0
    """Seed of the contexts' random streams."""
    step: int = 0
    """Training batches run so far."""
    position: Position = field(default_factory=Position)
    data_generator: torch.Generator | None = None
    """Random generator of the DataLoader of the current `fit`."""
    stateful: dict[str, Stateful] = field(default_factory=dict)
    """Objects whose state checkpoints store, by name: scheduler and callbacks of the last `fit`."""
    run: str | None = None
    """Name of the current `fit`, the same in every start of its job; None if the launcher names no job."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Plain data that checkpoints store for their readers, such as class names."""
    optimizer_set_by_fit: bool = False
    """True if `fit` called `init_optimizer`; an optimizer set by the user is never replaced."""
