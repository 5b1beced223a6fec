"""Schedules: the learning rate of each batch, as a pure function of where training stands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gangline.kvstore.optimizer.spec import check_learning_rate

Shape = Callable[[float], float]
"""The rate after so many epochs, the parts of one counted."""

_WARMUP = ("warmup_epochs", "warmup_batches", "warmup_rate")
_OPTIONS = {
    "constant": (),
    "piecewise": ("epochs", "every", "factor"),
    "cosine": ("min_rate", "period", "growth"),
    "poly": ("power", "min_rate"),
}


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each batch of a run; equal arguments give equal bits, whatever came before."""

    name: str
    base_rate: float
    epochs: int
    batches_per_epoch: int | None
    options: Mapping[str, Any] = field(default_factory=dict)
    _after_warmup: Shape = field(default=float, repr=False, compare=False)
    _warmup: float = field(default=0.0, repr=False)

    def __call__(self, epoch: int, batch: int = 0) -> float:
        """The rate of an update whose first batch is batch ``batch`` of ``epoch``, both from 0."""
        per_epoch = self.batches_per_epoch
        if per_epoch is None:  # the rate changes between epochs alone
            done, step = float(epoch), 1.0
        else:
            done, step = epoch + min(batch, per_epoch) / per_epoch, 1 / per_epoch
        if done < self._warmup and not math.isclose(done, self._warmup, rel_tol=1e-9):
            begin = self.options.get("warmup_rate", 0.0)
            goal = self._after_warmup(self._warmup)
            return float(begin + (goal - begin) * min(1.0, (done + step) / self._warmup))
        return self._after_warmup(done)


def schedule(spec: Any, base_rate: float, epochs: int, batches_per_epoch: int | None) -> Schedule:
    """The schedule that ``spec`` describes.

    Args:
        spec: a name, or (name, options):

            * ``"constant"``.
            * ``"piecewise"``: times ``factor`` (0.1) as each of ``epochs`` begins, or after ``every`` so many, as
              MATLAB's LearnRateDropPeriod.
            * ``"cosine"``: half a cosine from the base rate down to ``min_rate`` (0), batch by batch (Loshchilov and
              Hutter 2016); with ``period`` (epochs) it begins anew after each, the next being ``growth`` (1) times as
              long.
            * ``"poly"``: ``(1 - t / T) ** power`` (2) of the way from ``min_rate`` (0) to the base rate.

            Any of them with ``warmup_epochs`` or ``warmup_batches``: before, the rate climbs from ``warmup_rate`` (0)
            in equal steps, batch by batch, and has arrived in the last batch of them (Goyal et al. 2017). The epochs
            of "piecewise" count from the beginning of all; "cosine" and "poly" take what is left.
        base_rate: the rate that factors apply to.
        epochs: of the whole run.
        batches_per_epoch: None where nobody knows; then the rate changes between epochs alone.

    Raises:
        ValueError: an unknown name or option, or a value that makes no sense.
        TypeError: a wrong type.
    """
    name, given = spec if isinstance(spec, tuple) and len(spec) == 2 else (spec, {})
    if not isinstance(name, str) or not isinstance(given, Mapping):
        raise TypeError(f"the schedule is {spec!r}; expected a name of {sorted(_OPTIONS)}, or (name, options)")
    if name not in _OPTIONS:
        raise ValueError(f"schedule {name!r} is unknown; expected one of {sorted(_OPTIONS)}")
    options = dict(given)
    unknown = sorted(set(options) - {*_OPTIONS[name], *_WARMUP})
    if unknown:
        raise ValueError(f"schedule {name!r} has no option {unknown}; it has {sorted((*_OPTIONS[name], *_WARMUP))}")
    check_learning_rate(base_rate)
    for rate in ("min_rate", "warmup_rate"):
        if rate in options:
            check_learning_rate(options[rate])
    warmup = _warmup_epochs(options, batches_per_epoch)
    if warmup and warmup >= epochs:
        raise ValueError(f"the warm-up takes {warmup:g} epochs of {epochs}; expected fewer than there are")
    make = {"constant": _constant, "piecewise": _piecewise, "cosine": _cosine, "poly": _poly}[name]
    return Schedule(
        name, base_rate, epochs, batches_per_epoch, options, make(options, base_rate, epochs, warmup), warmup
    )


