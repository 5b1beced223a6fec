"""Accumulation of gradients over the batches of one update."""

from __future__ import annotations

_MIXED = (
    "backward(out_grads) and backward() were both called for one update under grad_req='add', but only gradients of "
    "the loss can be weighted; call update() between them"
)


class GradientAccumulation:
    """Sums the normalizers of the losses of one update, over devices and micro-steps.

    Each micro-step's gradient is that of its summed loss over a divisor common to all micro-steps; at the end `factor`
    turns their sum into the gradient of the mean over all elements. (A mean of the micro-steps' means would give the
    elements of a small micro-step too much weight.)
    """

    def __init__(self) -> None:
        self.total = 0.0  # sum of the normalizers so far
        self._divisor = 0.0
        self._has_output_gradients = False

    def add_output_gradients(self) -> None:
        """Record a micro-step from gradients of the outputs, which are added unscaled."""
        if self._divisor:
            raise RuntimeError(_MIXED)
        self._has_output_gradients = True

    def add(self, normalizer: float) -> float:
        """Count a micro-step; return the divisor of its summed loss, the normalizer of the first one of the update."""
        if self._has_output_gradients:
            raise RuntimeError(_MIXED)
        self._divisor = self._divisor or normalizer or 1.0
        self.total += normalizer
        return self._divisor

    @property
    def factor(self) -> float:
        """Factor of the summed gradients; 1 if nothing was counted, because gradients are 0."""
        return self._divisor / self.total if self.total and self._divisor else 1.0
