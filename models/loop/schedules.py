"""The learning rate of each update of a run, from a named schedule or a torch scheduler.

A named schedule is a pure function of the position in the run, so that resumed runs, accumulated batches and another
number of epochs need no state. torch's schedulers derive each rate from the previous one and count their own steps.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gangline.kvstore.errors import did_you_mean
from gangline.kvstore.optimizer.spec import check_learning_rate
from gangline.models.arguments import check_int, check_number
from gangline.models.metrics.metric import reported_name

_OPTIONS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "cosine": ("min_rate",),
    "piecewise": ("epochs", "factor"),
    "poly": ("min_rate", "power"),
}


@dataclass(frozen=True)
class TorchScheduler:
    """A torch learning-rate scheduler for `fit`, and the interval of its steps.

    ``TorchScheduler(lambda optimizer: OneCycleLR(optimizer, 0.5, total_steps=300, cycle_momentum=False), "batch")``
    """

    make: Callable[[torch.optim.Optimizer], LRScheduler]
    """Function from an optimizer, with one parameter group at the run's learning rate, to the scheduler."""
    every: str = "epoch"
    """Interval of its steps: each "epoch", or each update ("batch"). ReduceLROnPlateau steps after validations."""
    metric: str | None = None
    """Validation metric for ReduceLROnPlateau; None: the first one."""

    def __post_init__(self) -> None:
        """Check the types and values."""
        if not callable(self.make):
            raise TypeError(f"lr_scheduler is {self.make!r}; expected a function of an optimizer")
        if self.every not in ("epoch", "batch"):
            raise ValueError(f"every is {self.every!r}; expected one of ['epoch', 'batch']")


