"""Report of a run's progress by the callbacks of `fit`, without repeating any computation of the step."""

from __future__ import annotations

import abc
import copy
import math
import time
from typing import TYPE_CHECKING, Any

import torch

from gangline.models.loop.callbacks import BatchEndParam
from gangline.models.metrics.metric import EvalMetric
from gangline.models.reports.record import Point

if TYPE_CHECKING:
    from gangline.models.module import Module


class Report(abc.ABC):
    """Callback of `fit` for batches, epochs and validations that turns updates into points; rank 0 reports.

    The loss is the one that the step computed. The metric is evaluated on single batches, by a copy of `fit`'s metric.
    """

    updates_per_point = 1

    def __init__(self, module: Module) -> None:
        self._module = module
        self._metric: EvalMetric | None = None
        self._copied: EvalMetric | None = None  # the original of the copy
        self._is_running = False
        self._since: float | None = None  # the end of the last update

    def __call__(self, when: int | BatchEndParam, *_: Any) -> None:
        """Record a batch, a validation or the end of an epoch."""
        if not self._module.workers.is_first:
            return
        if isinstance(when, BatchEndParam) and "data" in when.locals:  # locals of a validation have no data
            if not self._is_running:
                self._start(when)
            self._count(when)
            self._refresh()
            return
        if isinstance(when, BatchEndParam) and self._is_running:
            self._add_validation(when)
        self._refresh()
        if self._since is not None:  # the time of validations and other callbacks does not count
            self._since = time.perf_counter()

    def close(self) -> None:
        """Record the last updates; `fit` calls this when it ends."""
        if self._is_running:
            self._end_point()
            self._is_running = False
            self._end()

    @abc.abstractmethod
    def _begin(self, param: BatchEndParam) -> None:
        """Begin a run with this update; drop records after its step."""

    @abc.abstractmethod
    def _add(self, point: Point) -> None:
        """Record some updates."""

    @abc.abstractmethod
    def _add_validation(self, param: BatchEndParam) -> None:
        """Record a validation."""

    @abc.abstractmethod
    def _end(self) -> None:
        """End the run."""

    def _refresh(self) -> None:  # noqa: B027  a report may write at once what it gets
        """Write the record if due."""

    def _start(self, param: BatchEndParam) -> None:
        self._begun = time.perf_counter()
        self._since = None  # the time of a run's first update, which includes set-up, does not count
        self._seen: list[int] = []
        self._waited, self._epoch = 0.0, param.epoch
        self._begin_point()
        self._begin(param)
        self._is_running = True

    def _begin_point(self) -> None:
        self._pending = Point(samples=dict.fromkeys(labels(self._module), 0))  # the updates since the last point
        self._losses: list[torch.Tensor] = []

    def _count(self, param: BatchEndParam) -> None:
        """Add an update; at the last one of a point evaluate the metric on its last batch."""
        now, module = time.perf_counter(), self._module
        seen, waited = module.bound.replicas.samples_seen, module.seconds_waiting
        before = self._seen if param.epoch == self._epoch else [0] * len(seen)  # the counters restart in each epoch
        point = self._pending
        if self._since is not None:
            point.seconds += now - self._since
            point.waiting += waited - self._waited
            names, local = list(point.samples), 0
            for replica, count, was in zip(module.bound.replicas.all, seen, before, strict=True):
                new = count - was if count >= was else count
                point.samples[names[replica.context_index]] += new
                local += new
            point.total += samples_of_job(module, param, local)
        self._since, self._seen, self._waited, self._epoch = now, seen, waited, param.epoch
        point.updates += 1
        is_last = point.updates >= self.updates_per_point
        if param.locals.get("data") is not None:  # None: this worker had no samples in the batch
            self._losses.append(module.get_loss())
            if is_last:
                self._measure(param)
        if is_last:
            self._end_point()

    def _measure(self, param: BatchEndParam) -> None:
        if self._copied is not param.eval_metric:
            self._copied, self._metric = param.eval_metric, None
            try:
                self._metric = copy.deepcopy(param.eval_metric)
            except (TypeError, RuntimeError) as error:  # a user's metric may hold objects without copy
                name = type(param.eval_metric).__name__
                message = "%s cannot be copied, so its curve over batches is missing: %s"
                self._module.logger.warning(message, name, error)
        if self._metric is not None:
            self._metric.reset()
            self._metric.update_from(self._module, param.locals.get("label"))
            self._pending.metrics = dict(self._metric.get_global_name_value())

    def _end_point(self) -> None:
        """Add the point of all updates since the last one, if there are any, and begin the next."""
        point = self._pending
        if not point.updates:
            return
        point.step, point.epoch, point.time = self._module.step, self._epoch, time.perf_counter() - self._begun
        point.learning_rate = self._module.learning_rate
        if self._losses:
            losses = torch.stack([loss.double() for loss in self._losses]).tolist()
            point.loss, point.loss_min, point.loss_max = math.fsum(losses) / len(losses), min(losses), max(losses)
        self._begin_point()
        self._add(point)


def labels(module: Module) -> list[str]:
    """Return a unique label for each context of a module."""
    names = [str(context) for context in module.contexts]
    numbers = [f" #{names[: index + 1].count(name)}" * (names.count(name) > 1) for index, name in enumerate(names)]
    return [name + number for name, number in zip(names, numbers, strict=True)]


def samples_of_job(module: Module, param: BatchEndParam, local: int) -> int:
    """Return the number of samples of all workers in an update; ``local`` if it is unknown."""
    plan = module.position.plan
    if module.workers.count == 1 or "samples" not in plan:
        return local
    begins = [number * plan["batch_size"] for number in range(param.nbatch + 1 - param.batches, param.nbatch + 1)]
    return sum(min(plan["batch_size"], plan["samples"] - begin) for begin in begins)
