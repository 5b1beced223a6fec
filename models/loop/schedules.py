"""The learning rate of each update of a run, from a named schedule or a torch scheduler.

A named schedule is a pure function of the position in the run. torch's schedulers derive each rate from the previous
one and count their own steps. They cannot express what `schedule` documents: warm-up or cosine periods in fractions of
epochs, a floor for the polynomial, accumulated batches, or a resumed run with another number of epochs.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gangline.collectives.errors import did_you_mean
from gangline.kvstore.optimizer.spec import check_learning_rate
from gangline.models.arguments import check_int, check_number
from gangline.models.metrics.metric import reported_name

RateFunction = Callable[[float], float]
"""The rate as a function of the epochs done, a float."""

_WARMUP = ("warmup_epochs", "warmup_batches", "warmup_rate")


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
    """Create the scheduler for the ``lr_scheduler`` of `fit`; the other arguments are those of `schedule`.

    Raises:
        TypeError, ValueError: if ``spec`` is invalid.
    """
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
    options: Mapping[str, Any] = field(default_factory=dict)
    _after_warmup: RateFunction = field(default=float, repr=False, compare=False)
    _warmup: float = field(default=0.0, repr=False)  # epochs

    def __call__(self, epoch: int, batch: int = 0) -> float:
        """Return the rate of an update whose first batch is batch ``batch`` of ``epoch``, both from 0."""
        per_epoch = self.batches_per_epoch
        if per_epoch is None:
            done, step = float(epoch), 1.0
        else:
            done, step = epoch + min(batch, per_epoch) / per_epoch, 1 / per_epoch
        if done < self._warmup and not math.isclose(done, self._warmup, rel_tol=1e-9):
            start = self.options.get("warmup_rate", 0.0)
            end = self._after_warmup(self._warmup)
            return float(start + (end - start) * min(1.0, (done + step) / self._warmup))
        return self._after_warmup(done)


def schedule(spec: Any, base_rate: float, epochs: int, batches_per_epoch: int | None) -> Schedule:
    """Return the schedule that ``spec`` describes.

    Args:
        spec: a name, or (name, options):

            * ``"constant"``.
            * ``"piecewise"``: multiply by ``factor`` (0.1) at the start of each of ``epochs``, or after ``every`` N
              epochs, as MATLAB's LearnRateDropPeriod.
            * ``"cosine"``: half a cosine from the base rate to ``min_rate`` (0) (Loshchilov and Hutter 2016); with
              ``period`` (epochs) it restarts after each period, and each period is ``growth`` (1) times the last.
            * ``"poly"``: ``min_rate`` (0) plus the rest of the base rate times ``(1 - t / T) ** power`` (2).

            Each with ``warmup_epochs`` or ``warmup_batches``: the rate first rises from ``warmup_rate`` (0) in equal
            steps per batch, and reaches its goal in the last of these batches (Goyal et al. 2017). "piecewise" counts
            epochs from the start of the run; "cosine" and "poly" span the epochs after the warm-up.
        base_rate: learning rate to scale.
        epochs: total number of epochs.
        batches_per_epoch: batches in an epoch; None if unknown: then the rate changes only between epochs.

    Raises:
        ValueError: if a name or an option is unknown, or a value is invalid.
        TypeError: if a value has a wrong type.
    """
    name, given = spec if isinstance(spec, tuple) and len(spec) == 2 else (spec, {})
    if not isinstance(name, str) or not isinstance(given, Mapping):
        raise TypeError(f"the schedule is {spec!r}; expected a name of {sorted(_SCHEDULES)}, or (name, options)")
    if name not in _SCHEDULES:
        raise ValueError(
            f"schedule {name!r} is unknown;{did_you_mean(name, _SCHEDULES)} expected one of {sorted(_SCHEDULES)}"
        )
    build, options = _SCHEDULES[name], dict(given)
    known = [*(p.name for p in signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY), *_WARMUP]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"schedule {name!r} has no option {unknown}; it has {sorted(known)}")
    for rate in (base_rate, options.get("min_rate", 0.0), options.get("warmup_rate", 0.0)):
        check_learning_rate(rate)
    if options.get("min_rate", 0.0) > base_rate:
        raise ValueError(f"min_rate is {options['min_rate']}, above the base rate {base_rate}; expected at most that")
    warmup = _warmup_epochs(batches_per_epoch, **{key: options[key] for key in _WARMUP if key in options})
    if warmup and warmup >= epochs:
        raise ValueError(f"the warm-up takes {warmup:g} epochs of {epochs}; expected a shorter one")
    own = {key: value for key, value in options.items() if key not in _WARMUP}
    after_warmup = build(base_rate, warmup, max(epochs - warmup, 1), **own)
    return Schedule(name, base_rate, epochs, batches_per_epoch, options, after_warmup, warmup)


def _warmup_epochs(
    batches_per_epoch: int | None, *, warmup_epochs: Any = None, warmup_batches: Any = None, warmup_rate: Any = None
) -> float:
    """Return the length of the warm-up in epochs."""
    if warmup_epochs is not None and warmup_batches is not None:
        raise ValueError(f"{warmup_epochs=} and {warmup_batches=} are given; expected one of them")
    if warmup_batches is not None:
        check_int("warmup_batches", warmup_batches, minimum=0)
        if batches_per_epoch is None:
            raise ValueError(f"{warmup_batches=} needs data with a known number of batches; give warmup_epochs")
        return float(warmup_batches / batches_per_epoch)
    if warmup_epochs is not None:
        return float(check_number("warmup_epochs", warmup_epochs))
    if warmup_rate is not None:
        raise ValueError("warmup_rate is given without warmup_epochs or warmup_batches; give one of them too")
    return 0.0


# The rate after the warm-up, from base rate, epochs of the warm-up and after it; options are keyword arguments.


def _constant(base: float, _warmup: float, _length: float) -> RateFunction:
    return lambda _done: float(base)


def _piecewise(
    base: float, warmup: float, _length: float, *, factor: Any = 0.1, epochs: Any = None, every: Any = None
) -> RateFunction:
    check_number("factor", factor)
    if (epochs is None) == (every is None):
        raise ValueError(f"'piecewise' has {epochs=} and {every=}; expected one of them: epochs=[5, 8], or every=10")
    if every is not None:
        check_int("every", every)
        return lambda done: float(base * factor ** int(done // every))
    if not isinstance(epochs, (list, tuple)):
        raise TypeError(f"epochs is {epochs!r}; expected a list of numbers such as [5, 8]")
    for drop in epochs:
        check_int("one of epochs", drop, minimum=0)
        if drop < warmup:
            raise ValueError(f"the rate drops at epoch {drop}, within the warm-up of {warmup:g} epochs; drop it later")
    if len(set(epochs)) != len(epochs):
        raise ValueError(f"epochs is {epochs!r} with a duplicate; expected each epoch once")
    return lambda done: float(base * factor ** sum(drop <= done for drop in epochs))


def _cosine(
    base: float, warmup: float, length: float, *, min_rate: float = 0.0, period: Any = None, growth: Any = None
) -> RateFunction:
    if growth is not None and period is None:
        raise ValueError(f"{growth=} is given without period, the epochs of the first cosine")
    first = float(length if period is None else check_number("period", period, excluded=True))
    factor = 1 if growth is None else check_number("growth", growth, minimum=1)

    def rate(done: float) -> float:
        since, span = max(done - warmup, 0.0), first
        if period is None:
            since = min(since, span)
        while period is not None and since >= span:
            since, span = since - span, span * factor
        return float(min_rate + (base - min_rate) * (1 + math.cos(math.pi * since / span)) / 2)

    return rate


def _poly(base: float, warmup: float, length: float, *, power: Any = 2, min_rate: float = 0.0) -> RateFunction:
    check_number("power", power, excluded=True)
    return lambda done: float(min_rate + (base - min_rate) * (1 - min(max(done - warmup, 0.0) / length, 1.0)) ** power)


_SCHEDULES: dict[str, Callable[..., RateFunction]] = {
    "constant": _constant,
    "piecewise": _piecewise,
    "cosine": _cosine,
    "poly": _poly,
}


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
        self.state()  # fail now rather than in the first checkpoint

    @property
    def name(self) -> str:
        """The name of the scheduler's class."""
        return type(self._scheduler).__name__

    @property
    def awaited_metric(self) -> str | None:
        """The validation metric that it needs; "": the first one; None: none."""
        return self._metric if isinstance(self._scheduler, ReduceLROnPlateau) else None

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
