"""Any learning-rate scheduler of torch's, on a stand-in for the optimizer that runs where the weights live."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

Make = Callable[[torch.optim.Optimizer], LRScheduler]

_EVERY = ("epoch", "batch")


@dataclass(frozen=True)
class TorchScheduler:
    """How `fit` is to drive a scheduler of torch's.

    ``TorchScheduler(lambda optimizer: OneCycleLR(optimizer, 0.5, total_steps=300, cycle_momentum=False), "batch")``
    """

    make: Make
    """Makes the scheduler of an optimizer, which has one parameter group with the run's learning rate."""
    every: str = "epoch"
    """Whether it steps after each "epoch", or after each update: "batch". ReduceLROnPlateau steps after validations."""
    metric: str | None = None
    """What ReduceLROnPlateau is told of each validation; None: its first value."""

    def __post_init__(self) -> None:
        """See that it can be used."""
        if not callable(self.make):
            raise TypeError(f"lr_scheduler is {self.make!r}; expected a function of an optimizer")
        if self.every not in _EVERY:
            raise ValueError(f"every is {self.every!r}; expected one of {list(_EVERY)}")


class DrivenScheduler:
    """A scheduler that steps beside a run; its rate is for the next update."""

    def __init__(self, how: TorchScheduler, base_rate: float) -> None:
        """Make it.

        Args:
            how: see there.
            base_rate: the run's learning rate.

        Raises:
            TypeError: no scheduler was made.
            ValueError: it changes more than the rate, or has a state that no checkpoint can hold.
        """
        self._how, self._base_rate = how, base_rate
        self._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=base_rate, momentum=0.5)
        self._scheduler = how.make(self._optimizer)
        if not isinstance(self._scheduler, LRScheduler):
            raise TypeError(
                f"lr_scheduler made a {type(self._scheduler).__name__}; expected one of torch.optim.lr_scheduler's"
            )
        if self._optimizer.param_groups[0]["momentum"] != 0.5:
            raise ValueError(
                f"{self.name} changes the momentum too, which a store does not follow; give cycle_momentum=False"
            )
        self.state()  # what cannot be saved should fail now

    @property
    def name(self) -> str:
        """The scheduler's class."""
        return type(self._scheduler).__name__

    @property
    def follows_validation(self) -> bool:
        """Whether it steps after validations."""
        return isinstance(self._scheduler, ReduceLROnPlateau)

    @property
    def awaited_metric(self) -> str | None:
        """What it is told of validations: a name, or "" for the first there is; None: nothing."""
        return (self._how.metric or "") if self.follows_validation else None

    @property
    def rate(self) -> float:
        """The rate of the next update."""
        return float(self._optimizer.param_groups[0]["lr"])

    def after_update(self) -> None:
        """Count an update."""
        if self._how.every == "batch" and not self.follows_validation:
            self._step()

    def after_epoch(self) -> None:
        """Count an epoch."""
        if self._how.every == "epoch" and not self.follows_validation:
            self._step()

    def after_validation(self, values: Mapping[str, float]) -> None:
        """Tell of a validation."""
        if self.follows_validation:
            self._step(next(iter(values.values())) if self._how.metric is None else values[self._how.metric])

    def _step(self, *told: Any) -> None:
        self._optimizer.step()  # there is no gradient: it only lets torch see the order that it asks for
        self._scheduler.step(*told)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds: plain data.

        Raises:
            ValueError: the scheduler holds more than that.
        """
        packed = io.BytesIO()
        try:
            torch.save([self._scheduler.state_dict(), self._optimizer.state_dict()], packed)
            torch.load(io.BytesIO(packed.getvalue()), weights_only=True)
        except Exception as error:  # pickle raises whatever an object's own methods raise
            raise ValueError(f"{self.name} has a state that is more than plain data and tensors: {error}") from error
        return {
            "scheduler": self.name,
            "base_rate": self._base_rate,
            "state": base64.b64encode(packed.getvalue()).decode(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where another one was.

        Raises:
            ValueError: that was another scheduler, or began with another rate.
        """
        for what, own in (("scheduler", self.name), ("base_rate", self._base_rate)):
            if state[what] != own:
                raise ValueError(
                    f"lr_scheduler has {what} {own}, but the checkpoint's had {state[what]}; give the same, or begin a "
                    "new run from the checkpoint's weights (Module.load)"
                )
        packed = io.BytesIO(base64.b64decode(state["state"]))
        scheduler, optimizer = torch.load(packed, weights_only=True)
        self._scheduler.load_state_dict(scheduler)
        self._optimizer.load_state_dict(optimizer)
