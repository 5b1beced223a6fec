"""The scale of a float16 loss, found while training.

Gradients of float16 activations are so small that many round to zero; they are computed of the loss times a scale, and
divided by it before the update. After Micikevicius et al., "Mixed precision training", 2018; the numbers are those of
torch's GradScaler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

_FIRST = 2.0**16
_PATIENCE = 2000  # updates without an overflow after which a larger scale is tried


class LossScale:
    """A power of two that halves when gradients overflow, and doubles when they have not for a while."""

    def __init__(self) -> None:
        self.value = _FIRST
        self._calm = 0

    def accepts(
        self, gradients: Iterable[torch.Tensor], any_worker: Callable[[bool], bool] = lambda overflowed: overflowed
    ) -> bool:
        """Whether the gradients are finite; the scale learns from it. Where they are not, the step is to be skipped.

        Args:
            gradients: all of this worker's.
            any_worker: given whether some of them are not finite, whether some are on any worker.
        """
        on_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in gradients:
            if gradient.numel():
                on_device.setdefault(gradient.device, []).append(gradient)
        largest = [torch.stack(torch._foreach_norm(those, math.inf)).max() for those in on_device.values()]
        if not any_worker(not all(math.isfinite(float(one)) for one in largest)):
            self._calm += 1
            if self._calm == _PATIENCE:
                self.value, self._calm = self.value * 2, 0
            return True
        self.value, self._calm = self.value / 2, 0
        return False

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"value": self.value, "calm": self._calm}

    def load_state(self, state: dict[str, Any]) -> None:
        """Put back what `state` returned."""
        self.value, self._calm = float(state["value"]), int(state["calm"])
