"""The learning rate of each update of a run, from a schedule or from a scheduler of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline.models.loop.schedules import Schedule, schedule
from gangline.models.loop.torch_schedulers import DrivenScheduler, TorchScheduler


class Rates:
    """The learning rate of each update of a run, from a schedule, a scheduler of torch, or neither."""

    def __init__(self, spec: Any, base_rate: float, epochs: int, batches_per_epoch: int | None) -> None:
        """Parse the ``lr_scheduler`` of `fit`.

        Args:
            spec: a Schedule or a description for `schedule`; a TorchScheduler, or a function from an optimizer to a
                scheduler of torch, which then steps after each epoch; None: the rate does not change.
            base_rate: see `schedule`.
            epochs: see `schedule`.
            batches_per_epoch: see `schedule`.

        Raises:
            TypeError: if ``spec`` is none of these.
            ValueError: if it is invalid.
        """
        self._schedule: Schedule | None = None
        self.driven: DrivenScheduler | None = None
        """The scheduler of torch, if there is one; checkpoints save its state."""
        if isinstance(spec, Schedule):
            self._schedule = spec
        elif isinstance(spec, TorchScheduler) or (callable(spec) and not isinstance(spec, str)):
            self.driven = DrivenScheduler(spec if isinstance(spec, TorchScheduler) else TorchScheduler(spec), base_rate)
        elif spec is not None:
            self._schedule = schedule(spec, base_rate, epochs, batches_per_epoch)

    def rate(self, epoch: int, batch: int) -> float | None:
        """Return the rate of an update whose first batch is batch ``batch`` of ``epoch``; None: unchanged."""
        if self.driven is not None:
            return self.driven.rate
        return self._schedule(epoch, batch) if self._schedule is not None else None

    def after(self, event: str, values: Mapping[str, float] | None = None) -> None:
        """Count a "batch", an "epoch" or a "validation" with its metrics."""
        if self.driven is not None:
            self.driven.after(event, values or {})

    @property
    def awaited_metric(self) -> str | None:
        """The validation metric that the scheduler needs; "": the first one; None: none."""
        return self.driven.awaited_metric if self.driven is not None else None

    def plan(self) -> Any:
        """Return the settings that must be equal on all workers, as plain data."""
        if self.driven is not None:
            return [self.driven.name, self.driven.rate]
        return repr(self._schedule)