def scheduler_of(
    spec: Any, base_rate: float, epochs: int, batches_per_epoch: int | None
) -> Schedule | DrivenScheduler | None:
    """Create the scheduler for the ``lr_scheduler`` of `fit`; the other arguments are those of `schedule`."""
    if spec is None or isinstance(spec, Schedule):
        return spec
    if isinstance(spec, TorchScheduler) or callable(spec):
        return DrivenScheduler(spec if isinstance(spec, TorchScheduler) else TorchScheduler(spec), base_rate)
    return schedule(spec, base_rate, epochs, batches_per_epoch)


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each batch of a run; equal arguments give equal bits, so resumed runs repeat it exactly."""

    name: str
    base_rate: float
    epochs: int
    batches_per_epoch: int | None
    options: Mapping[str, Any]

    def __call__(self, epoch: int, batch: int = 0) -> float:
        """Return the rate of an update whose first batch is batch ``batch`` of ``epoch``, both from 0."""
        per_epoch, warmup = self.batches_per_epoch, float(self.options.get("warmup_epochs", 0.0))
        if per_epoch is None:
            done, step = float(epoch), 1.0
        else:
            done, step = epoch + min(batch, per_epoch) / per_epoch, 1 / per_epoch
        if done < warmup and not math.isclose(done, warmup, rel_tol=1e-9):
            return self._after_warmup(warmup, warmup) * min(1.0, (done + step) / warmup)
        return self._after_warmup(done, warmup)

    def _after_warmup(self, done: float, warmup: float) -> float:
        """Return the rate after this many epochs."""
        if self.name == "constant":
            return float(self.base_rate)
        if self.name == "piecewise":
            drops = sum(drop <= done for drop in self.options["epochs"])
            return float(self.base_rate * self.options.get("factor", 0.1) ** drops)
        length, least = max(self.epochs - warmup, 1), self.options.get("min_rate", 0.0)
        since = min(max(done - warmup, 0.0), length)
        if self.name == "cosine":
            part = (1 + math.cos(math.pi * since / length)) / 2
        else:
            part = (1 - since / length) ** self.options.get("power", 2)
        return float(least + (self.base_rate - least) * part)


def schedule(spec: Any, base_rate: float, epochs: int, batches_per_epoch: int | None) -> Schedule:
    """Return the schedule that ``spec`` describes.

    Args:
        spec: a name, or (name, options):

            * ``"constant"``.
            * ``"piecewise"``: multiply by ``factor`` (0.1) at the start of each of ``epochs``.
            * ``"cosine"``: half a cosine from the base rate to ``min_rate`` (0) (Loshchilov and Hutter 2016).
            * ``"poly"``: ``min_rate`` (0) plus the rest of the base rate times ``(1 - t / T) ** power`` (2).

            Each with ``warmup_epochs``: the rate first rises from 0 in equal steps per batch, and reaches its goal in
            the last of these batches (Goyal et al. 2017). "piecewise" counts epochs from the start of the run; "cosine"
            and "poly" span the epochs after the warm-up.
        base_rate: learning rate to scale.
        epochs: total number of epochs.
        batches_per_epoch: batches in an epoch; None if unknown: then the rate changes only between epochs.

    Raises:
        ValueError: if a name or an option is unknown, or a value is invalid.
        TypeError: if a value has a wrong type.
    """
    name, given = spec if isinstance(spec, tuple) and len(spec) == 2 else (spec, {})
    if not isinstance(name, str) or not isinstance(given, Mapping):
        raise TypeError(f"the schedule is {spec!r}; expected a name of {sorted(_OPTIONS)}, or (name, options)")
    if name not in _OPTIONS:
        raise ValueError(
            f"schedule {name!r} is unknown;{did_you_mean(name, _OPTIONS)} expected one of {sorted(_OPTIONS)}"
        )
    known = ("warmup_epochs", *_OPTIONS[name])
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"schedule {name!r} has no option {unknown}; it has {sorted(known)}")
    least, warmup = given.get("min_rate", 0.0), check_number("warmup_epochs", given.get("warmup_epochs", 0))
    for rate in (base_rate, least):
        check_learning_rate(rate)
    if least > base_rate:
        raise ValueError(f"min_rate is {least}, above the base rate {base_rate}; expected at most that")
    if warmup and warmup >= epochs:
        raise ValueError(f"the warm-up takes {warmup:g} epochs of {epochs}; expected a shorter one")
    check_number("power", given.get("power", 2), excluded=True)
    check_number("factor", given.get("factor", 0.1))
    if name == "piecewise":
        _check_drops(given.get("epochs"), warmup)
    return Schedule(name, base_rate, epochs, batches_per_epoch, dict(given))


def _check_drops(epochs: Any, warmup: float) -> None:
    if not isinstance(epochs, (list, tuple)):
        raise TypeError(f"epochs is {epochs!r}; expected a list of numbers such as [5, 8]")
    for drop in epochs:
        check_int("one of epochs", drop, minimum=0)
        if drop < warmup:
            raise ValueError(f"the rate drops at epoch {drop}, within the warm-up of {warmup:g} epochs; drop it later")
    if len(set(epochs)) != len(epochs):
        raise ValueError(f"epochs is {epochs!r} with a duplicate; expected each epoch once")


class DrivenScheduler:
    """Torch scheduler on a placeholder optimizer, stepped by a run."""

    def __init__(self, spec: TorchScheduler, base_rate: float) -> None:
        """Create the scheduler, which may change the rate only, and whose state must be plain data and tensors."""
        self._spec, self._base_rate = spec, base_rate
        self._metric = reported_name(spec.metric or "")
        self._optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1, device="cpu"))], lr=base_rate, momentum=0.5)
        self._scheduler = spec.make(self._optimizer)
        if not isinstance(self._scheduler, LRScheduler):
            raise TypeError(
                f"lr_scheduler returned a {type(self._scheduler).__name__}; expected one of torch.optim.lr_scheduler's"
            )
        if self._optimizer.param_groups[0]["momentum"] != 0.5:
            raise ValueError(
                f"{self.name} changes the momentum too, which stores do not support; give cycle_momentum=False"
            )
        self.awaited_metric = self._metric if isinstance(self._scheduler, ReduceLROnPlateau) else None  # "": any
        self.state()  # fail now rather than in the first checkpoint

    @property
    def name(self) -> str:
        """The name of the scheduler's class."""
        return type(self._scheduler).__name__

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
            step(values[self._metric or next(iter(values))])
        else:
            step()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain data."""
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
        """Load a state that `state` returned, of the same scheduler with the same base rate."""
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
