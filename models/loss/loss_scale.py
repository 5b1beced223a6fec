"""Dynamic loss scaling for float16.

Many gradients of float16 activations are small enough to round to zero. They are computed from the loss times a scale,
and divided by it before the update (Micikevicius et al., "Mixed precision training", 2018). The constants are those of
torch.amp.GradScaler.
"""

from __future__ import annotations

import logging
from typing import Any

_INITIAL_SCALE = 2.0**16
_GROWTH_INTERVAL = 2000  # updates without an overflow before the scale doubles
_SKIPPED_STEPS = 20  # in a row, after which a warning is logged
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

    def log_skipped(self, logger: logging.Logger, *, warns: bool) -> None:
        """Log a skipped step at debug level; the `_SKIPPED_STEPS`-th in a row as a warning, where ``warns`` is set."""
        if self.skipped == _SKIPPED_STEPS and warns:
            logger.warning(
                "gradients overflowed float16 in %d steps in a row, which changed no weight; the loss scale is %g. "
                "Look for inf and nan in the data, lower the learning rate, or use bfloat16 (autocast=torch.bfloat16, "
                "--dtype bfloat16)",
                _SKIPPED_STEPS,
                self.value,
            )
        else:
            logger.debug("gradients overflowed float16; the step is skipped")

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"value": self.value, "calm": self._growth_tracker}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.value, self._growth_tracker = float(state["value"]), int(state["calm"])
