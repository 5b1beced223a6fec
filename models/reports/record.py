"""Record of a run's progress: points and validations, thinned out so that a long run stays small."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

MOST_POINTS = 2000
_LESS_IS_BETTER = {"cross-entropy", "loss", "mae", "mse", "nll-loss", "perplexity", "rmse"}


@dataclass
class Point:
    """Consecutive updates; in a job, "this worker" is rank 0."""

    step: int = 0
    """Number of batches by its end, from the start of the first run; `Module.step`."""
    epoch: int = 0
    time: float = 0.0
    """Seconds of training at its end, from the start of the first run."""
    updates: int = 0
    loss: float | None = None
    """Mean loss of this worker over the last batch of each update; None if it had no samples."""
    loss_min: float | None = None
    loss_max: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of this worker on the last batch."""
    learning_rate: float = 0.0
    seconds: float = 0.0
    """Duration of the updates, without a run's first update, which includes set-up."""
    waiting: float = 0.0
    """Part of the duration in which the training thread waited for the store; see `Module.seconds_waiting`."""
    samples: dict[str, int] = field(default_factory=dict)
    """Number of samples in this duration per context of this worker."""
    total: int = 0
    """Number of samples in this duration of all workers; of this worker if workers have separate batches."""


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
    """Fraction of each context in this worker's share."""


@dataclass
class Record:
    """Points, validations and splits of a run, at most `MOST_POINTS` of each."""

    points: list[Point] = field(default_factory=list)
    per_point: int = 1
    """Number of updates of a new point; doubles whenever every second point is dropped."""
    validations: list[Validation] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    """The first split, and every later split that differs from its predecessor."""

    def add(self, point: Point) -> None:
        """Append a point; at the limit drop every second point, and keep the last."""
        self.points.append(point)
        if len(self.points) >= MOST_POINTS:
            self.points = self.points[1::2]
            self.per_point *= 2

    def add_validation(self, validation: Validation) -> None:
        """Append a validation; at the limit drop every second validation, except the best ones."""
        self.validations.append(validation)
        if len(self.validations) >= MOST_POINTS:
            best = list(self.best().values())
            kept = [index % 2 == 1 or any(v is each for each in best) for index, v in enumerate(self.validations)]
            self.validations = list(itertools.compress(self.validations, kept))

    def add_split(self, split: Split) -> None:
        """Append a split if it differs from the last; at the limit drop every second split but the first and last."""
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
        self.splits = [split for split in self.splits if split.step < step]

    def best(self) -> dict[str, Validation]:
        """Return the first validation with the best value of each metric: the smallest for losses, else the largest."""
        best: dict[str, Validation] = {}
        for validation in self.validations:
            for name, value in validation.values.items():
                sign = -1 if name in _LESS_IS_BETTER else 1
                if math.isfinite(value) and (name not in best or sign * value > sign * best[name].values[name]):
                    best[name] = validation
        return best

    def data(self) -> dict[str, Any]:
        """Return the record as plain data: columns of numbers, strings for non-finite ones, None for missing ones."""
        metrics = dict.fromkeys(name for point in self.points for name in point.metrics)
        contexts = dict.fromkeys(label for point in self.points for label in point.samples)
        columns: dict[str, Any] = {name: [getattr(point, name) for point in self.points] for name in _COLUMNS}
        columns["metrics"] = {name: [point.metrics.get(name) for point in self.points] for name in metrics}
        columns["samples"] = {label: [point.samples.get(label, 0) for point in self.points] for label in contexts}
        data = {
            "points": columns,
            "per_point": self.per_point,
            "validations": [asdict(validation) for validation in self.validations],
            "splits": [asdict(split) for split in self.splits],
            "best": {n: {"value": v.values[n], "epoch": v.epoch, "step": v.step} for n, v in self.best().items()},
        }
        return {name: _plain(value) for name, value in data.items()}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Record:
        """Return the record from the result of `data`, to six digits."""
        columns = _numbers(data["points"])
        rows = [dict(zip(_COLUMNS, row, strict=True)) for row in zip(*(columns[n] for n in _COLUMNS), strict=True)]
        for name in ("metrics", "samples"):
            for number, row in enumerate(rows):
                values = {label: column[number] for label, column in columns[name].items()}
                row[name] = {label: value for label, value in values.items() if value is not None}
        return cls(
            [Point(**row) for row in rows],
            data["per_point"],
            [Validation(**_numbers(validation)) for validation in data["validations"]],
            [Split(**split) for split in data.get("splits", [])],  # older pages have none
        )


def _plain(value: Any) -> Any:
    """Return data for JSON, whose numbers are rounded to six digits."""
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


def _numbers(value: Any) -> Any:
    """Return data from JSON, with numbers for the strings that `_plain` made."""
    if isinstance(value, Mapping):
        return {name: _numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_numbers(part) for part in value]
    return float(value) if isinstance(value, str) else value
