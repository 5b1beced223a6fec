"""`mx.lr_scheduler`: functions from the number of updates to the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence


class LRScheduler:
    """Warms up from ``warmup_begin_lr`` to ``base_lr``, then follows `rate`."""

    def __init__(
        self, base_lr: float = 0.01, warmup_steps: int = 0, warmup_begin_lr: float = 0, warmup_mode: str = "linear"
    ) -> None:
        if warmup_mode not in ("linear", "constant"):
            raise ValueError(f"warmup_mode is {warmup_mode!r}; expected 'linear' or 'constant'")
        self.base_lr = base_lr
        """Learning rate from which factors count: the optimizer's, if it has one."""
        self.first_lr = base_lr
        """Learning rate at the end of the warmup, from which the others go down, whatever the optimizer's."""
        self.warmup_steps, self.warmup_begin_lr, self.warmup_mode = warmup_steps, warmup_begin_lr, warmup_mode

    def __call__(self, num_update: int) -> float:
        """Return the learning rate of an update, counted from 1."""
        if num_update >= self.warmup_steps:
            return self.rate(num_update)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (self.first_lr - self.warmup_begin_lr) * num_update / self.warmup_steps

    def rate(self, num_update: int) -> float:
        """Return the learning rate of an update after the warmup."""
        raise NotImplementedError


class FactorScheduler(LRScheduler):
    """Multiplies the rate by ``factor`` after each ``step`` updates, down to ``stop_factor_lr``."""

    def __init__(
        self,
        step: int,
        factor: float = 1,
        stop_factor_lr: float = 1e-8,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step, self.factor, self.stop_factor_lr = step, factor, stop_factor_lr

    def rate(self, num_update: int) -> float:
        """Return the learning rate of an update."""
        return max(self.base_lr * self.factor ** (max(num_update - 1, 0) // self.step), self.stop_factor_lr)


class MultiFactorScheduler(LRScheduler):
    """Multiplies the rate by ``factor`` after each number of updates in ``step``."""

    def __init__(
        self,
        step: Sequence[int],
        factor: float = 1,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.step, self.factor = list(step), factor

    def rate(self, num_update: int) -> float:
        """Return the learning rate of an update."""
        return self.base_lr * self.factor ** sum(num_update > step for step in self.step)


class _Falling(LRScheduler):
    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.max_update, self.final_lr = max_update, final_lr

    def rate(self, num_update: int) -> float:
        """Return the learning rate of an update."""
        share = min((num_update - self.warmup_steps) / (self.max_update - self.warmup_steps), 1)
        return self.final_lr + (self.first_lr - self.final_lr) * self._left(share)

    def _left(self, share: float) -> float:
        raise NotImplementedError


class PolyScheduler(_Falling):
    """Falls to ``final_lr`` at ``max_update`` updates by a power of what is left."""

    def __init__(self, max_update: int, base_lr: float = 0.01, pwr: float = 2, **options: float) -> None:
        super().__init__(max_update, base_lr, **options)  # type: ignore[arg-type]
        self.pwr = pwr

    def _left(self, share: float) -> float:
        return float((1 - share) ** self.pwr)


class CosineScheduler(_Falling):
    """Falls to ``final_lr`` at ``max_update`` updates as a cosine."""

    def _left(self, share: float) -> float:
        return (1 + math.cos(math.pi * share)) / 2
