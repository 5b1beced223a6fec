"""By what summed gradients are divided, when several batches or parts of one make an update together."""

from __future__ import annotations

_MIXED = (
    "backward(out_grads) and backward() came for one update under grad_req='add', and only the loss's gradients could "
    "be weighted; call update() between them"
)


class Weighting:
    """The valid elements of an update, counted over devices and over micro-steps.

    The gradients of a micro-step are those of its summed loss divided by a divisor that all micro-steps share; when the
    last is done, `factor` turns their sum into the gradient of the mean over all elements counted. A mean of the
    micro-steps' means would weigh the elements of a micro-step with few of them too much.
    """

    def __init__(self) -> None:
        self._divisor = 0.0
        self._total = 0.0
        self._given = False

    def take_given(self) -> None:
        """Note that a micro-step's gradients came from outside, and are to be added as they are.

        Raises:
            RuntimeError: others of this update came from losses.
        """
        if self._divisor:
            raise RuntimeError(_MIXED)
        self._given = True

    def divisor(self, expected: float) -> float:
        """What this micro-step's summed loss is divided by: ``expected`` of the update's first.

        Raises:
            RuntimeError: gradients of this update were given from outside.
        """
        if self._given:
            raise RuntimeError(_MIXED)
        if not self._divisor:
            self._divisor = expected or 1.0
        return self._divisor

    def count(self, normalizer: float) -> None:
        """Count what a micro-step adds to the update's normaliser."""
        self._total += normalizer

    @property
    def total(self) -> float:
        """What has counted so far."""
        return self._total

    @property
    def factor(self) -> float:
        """What the sum of the gradients is multiplied by; where nothing counted they are 0, and stay so as in torch."""
        return self.factor_for(self._total)

    def factor_for(self, total: float) -> float:
        """The same, where ``total`` has counted with other workers."""
        return self._divisor / total if total and self._divisor else 1.0
