"""How often `fit` validates."""

from __future__ import annotations

from typing import Any

_UNITS = ("epochs", "batches")


class EvalFrequency:
    """Every so many epochs, or every so many batches of the run; a function of where training stands."""

    def __init__(self, spec: Any, batches_per_epoch: int | None) -> None:
        """Read it.

        Args:
            spec: a number of epochs, or (number, "epochs" or "batches").
            batches_per_epoch: None where nobody knows; then batches are counted in each epoch anew.

        Raises:
            TypeError: something else.
            ValueError: a number below 1, or another unit.
        """
        number, unit = spec if isinstance(spec, tuple) and len(spec) == 2 else (spec, "epochs")
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"eval_frequency is {spec!r}; expected a number of epochs, or such as (50, 'batches')")
        if number < 1:
            raise ValueError(f"eval_frequency is {spec!r}; expected 1 or more")
        if unit not in _UNITS:
            raise ValueError(f"eval_frequency is {spec!r}; expected one of the units {list(_UNITS)}")
        self.number: int = number
        self.unit: str = unit
        self._per_epoch = batches_per_epoch
        self._counted = 0  # batches done when it was last looked at

    def begin(self, epoch: int, batch: int) -> None:
        """Count from a place in the run."""
        self._counted = self._done(epoch, batch)

    def is_due(self, epoch: int, batch: int) -> bool:
        """Whether to validate in an epoch's middle, after ``batch`` of its batches."""
        if self.unit == "epochs":
            return False
        done = self._done(epoch, batch)
        if done < self._counted:  # of an epoch before
            self._counted = 0
        before, self._counted = self._counted, done
        return done // self.number > before // self.number

    def is_due_at_end(self, epoch: int) -> bool:
        """Whether to validate at the end of an epoch."""
        if self.unit == "epochs":
            return (epoch + 1) % self.number == 0
        return self._per_epoch is not None and self.is_due(epoch, self._per_epoch)

    def _done(self, epoch: int, batch: int) -> int:
        return batch if self._per_epoch is None else epoch * self._per_epoch + batch
