"""Dynamic loss scaling for float16.

Many gradients of float16 activations are small enough to round to zero. They are computed from the loss times a scale,
and divided by it before the update (Micikevicius et al., "Mixed precision training", 2018). The constants are those of
torch.amp.GradScaler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

_INITIAL_SCALE = 2.0**16
_GROWTH_INTERVAL = 2000  # updates without an overflow before the scale doubles
_MINIMUM = 1.0  # gradients that overflow without a scale are not helped by a smaller one


class LossScale:
    """Loss scale: a power of two that halves when gradients overflow, and doubles after many updates without."""

    def __init__(self) -> None:
        self.value = _INITIAL_SCALE
        self.skipped = 0
        """Number of skipped steps since the last one that was not."""
        self._growth_tracker = 0

    def accepts(
        self, gradients: Iterable[torch.Tensor], any_worker: Callable[[bool], bool] = lambda overflowed: overflowed
    ) -> bool:
        """Return True if all gradients are finite, and adapt the scale; the step must be skipped otherwise.

        ``any_worker`` is the logical or over workers, applied to this worker's overflow.
        """
        on_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in gradients:
            if gradient.numel():
                on_device.setdefault(gradient.device, []).append(gradient)
        largest = [torch.stack(torch._foreach_norm(tensors, math.inf)).max() for tensors in on_device.values()]
        if not any_worker(not all(math.isfinite(float(one)) for one in largest)):
            self._growth_tracker, self.skipped = self._growth_tracker + 1, 0
            if self._growth_tracker == _GROWTH_INTERVAL:
                self.value, self._growth_tracker = self.value * 2, 0
            return True
        self.value, self._growth_tracker = max(self.value / 2, _MINIMUM), 0
        self.skipped += 1
        return False

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"value": self.value, "calm": self._growth_tracker}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.value, self._growth_tracker = float(state["value"]), int(state["calm"])
