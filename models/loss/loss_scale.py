"""Dynamic loss scaling for float16.

Many gradients of float16 activations are small enough to round to zero. They are computed from the loss times a scale,
and divided by it before the update (Micikevicius et al., "Mixed precision training", 2018). The constants are those of
torch.amp.GradScaler.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

_INITIAL_SCALE = 2.0**16
_GROWTH_INTERVAL = 2000  # updates without an overflow before the scale doubles
_MINIMUM = 1.0  # a smaller scale does not help gradients that overflow without scaling


def all_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return whether all tensors are finite: one flag, shape (), for all devices, on a GPU if there is one.

    The host does not wait for it here. It waits once when it reads the flag, after it has launched the step's other
    work.
    """
    on_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            on_device.setdefault(tensor.device, []).append(tensor)
    flags = [torch.stack(torch._foreach_norm(one, math.inf)).isfinite().all() for one in on_device.values()]
    if not flags:
        return torch.tensor(True, device="cpu")
    target = next((flag.device for flag in flags if flag.is_cuda), flags[0].device)  # a copy to the host would wait
    return torch.stack([flag.to(target, non_blocking=True) for flag in flags]).all()


class LossScale:
    """Loss scale: a power of two that halves when gradients overflow, and doubles after many updates without."""

    def __init__(self) -> None:
        self.value = _INITIAL_SCALE
        self.skipped = 0
        """Number of consecutive skipped steps."""
        self._growth_tracker = 0

    def accepts(self, overflowed: bool) -> bool:
        """Adapt the scale to a step; return False if its gradients have overflowed and it must be skipped."""
        if not overflowed:
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
