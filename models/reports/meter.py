"""Reads a run's progress off the callbacks of `fit`, without running anything of the step again."""

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
    """Reads points off the callbacks of `fit`.

    The loss is the one that the step computed. The metric is `fit`'s own once more, over single batches: a copy of it,
    so that nobody's counting is disturbed, and only of batches that are asked for.
    """

    def __init__(self, module: Module) -> None:
        """Begin to measure ``module``."""
        self._module = module
        self._metric: EvalMetric | None = None
        self._copied: EvalMetric | None = None  # what that is a copy of
        self.begin_run()

    def begin_run(self) -> None:
        """Expect the first update of a run, whose seconds are not those of a step."""
        self._since: float | None = None
        self._seen: list[int] = []
        self._waited = 0.0
        self._epoch: int | None = None
        self._begin_point()

    def _begin_point(self) -> None:
        self.updates = 0
        """How many are measured since the last `point`."""
        self._losses: list[torch.Tensor] = []
        self._values: dict[str, float] = {}
        self._seconds = self._waiting = 0.0
        self._samples: dict[str, int] = dict.fromkeys(labels(self._module), 0)
        self._total = 0

    def pause(self) -> None:
        """Leave out what has passed since the last update, such as validation."""
        if self._since is not None:
            self._since = time.perf_counter()

    def count(self, param: BatchEndParam, *, measure: bool) -> None:
        """Count an update.

        Args:
            param: what the callback was told.
            measure: whether the metric is taken of its last batch.
        """
        now, module = time.perf_counter(), self._module
        seen, waited = module.bound.replicas.samples_seen, module.seconds_waiting
        if param.epoch != self._epoch:
            self._epoch, before = param.epoch, [0] * len(seen)  # they are counted by epoch
        else:
            before = self._seen
        if self._since is not None:
            self._seconds += now - self._since
            self._waiting += waited - self._waited
            names, own = list(self._samples), 0
            for replica, count, was in zip(module.bound.replicas.all, seen, before, strict=True):
                new = count - was if count >= was else count
                self._samples[names[replica.context_index]] += new
                own += new
            self._total += samples_of_job(module, param, own)
        self._since, self._seen, self._waited = now, seen, waited
        self.updates += 1
        data = param.locals.get("data")
        if data is not None:  # None: this worker had no part of the batch
            self._losses.append(module.get_loss())
            if measure:
                self._measure(param)

    def _measure(self, param: BatchEndParam) -> None:
        if self._copied is not param.eval_metric:
            self._copied, self._metric = param.eval_metric, self._copy(param.eval_metric)
        if self._metric is not None:
            self._metric.reset()
            self._metric.update(param.locals.get("label"), self._module.get_outputs(), self._module)
            self._values = dict(self._metric.get_global_name_value())

    def _copy(self, metric: EvalMetric) -> EvalMetric | None:
        try:
            return copy.deepcopy(metric)
        except (TypeError, RuntimeError) as error:  # a user's own may hold what has no copy
            self._module.logger.warning(
                "%s cannot be copied, so there is no curve of it over batches: %s", type(metric).__name__, error
            )
            return None

    def point(self, when: float) -> Point:
        """What was counted since the last point, at ``when`` seconds into the run; begins the next."""
        losses = torch.stack([loss.double() for loss in self._losses]).tolist() if self._losses else []
        point = Point(
            self._module.step,
            self._epoch or 0,
            when,
            self.updates,
            math.fsum(losses) / len(losses) if losses else None,
            min(losses) if losses else None,
            max(losses) if losses else None,
            self._values,
            self._module.learning_rate,
            self._seconds,
            self._waiting,
            self._samples,
            self._total,
        )
        self._begin_point()
        return point


def labels(module: Module) -> list[str]:
    """The names of a module's contexts, each its own."""
    names = [str(context) for context in module.contexts]
    return [
        f"{name} #{names[:place].count(name) + 1}" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def samples_of_job(module: Module, param: BatchEndParam, own: int) -> int:
    """How many samples all workers had in an update; ``own`` where that is not known."""
    plan = module.position.plan
    if module.workers.count == 1 or "samples" not in plan:
        return own
    begins = [number * plan["batch_size"] for number in range(param.nbatch + 1 - param.batches, param.nbatch + 1)]
    return sum(min(plan["batch_size"], plan["samples"] - begin) for begin in begins)
