"""Record of a run's progress: points, validations and epochs, merged pairwise so that a long run stays small."""

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
    """Consecutive updates; in a job, "this worker" is rank 0."""

    step: int
    """Number of batches by its end, from the start of the first run; `Module.step`."""
    epoch: int
    time: float
    """Seconds of training by its end, from the start of the first run."""
    updates: int
    loss: float | None
    """Mean loss of this worker over the last batch of each update; None if it had no samples."""
    loss_min: float | None
    loss_max: float | None
    metrics: dict[str, float]
    """Metrics of this worker on the last measured batch; for a merged point the mean over such batches."""
    learning_rate: float
    seconds: float
    """Duration of the updates without the first one of a run, which includes set-up."""
    waiting: float
    """Seconds of them in which the training thread waited for the store; see `Module.seconds_waiting`."""
    samples: dict[str, int]
    """Number of samples in these seconds per context of this worker."""
    total: int
    """Number of samples in these seconds of all workers; of this worker if workers have batches of their own."""


_COLUMNS = [column.name for column in fields(Point) if column.name not in ("metrics", "samples")]


@dataclass
class Validation:
    """The metrics of a validation in `fit`."""

    step: int
    epoch: int
    time: float
    values: dict[str, float]


@dataclass
class Split:
    """The split of batches from a step on."""

    step: int
    """Number of batches before it."""
    workers: list[float]
    """Fraction of each worker of the job."""
    contexts: list[float]
    """Fraction of each context in this worker's part."""


@dataclass
class Record:
    """Points, validations, first steps of epochs and splits of a run, at most `MOST_POINTS` of each."""

    points: list[Point] = field(default_factory=list)
    per_point: int = 1
    """Number of updates of a new point; doubles whenever points are merged pairwise."""
    validations: list[Validation] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)
    """The number of steps before each epoch."""
    splits: list[Split] = field(default_factory=list)
    """The first split, and every later one that differs from the one before."""

    def add(self, point: Point) -> None:
        """Append a point."""
        self.points.append(point)
        if len(self.points) >= MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            odd = self.points[len(self.points) // 2 * 2 :]
            self.points = [_merged(earlier, later) for earlier, later in pairs] + odd
            self.per_point *= 2

    def add_validation(self, validation: Validation) -> None:
        """Append a validation; at the limit drop every second one, but none of the best."""
        self.validations.append(validation)
        if len(self.validations) >= MOST_POINTS:
            best = list(self.best().values())
            kept = [index % 2 == 1 or any(v is each for each in best) for index, v in enumerate(self.validations)]
            self.validations = list(itertools.compress(self.validations, kept))

    def begin_epoch(self, epoch: int, step: int) -> None:
        """Record the step at which an epoch begins, unless it is recorded already."""
        self.epochs.setdefault(epoch, step)
        if len(self.epochs) >= MOST_POINTS:
            self.epochs = dict(list(self.epochs.items())[1::2])

    def add_split(self, split: Split) -> None:
        """Append a split, unless it is the last one's; at the limit drop every second one but the first and last."""
        last = self.splits[-1] if self.splits else None
        if last is None or (split.workers, split.contexts) != (last.workers, last.contexts):
            self.splits.append(split)
        if len(self.splits) >= MOST_POINTS:
            self.splits = [*self.splits[:-1:2], self.splits[-1]]

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return max([0.0, *(p.time for p in self.points[-1:]), *(v.time for v in self.validations[-1:])])

    def go_back_to(self, step: int) -> None:
        """Drop everything after a step, from which training resumes."""
        self.points = [point for point in self.points if point.step <= step]
        self.validations = [validation for validation in self.validations if validation.step <= step]
        self.epochs = {epoch: begun for epoch, begun in self.epochs.items() if begun < step}
        self.splits = [split for split in self.splits if split.step < step]

    def best(self) -> dict[str, Validation]:
        """Return the first validation with the best value of each metric: the smallest for losses, else the largest."""
        best: dict[str, Validation] = {}
        for validation in self.validations:
            for name, value in validation.values.items():
                if math.isfinite(value) and (name not in best or _is_better(name, value, best[name].values[name])):
                    best[name] = validation
        return best

    def data(self) -> dict[str, Any]:
        """Return the record as plain data: columns of numbers, strings for non-finite ones, None for missing ones."""
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
            "splits": [asdict(split) for split in self.splits],
            "best": {
                name: {"value": _plain(v.values[name]), "epoch": v.epoch, "step": v.step}
                for name, v in self.best().items()
            },
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Record:
        """Return the record from the result of `data`, to six digits.

        Raises:
            KeyError, TypeError, ValueError: if the data have another form.
        """
        columns, metrics, samples = data["points"], data["points"]["metrics"], data["points"]["samples"]
        points = []
        for row_number in range(len(columns["step"])):
            values = {name: columns[name][row_number] for name in _COLUMNS}
            row: dict[str, Any] = {n: float(v) if isinstance(v, str) else v for n, v in values.items()}
            own = {name: float(v[row_number]) for name, v in metrics.items() if v[row_number] is not None}
            counts = {label: int(column[row_number]) for label, column in samples.items()}
            points.append(Point(**row, metrics=own, samples=counts))
        validations = [
            Validation(**{**each, "values": {name: float(value) for name, value in each["values"].items()}})
            for each in data["validations"]
        ]
        epochs = {int(each["epoch"]): int(each["step"]) for each in data["epochs"]}
        splits = [Split(**each) for each in data.get("splits", [])]  # older pages have none
        return cls(points, int(data["per_point"]), validations, epochs, splits)


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
    """Return a number for JSON, rounded to six digits."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def _all_plain(values: Mapping[str, float]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in values.items()}
