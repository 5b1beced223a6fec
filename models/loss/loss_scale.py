"""Dynamic loss scaling for float16.

Many gradients of float16 activations are small enough to round to zero. They are computed from the loss times a scale,
and divided by it before the update (Micikevicius et al., "Mixed precision training", 2018). The constants are those of
torch.amp.GradScaler.
"""

from __future__ import annotations

from typing import Any

_INITIAL_SCALE = 2.0**16
_GROWTH_INTERVAL = 2000  # updates without an overflow before the scale doubles
_MINIMUM = 1.0  # a smaller scale does not help gradients that overflow without scaling


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
