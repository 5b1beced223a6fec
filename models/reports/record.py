"""What is known of a run's progress: points, validations and epochs, thinned out so that a long run's stay few."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

MOST_POINTS = 2000
_LESS_IS_BETTER = {"cross-entropy", "loss", "mae", "mse", "nll-loss", "perplexity", "rmse"}


@dataclass
class Point:
    """Some updates in a row; what is of "the worker" is rank 0's own where there are several."""

    step: int
    """Batches trained on at the end of it, since the run's first beginning; `Module.step`."""
    epoch: int
    time: float
    """Seconds of training at the end of it, since the run's first beginning."""
    updates: int
    loss: float | None
    """The worker's, a mean over the updates' last batches; None where it had no samples of them."""
    loss_min: float | None
    loss_max: float | None
    metrics: dict[str, float]
    """The worker's, of its last measured batch, or where points were merged a mean over such batches."""
    learning_rate: float
    seconds: float
    """What the updates took; those of a run's first one, which everything begins in, are left out."""
    waiting: float
    """How many of the seconds the training thread waited for the store; see `Module.seconds_waiting`."""
    samples: dict[str, int]
    """What each context of the worker trained on in these seconds."""
    total: int
    """What all workers trained on in these seconds; where they read batches of their own, this worker."""


_COLUMNS = [column.name for column in fields(Point) if column.name not in ("metrics", "samples")]


@dataclass
class Validation:
    """What a scoring in `fit` gave."""

    step: int
    epoch: int
    time: float
    values: dict[str, float]


@dataclass
class Record:
    """A run's points, validations, and the steps at which its epochs began; of each at most `MOST_POINTS` are kept."""

    points: list[Point] = field(default_factory=list)
    per_point: int = 1
    """How many updates a new point is to have; doubles whenever pairs of points become one."""
    validations: list[Validation] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)
    """The step before the first one of each epoch."""

    def add(self, point: Point) -> None:
        """Append a point."""
        self.points.append(point)
        if len(self.points) >= MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            odd = self.points[len(self.points) // 2 * 2 :]
            self.points = [_merged(earlier, later) for earlier, later in pairs] + odd
            self.per_point *= 2

    def add_validation(self, validation: Validation) -> None:
        """Append a validation; when there are many, every other goes, but none that is a best one."""
        self.validations.append(validation)
        if len(self.validations) >= MOST_POINTS:
            best = list(self.best().values())
            kept = [place % 2 == 1 or any(v is one for one in best) for place, v in enumerate(self.validations)]
            self.validations = list(itertools.compress(self.validations, kept))

    def begin_epoch(self, epoch: int, step: int) -> None:
        """Note where an epoch begins, unless that is known."""
        self.epochs.setdefault(epoch, step)
        if len(self.epochs) >= MOST_POINTS:
            self.epochs = dict(list(self.epochs.items())[1::2])

    @property
    def seconds(self) -> float:
        """How long the run has taken so far."""
        return max([0.0, *(p.time for p in self.points[-1:]), *(v.time for v in self.validations[-1:])])

    def go_back_to(self, step: int) -> None:
        """Forget what came after a step: training goes on from there."""
        self.points = [point for point in self.points if point.step <= step]
        self.validations = [validation for validation in self.validations if validation.step <= step]
        self.epochs = {epoch: begun for epoch, begun in self.epochs.items() if begun < step}

    def best(self) -> dict[str, Validation]:
        """The validation with the best value of each metric, the first of equals; a loss is best where it is least."""
        best: dict[str, Validation] = {}
        for validation in self.validations:
            for name, value in validation.values.items():
                if math.isfinite(value) and (name not in best or _is_better(name, value, best[name].values[name])):
                    best[name] = validation
        return best

    def data(self) -> dict[str, Any]:
        """The record as plain data, columns of numbers; what is not finite is a string, what is not there None."""
        plain = {name: [_plain(getattr(point, name)) for point in self.points] for name in _COLUMNS}
        metrics = dict.fromkeys(name for point in self.points for name in point.metrics)
        contexts = dict.fromkeys(label for point in self.points for label in point.samples)
        tables = {
            "metrics": {name: [_plain(point.metrics.get(name)) for point in self.points] for name in metrics},
            "samples": {label: [point.samples.get(label, 0) for point in self.points] for label in contexts},
        }
        return {
            "points": {**plain, **tables},
            "per_point": self.per_point,
            "validations": [
                {**asdict(v), "time": _plain(v.time), "values": _all_plain(v.values)} for v in self.validations
            ],
            "epochs": [{"epoch": epoch, "step": step} for epoch, step in self.epochs.items()],
            "best": {
                name: {"value": _plain(v.values[name]), "epoch": v.epoch, "step": v.step}
                for name, v in self.best().items()
            },
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Record:
        """The record that `data` was made of, to six digits.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        columns, metrics, samples = data["points"], data["points"]["metrics"], data["points"]["samples"]
        points = []
        for place in range(len(columns["step"])):
            values = {name: columns[name][place] for name in _COLUMNS}
            row: dict[str, Any] = {n: float(v) if isinstance(v, str) else v for n, v in values.items()}
            own = {name: float(column[place]) for name, column in metrics.items() if column[place] is not None}
            counts = {label: int(column[place]) for label, column in samples.items()}
            points.append(Point(**row, metrics=own, samples=counts))
        validations = [
            Validation(**{**each, "values": {name: float(value) for name, value in each["values"].items()}})
            for each in data["validations"]
        ]
        epochs = {int(each["epoch"]): int(each["step"]) for each in data["epochs"]}
        return cls(points, int(data["per_point"]), validations, epochs)


def _merged(earlier: Point, later: Point) -> Point:
    losses = [(point.loss, point.updates) for point in (earlier, later) if point.loss is not None]
    weight = sum(updates for _, updates in losses)
    names = [*earlier.metrics, *(name for name in later.metrics if name not in earlier.metrics)]
    values = {n: [point.metrics[n] for point in (earlier, later) if n in point.metrics] for n in names}
    contexts = dict.fromkeys([*earlier.samples, *later.samples])
    return Point(
        later.step,
        later.epoch,
        later.time,
        earlier.updates + later.updates,
        sum(loss * updates for loss, updates in losses) / weight if losses else None,
        min((p.loss_min for p in (earlier, later) if p.loss_min is not None), default=None),
        max((p.loss_max for p in (earlier, later) if p.loss_max is not None), default=None),
        {name: statistics.fmean(found) for name, found in values.items()},
        later.learning_rate,
        earlier.seconds + later.seconds,
        earlier.waiting + later.waiting,
        {label: earlier.samples.get(label, 0) + later.samples.get(label, 0) for label in contexts},
        earlier.total + later.total,
    )


def _is_better(name: str, value: float, best: float) -> bool:
    return value < best if name in _LESS_IS_BETTER else value > best


def _plain(value: float | None) -> Any:
    """A number as JSON has it, short."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def _all_plain(values: Mapping[str, float]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in values.items()}