def _warmup_epochs(options: dict[str, Any], batches_per_epoch: int | None) -> float:
    """How long the warm-up lasts, in epochs."""
    in_epochs, in_batches = options.get("warmup_epochs"), options.get("warmup_batches")
    if in_epochs is not None and in_batches is not None:
        raise ValueError(f"warmup_epochs={in_epochs} and warmup_batches={in_batches} are given; expected one of them")
    if in_epochs is None and in_batches is None:
        if "warmup_rate" in options:
            raise ValueError("warmup_rate is given without warmup_epochs or warmup_batches, which say how long")
        return 0.0
    if in_batches is not None:
        _check_whole("warmup_batches", in_batches, least=0)
        if batches_per_epoch is None:
            raise ValueError(
                f"warmup_batches={in_batches} needs data that know how many batches an epoch has; give warmup_epochs"
            )
        return float(in_batches / batches_per_epoch)
    _check_number("warmup_epochs", in_epochs, least=0)
    return float(options["warmup_epochs"])


def _constant(options: dict[str, Any], base: float, epochs: int, warmup: float) -> Shape:  # noqa: ARG001  as the others
    return lambda done: float(base)  # noqa: ARG005


def _piecewise(options: dict[str, Any], base: float, epochs: int, warmup: float) -> Shape:  # noqa: ARG001
    factor = options.get("factor", 0.1)
    _check_number("factor", factor, least=0)
    drops, every = options.get("epochs"), options.get("every")
    if (drops is None) == (every is None):
        raise ValueError(
            f"'piecewise' has epochs={drops} and every={every}; expected one of them: epochs=[5, 8], or every=10"
        )
    if every is not None:
        _check_whole("every", every, least=1)
        return lambda done: float(base * factor ** int(done // every))
    if isinstance(drops, str) or not isinstance(drops, (list, tuple)):
        raise TypeError(f"epochs is {drops!r}; expected a list of numbers such as [5, 8]")
    for drop in drops:
        _check_whole("one of epochs", drop, least=0)
        if drop < warmup:
            raise ValueError(f"the rate drops at epoch {drop}, within the warm-up of {warmup:g} epochs; drop it later")
    if len(set(drops)) != len(drops):
        raise ValueError(f"epochs is {drops!r}, which names one twice; expected each once")
    return lambda done: float(base * factor ** sum(drop <= done for drop in drops))


def _cosine(options: dict[str, Any], base: float, epochs: int, warmup: float) -> Shape:
    low, period, growth = options.get("min_rate", 0.0), options.get("period"), options.get("growth", 1)
    if "growth" in options and period is None:
        raise ValueError(f"growth={growth} is given without period, the epochs of the first cosine")
    if period is not None:
        _check_number("period", period, least=0, excluded=True)
    _check_number("growth", growth, least=1)
    _check_below("min_rate", low, base)
    first = float(period if period is not None else max(epochs - warmup, 1))

    def rate(done: float) -> float:
        since, length = max(done - warmup, 0.0), first
        if period is None:
            since = min(since, length)
        while period is not None and since >= length:
            since, length = since - length, length * growth
        return float(low + (base - low) * (1 + math.cos(math.pi * since / length)) / 2)

    return rate


def _poly(options: dict[str, Any], base: float, epochs: int, warmup: float) -> Shape:
    low, power = options.get("min_rate", 0.0), options.get("power", 2)
    _check_number("power", power, least=0, excluded=True)
    _check_below("min_rate", low, base)
    length = max(epochs - warmup, 1)
    return lambda done: float(low + (base - low) * (1 - min(max(done - warmup, 0.0) / length, 1.0)) ** power)


def _check_below(name: str, value: float, base: float) -> None:
    if value > base:
        raise ValueError(f"{name} is {value}, above the base rate {base}; expected at most that")


def _check_number(name: str, value: Any, *, least: float, excluded: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; expected a number")
    if not least <= value < math.inf or (excluded and value == least):
        raise ValueError(
            f"{name} is {value!r}; expected a finite number {'above' if excluded else 'of at least'} {least}"
        )


def _check_whole(name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected an int")
    if value < least:
        raise ValueError(f"{name} is {value}; expected {least} or more")
