"""Splits of a global batch over ranks of known speed and memory, and the step time that each promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gangline.models.balance.speed_model import LinearFit, shortest_step, step_seconds


@dataclass(frozen=True)
class RankProfile:
    """Speed and memory of a rank."""

    speed: float
    """Samples per second of forward and backward."""
    memory: float | None = None
    """Memory of its device in GiB; None: without a limit."""
    fixed_memory: float = 0.0
    """GiB that a step takes whatever the number of samples: weights, gradients, optimizer state."""
    sample_memory: float | None = None
    """GiB that each sample adds; None: unknown."""

    @property
    def time(self) -> LinearFit:
        """Seconds of a step by the number of samples."""
        return LinearFit(0.0, 1 / self.speed)

    @property
    def max_samples(self) -> int | None:
        """Number of samples that fit into its memory; None: no limit is known."""
        if self.memory is None or not self.sample_memory:
            return None
        return max(0, math.floor((self.memory - self.fixed_memory) / self.sample_memory + 1e-9))

    def room(self, samples: int) -> float | None:
        """Return the GiB that each of so many samples may take at most; None: without a limit."""
        if self.memory is None or not samples:
            return None
        return (self.memory - self.fixed_memory) / samples


@dataclass(frozen=True)
class SplitPlan:
    """A split of the global batch."""

    name: str
    counts: list[int]
    """Samples of each rank."""
    seconds: float
    """Expected time of a step, without the exchange of gradients."""
    fits: bool
    """True if no rank has more samples than fit into its memory."""
    room: float | None
    """GiB that a sample may take at most; None: without a limit."""

    @property
    def samples_per_second(self) -> float:
        """Expected speed of training."""
        return sum(self.counts) / self.seconds


def plan_splits(batch: int, ranks: Sequence[RankProfile]) -> list[SplitPlan]:
    """Return the balanced split, the equal one, and the best one without the slowest rank if there are others."""
    caps = [rank.max_samples for rank in ranks]
    if not _holds(batch, caps):
        most = ", ".join(f"rank {index}: {cap}" for index, cap in enumerate(caps))
        raise ValueError(
            f"a global batch of {batch} samples does not fit: the ranks hold at most {most}; use a smaller batch and "
            "accumulate gradients over more steps, or recompute activations"
        )
    plans = [_plan("balanced", shortest_step(batch, [rank.time for rank in ranks], caps=caps), ranks)]
    equal = [batch // len(ranks) + (index < batch % len(ranks)) for index in range(len(ranks))]
    plans.append(_plan("equal", equal, ranks))
    if len(ranks) > 1:
        slowest = min(range(len(ranks)), key=lambda index: ranks[index].speed)
        others = [0 if index == slowest else cap for index, cap in enumerate(caps)]
        if not _holds(batch, others):  # shown although it does not fit
            others = [0 if index == slowest else None for index in range(len(ranks))]
        counts = shortest_step(batch, [rank.time for rank in ranks], caps=others)
        plans.append(_plan(f"without rank {slowest}", counts, ranks))
    return plans


def _holds(batch: int, caps: Sequence[int | None]) -> bool:
    return any(cap is None for cap in caps) or sum(cap or 0 for cap in caps) >= batch


def _plan(name: str, counts: list[int], ranks: Sequence[RankProfile]) -> SplitPlan:
    rooms = [room for n, rank in zip(counts, ranks, strict=True) if (room := rank.room(n)) is not None]
    fits = all(rank.max_samples is None or n <= rank.max_samples for n, rank in zip(counts, ranks, strict=True))
    seconds = step_seconds(counts, [rank.time for rank in ranks])
    return SplitPlan(name, counts, seconds, fits, min(rooms, default=None))
