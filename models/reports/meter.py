"""Measurement of a run's progress from the callbacks of `fit`, without repeating any computation of the step."""

from __future__ import annotations

import copy
import math
import time
from typing import TYPE_CHECKING

import torch

from gangline.models.metrics.metric import EvalMetric
from gangline.models.reports.record import Point

if TYPE_CHECKING:
    from gangline.models.loop.callbacks import BatchEndParam
    from gangline.models.module import Module


class Meter:
    """Builds points from the callbacks of `fit`.

    The loss is the one that the step computed. The metric is evaluated on single batches, on request, by a copy of
    `fit`'s metric.
    """

    def __init__(self, module: Module) -> None:
        """Start to measure ``module``."""
        self._module = module
        self._metric: EvalMetric | None = None
        self._copied: EvalMetric | None = None  # the original of the copy
        self.begin_run()

    def begin_run(self) -> None:
        """Start a run; the time of its first update is not counted, because it includes set-up."""
        self._since: float | None = None
        self._seen: list[int] = []
        self._waited = 0.0
        self._epoch: int | None = None
        self._begin_point()

    def _begin_point(self) -> None:
        self.pending = Point(samples=dict.fromkeys(labels(self._module), 0))
        """The updates since the last `point`."""
        self._losses: list[torch.Tensor] = []

    def pause(self) -> None:
        """Exclude the time since the last update, such as that of a validation."""
        if self._since is not None:
            self._since = time.perf_counter()

    def count(self, param: BatchEndParam, *, measure: bool) -> None:
        """Add an update, and with ``measure`` evaluate the metric on its last batch."""
        now, module = time.perf_counter(), self._module
        seen, waited = module.bound.replicas.samples_seen, module.seconds_waiting
        before = self._seen if param.epoch == self._epoch else [0] * len(seen)  # the counters restart in each epoch
        point = self.pending
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
        if param.locals.get("data") is not None:  # None: this worker had no samples in the batch
            self._losses.append(module.get_loss())
            if measure:
                self._measure(param)

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
            self.pending.metrics = dict(self._metric.get_global_name_value())

    def point(self, when: float) -> Point:
        """Return the point of all updates since the last one, at ``when`` seconds into the run, and start the next."""
        point = self.pending
        point.step, point.epoch, point.time = self._module.step, self._epoch or 0, when
        point.learning_rate = self._module.learning_rate
        if self._losses:
            losses = torch.stack([loss.double() for loss in self._losses]).tolist()
            point.loss, point.loss_min, point.loss_max = math.fsum(losses) / len(losses), min(losses), max(losses)
        self._begin_point()
        return point


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
