"""`mx.lr_scheduler`: functions from the number of updates to the learning rate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class LRScheduler(ABC):
    """Warms up from ``warmup_begin_lr`` to the rate given here, then follows `rate`.

    Attributes:
        base_lr: rate that factors count from: the optimizer's, if it has one.
        first_lr: rate at the end of the warmup, from which polynomials and cosines fall, whatever the optimizer's.
    """

    def __init__(
        self, base_lr: float = 0.01, warmup_steps: int = 0, warmup_begin_lr: float = 0, warmup_mode: str = "linear"
    ) -> None:
        if warmup_mode not in ("linear", "constant"):
            raise ValueError(f"warmup_mode is {warmup_mode!r}; expected 'linear' or 'constant'")
        self.base_lr = self.first_lr = base_lr
        self.warmup_steps, self.warmup_begin_lr, self.warmup_mode = warmup_steps, warmup_begin_lr, warmup_mode

    def __call__(self, num_update: int) -> float:
        """Return the learning rate of an update, counted from 1."""
        if num_update >= self.warmup_steps:
            return self.rate(num_update)
        share = num_update / self.warmup_steps if self.warmup_mode == "linear" else 0
        return self.warmup_begin_lr + (self.first_lr - self.warmup_begin_lr) * share

    @abstractmethod
    def rate(self, num_update: int) -> float:
        """Return the learning rate of an update after the warmup."""


class FactorScheduler(LRScheduler):
    """Multiplies the rate by ``factor`` after each ``step`` updates, down to ``stop_factor_lr``."""

    def __init__(self, step: int, factor: float = 1, stop_factor_lr: float = 1e-8, *base: Any, **options: Any) -> None:
        super().__init__(*base, **options)
        self.step, self.factor, self.stop_factor_lr = step, factor, stop_factor_lr

    def rate(self, num_update: int) -> float:
        """Return the learning rate of an update."""
        return max(self.base_lr * self.factor ** (max(num_update - 1, 0) // self.step), self.stop_factor_lr)


class MultiFactorScheduler(LRScheduler):
    """Multiplies the rate by ``factor`` after each number of updates in ``step``."""

    def __init__(self, step: Sequence[int], factor: float = 1, *base: Any, **options: Any) -> None:
        super().__init__(*base, **options)
        self.step, self.factor = list(step), factor

    def rate(self, num_update: int) -> float:
        """Return the learning rate of an update."""
        return self.base_lr * self.factor ** sum(num_update > step for step in self.step)


class PolyScheduler(LRScheduler):
    """Falls to ``final_lr`` at ``max_update`` updates by the power ``pwr`` of what is left."""

    def __init__(
        self, max_update: int, base_lr: float = 0.01, pwr: float = 2, final_lr: float = 0, **options: Any
    ) -> None:
        super().__init__(base_lr, **options)
        self.max_update, self.pwr, self.final_lr = max_update, pwr, final_lr

    def rate(self, num_update: int) -> float:
        """Return the learning rate of an update."""
        share = min((num_update - self.warmup_steps) / (self.max_update - self.warmup_steps), 1)
        return self.final_lr + (self.first_lr - self.final_lr) * self._left(share)

    def _left(self, share: float) -> float:
        return float((1 - share) ** self.pwr)


class CosineScheduler(PolyScheduler):
    """Falls to ``final_lr`` at ``max_update`` updates as a cosine."""

    def __init__(self, max_update: int, base_lr: float = 0.01, final_lr: float = 0, **options: Any) -> None:
        super().__init__(max_update, base_lr, 1, final_lr, **options)

    def _left(self, share: float) -> float:
        return (1 + math.cos(math.pi * share)) / 2
