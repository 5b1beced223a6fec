"""Rates: what `fit` asks for the learning rate, whoever says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline.models.loop.schedules import Schedule, schedule
from gangline.models.loop.torch_schedulers import DrivenScheduler, TorchScheduler


class Rates:
    """The learning rate of each update of a run: a schedule's, a torch scheduler's, or nobody's."""

    def __init__(self, spec: Any, base_rate: float, epochs: int, batches_per_epoch: int | None) -> None:
        """Read what `fit` was given.

        Args:
            spec: what `schedule` takes, a Schedule, a TorchScheduler or a function of an optimizer, which is one that
                steps after each epoch; None: the rate stays what it is.
            base_rate: see `schedule`.
            epochs: likewise.
            batches_per_epoch: likewise.

        Raises:
            TypeError: something else.
            ValueError: what makes no sense.
        """
        self._schedule: Schedule | None = None
        self.driven: DrivenScheduler | None = None
        """A scheduler of torch's, which has a state."""
        if isinstance(spec, Schedule):
            self._schedule = spec
        elif isinstance(spec, TorchScheduler) or (callable(spec) and not isinstance(spec, str)):
            how = spec if isinstance(spec, TorchScheduler) else TorchScheduler(spec)
            self.driven = DrivenScheduler(how, base_rate)
        elif spec is not None:
            self._schedule = schedule(spec, base_rate, epochs, batches_per_epoch)

    def rate(self, epoch: int, batch: int) -> float | None:
        """The rate of an update whose first batch is batch ``batch`` of ``epoch``; None: as it is."""
        if self.driven is not None:
            return self.driven.rate
        return self._schedule(epoch, batch) if self._schedule is not None else None

    def after_update(self) -> None:
        """Count an update."""
        if self.driven is not None:
            self.driven.after_update()

    def after_epoch(self) -> None:
        """Count an epoch."""
        if self.driven is not None:
            self.driven.after_epoch()

    def after_validation(self, values: Mapping[str, float]) -> None:
        """Tell of a validation."""
        if self.driven is not None:
            self.driven.after_validation(values)

    @property
    def awaited_metric(self) -> str | None:
        """What is told of validations: a name, or "" for the first there is; None: nothing."""
        return self.driven.awaited_metric if self.driven is not None else None

    def plan(self) -> Any:
        """What must be equal on all workers, as plain data."""
        if self.driven is not None:
            return [self.driven.name, self.driven.rate]
        return repr(self._schedule)
