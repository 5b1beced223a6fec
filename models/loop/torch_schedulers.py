"""The learning rate of each update of a run, from a named schedule or from a scheduler of torch."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gangline.models.loop.schedules import Schedule, schedule

Make = Callable[[torch.optim.Optimizer], LRScheduler]

_EVERY = ("epoch", "batch")


@dataclass(frozen=True)
class TorchScheduler:
    """A scheduler of torch for `fit`, and when it steps.

    ``TorchScheduler(lambda optimizer: OneCycleLR(optimizer, 0.5, total_steps=300, cycle_momentum=False), "batch")``
    """

    make: Make
    """Function from an optimizer, with one parameter group at the run's learning rate, to the scheduler."""
    every: str = "epoch"
    """Interval of its steps: each "epoch", or each update ("batch"). ReduceLROnPlateau steps after validations."""
    metric: str | None = None
    """Validation metric for ReduceLROnPlateau; None: the first one."""

    def __post_init__(self) -> None:
        """Check the types and values."""
        if not callable(self.make):
            raise TypeError(f"lr_scheduler is {self.make!r}; expected a function of an optimizer")
        if self.every not in _EVERY:
            raise ValueError(f"every is {self.every!r}; expected one of {list(_EVERY)}")


def scheduler_of(
    spec: Any, base_rate: float, epochs: int, batches_per_epoch: int | None
) -> Schedule | DrivenScheduler | None:
    """Return what sets the learning rates of a run, for the ``lr_scheduler`` of `fit`.

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
    if spec is None or isinstance(spec, Schedule):
        return spec
    if isinstance(spec, TorchScheduler) or (callable(spec) and not isinstance(spec, str)):
        return DrivenScheduler(spec if isinstance(spec, TorchScheduler) else TorchScheduler(spec), base_rate)
    return schedule(spec, base_rate, epochs, batches_per_epoch)


class DrivenScheduler:
    """Scheduler of torch on a placeholder optimizer, which steps along with a run."""

    def __init__(self, spec: TorchScheduler, base_rate: float) -> None:
        """Create the scheduler on a placeholder optimizer.

        Args:
            spec: scheduler to create.
            base_rate: learning rate of the run.

        Raises:
            TypeError: if ``spec.make`` does not return a scheduler.
            ValueError: if the scheduler changes more than the rate, or its state cannot be saved.
        """
        self._spec, self._base_rate = spec, base_rate
        self._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=base_rate, momentum=0.5)
        self._scheduler = spec.make(self._optimizer)
        if not isinstance(self._scheduler, LRScheduler):
            raise TypeError(
                f"lr_scheduler returned a {type(self._scheduler).__name__}; expected one of torch.optim.lr_scheduler's"
            )
        if self._optimizer.param_groups[0]["momentum"] != 0.5:
            raise ValueError(
                f"{self.name} changes the momentum too, which stores do not support; give cycle_momentum=False"
            )
        self.state()  # fail now rather than in the first checkpoint

    @property
    def name(self) -> str:
        """The name of the scheduler's class."""
        return type(self._scheduler).__name__

    @property
    def awaited_metric(self) -> str | None:
        """The validation metric that it needs; "": the first one; None: none."""
        return (self._spec.metric or "") if isinstance(self._scheduler, ReduceLROnPlateau) else None

    def __call__(self, epoch: int = 0, batch: int = 0) -> float:  # noqa: ARG002  the signature of a Schedule
        """Return the rate of the next update."""
        return float(self._optimizer.param_groups[0]["lr"])

    def after(self, event: str, values: Mapping[str, float]) -> None:
        """Step after a "batch", an "epoch" or a "validation" with its metrics, if the scheduler does."""
        follows_validation = isinstance(self._scheduler, ReduceLROnPlateau)
        if event != ("validation" if follows_validation else self._spec.every):
            return
        self._optimizer.step()  # without gradients; torch warns if a scheduler steps first
        step: Any = self._scheduler.step
        if follows_validation:
            step(values[next(iter(values)) if self._spec.metric is None else self._spec.metric])
        else:
            step()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain data.

        Raises:
            ValueError: if the scheduler's state is more than plain data and tensors.
        """
        packed = io.BytesIO()
        try:
            torch.save([self._scheduler.state_dict(), self._optimizer.state_dict()], packed)
            torch.load(io.BytesIO(packed.getvalue()), weights_only=True)
        except Exception as error:  # pickling runs the objects' own methods
            raise ValueError(f"{self.name} has a state that is more than plain data and tensors: {error}") from error
        return {
            "scheduler": self.name,
            "base_rate": self._base_rate,
            "state": base64.b64encode(packed.getvalue()).decode(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state` returned.

        Raises:
            ValueError: if it is of another scheduler or another base rate.
        """
        for what, own in (("scheduler", self.name), ("base_rate", self._base_rate)):
            if state[what] != own:
                raise ValueError(
                    f"lr_scheduler has {what} {own}, but the checkpoint's had {state[what]}; give the same, or start a "
                    "new run from the checkpoint's weights (Module.load)"
                )
        packed = io.BytesIO(base64.b64decode(state["state"]))
        scheduler, optimizer = torch.load(packed, weights_only=True)
        self._scheduler.load_state_dict(scheduler)
        self._optimizer.load_state_dict(optimizer)
