"""Validation frequency of `fit`."""

from __future__ import annotations

from typing import Any

from gangline.models.arguments import check_int

_UNITS = ("epochs", "batches")


class EvalFrequency:
    """Decides when to validate: every N epochs, or every N batches of the run."""

    def __init__(self, spec: Any, batches_per_epoch: int | None) -> None:
        """Parse a number of epochs, or (number, "epochs" or "batches").

        Where the number of batches per epoch is unknown, the count of batches restarts in each epoch.

        Raises:
            TypeError: if ``spec`` is neither.
            ValueError: if the number is below 1, or the unit is unknown.
        """
        number, unit = spec if isinstance(spec, tuple) and len(spec) == 2 else (spec, "epochs")
        check_int("eval_frequency", number)
        if unit not in _UNITS:
            raise ValueError(f"eval_frequency is {spec!r}; expected one of the units {list(_UNITS)}")
        self.number: int = number
        self.unit: str = unit
        self._per_epoch = batches_per_epoch
        self._counted = 0  # batches done at the last call

    def begin(self, epoch: int, batch: int) -> None:
        """Start counting at a position of the run."""
        self._counted = self._done(epoch, batch)

    def is_due(self, epoch: int, batch: int) -> bool:
        """Return True if validation is due within an epoch, after ``batch`` of its batches."""
        if self.unit == "epochs":
            return False
        done = self._done(epoch, batch)
        if done < self._counted:  # the last call was in an earlier epoch
            self._counted = 0
        before, self._counted = self._counted, done
        return done // self.number > before // self.number

    def is_due_at_end(self, epoch: int) -> bool:
        """Return True if validation is due at the end of an epoch."""
        if self.unit == "epochs":
            return (epoch + 1) % self.number == 0
        return self._per_epoch is not None and self.is_due(epoch, self._per_epoch)

    def _done(self, epoch: int, batch: int) -> int:
        return batch if self._per_epoch is None else epoch * self._per_epoch + batch
