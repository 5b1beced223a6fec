"""Callbacks for `fit`: speed, a progress bar, checkpoints.

A batch callback gets a `BatchEndParam`. An epoch callback gets (epoch, network, params, buffers), as MXNet's do.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gangline.models.checkpoint.retention import BEST, remove_older
from gangline.models.loop.improvement import is_better, worst
from gangline.models.metrics.metric import EvalMetric

if TYPE_CHECKING:
    from tqdm import tqdm

    from gangline.models.module import Module

_log = logging.getLogger("gangline")


@dataclass(frozen=True)
class BatchEndParam:
    """Where a loop stands after a batch."""

    epoch: int
    nbatch: int
    """The batch's number in its epoch, from 0."""
    eval_metric: EvalMetric
    locals: dict[str, Any] = field(default_factory=dict)
    """``module``, ``data``, ``label``, and ``num_batches`` of an epoch (None where unknown)."""
    batches: int = 1
    """How many batches made the update, the last of which this is."""


BatchCallback = Callable[[BatchEndParam], object]
"""What it returns matters to `fit` alone, which ends on True; see there."""
EpochCallback = Callable[[int, nn.Module, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], object]


class Speedometer:
    """Logs samples per second and the metric every ``frequent`` batches, in MXNet's words.

    In a job rank 0 does it for all workers; the metric is of its own samples.
    """

    def __init__(self, batch_size: int, frequent: int = 50, auto_reset: bool = True) -> None:
        """Say how to count.

        Args:
            batch_size: samples in a batch, over all workers.
            frequent: log every so many batches.
            auto_reset: begin the metric anew after each line, so that a line tells of its own batches.
        """
        if frequent < 1:
            raise ValueError(f"frequent is {frequent}; expected 1 or more")
        self.batch_size, self.frequent, self.auto_reset = batch_size, frequent, auto_reset
        self._since = 0.0
        self._begin: tuple[int, int] | None = None  # epoch and batch from which on is counted

    def __call__(self, param: BatchEndParam) -> None:
        """Count a batch."""
        if not _reports(param):
            return
        count = param.nbatch
        if self._begin is None or self._begin[0] != param.epoch or count <= self._begin[1]:
            self._begin, self._since = (param.epoch, count), time.perf_counter()
        if count // self.frequent == self._begin[1] // self.frequent:
            return
        batches = count - self._begin[1]
        speed = batches * self.batch_size / max(time.perf_counter() - self._since, 1e-9)
        values = "".join(f"\t{name}={value:f}" for name, value in param.eval_metric.get_name_value())
        begin = self._begin[1] if self.auto_reset else 0
        _log.info("Epoch[%d] Batch [%d-%d]\tSpeed: %.2f samples/sec%s", param.epoch, begin, count, speed, values)
        if self.auto_reset:
            param.eval_metric.reset_local()
        self._begin, self._since = (param.epoch, count), time.perf_counter()


class ProgressBar:
    """A tqdm bar for each epoch, with the metric beside it; in a job rank 0 shows it, with its own samples' metric."""

    def __init__(self, total: int | None = None) -> None:
        """``total`` batches make an epoch; None asks the data."""
        self._total = total
        self._bar: tqdm[Any] | None = None
        self._epoch = -1

    def __call__(self, param: BatchEndParam) -> None:
        """Count a batch."""
        if not _reports(param):
            return
        from tqdm import tqdm

        total = self._total or param.locals.get("num_batches")
        if self._bar is None or param.epoch != self._epoch or param.nbatch < self._bar.n:
            self.close()
            self._epoch = param.epoch
            self._bar = tqdm(total=total, initial=param.nbatch, desc=f"Epoch {param.epoch}", unit="batch", leave=False)
        self._bar.set_postfix(dict(param.eval_metric.get_name_value()), refresh=False)
        self._bar.update(param.nbatch + 1 - self._bar.n)
        if total is not None and param.nbatch + 1 >= total:
            self.close()

    def close(self) -> None:
        """Take the bar away; `fit` does it when it ends."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _reports(param: BatchEndParam) -> bool:
    module = param.locals.get("module")
    return module is None or bool(module.workers.is_first)


class Checkpoint:
    """Saves the module's checkpoint, optimizer state and all, every so many epochs, batches or minutes.

    Serves as both kinds of callback. An epoch's end is saved under the number of epochs completed; so is the
    middle of the epoch after it, which replaces it until that epoch ends. In a job every worker has one. When `fit`
    is stopped in the middle, it has one saved there.
    """

    def __init__(
        self,
        module: Module,
        prefix: str | Path,
        period: int | None = None,
        save_optimizer_states: bool = True,
        *,
        minutes: float | None = None,
        keep: int | None = None,
        keep_best: str | None = None,
        mode: str = "max",
    ) -> None:
        """Say where and how often.

        Args:
            module: whose checkpoint it is.
            prefix: as for `Module.save_checkpoint`.
            period: every so many epochs (or batches, as a batch callback); None: 1, or never where there are minutes.
            save_optimizer_states: whether a run can go on from it.
            minutes: save after a batch (or epoch, as an epoch callback) where so many have gone by since the last one;
                in a job by rank 0's clock.
            keep: how many of the prefix to keep, this one included; older ones are removed. None: all.
            keep_best: the name of a metric: after each validation that has a better value of it than all before,
                ``PREFIX-best`` is saved, too.
            mode: "max" or "min": which values are better.

        Raises:
            ValueError: a period or keep below 1, minutes that are not above 0, or an unknown mode.
        """
        for name, value in (("period", period), ("keep", keep)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected 1 or more")
        if minutes is not None and not 0 < minutes < math.inf:
            raise ValueError(f"minutes is {minutes}; expected a finite number above 0")
        self.module, self.prefix, self.save_optimizer_states = module, Path(prefix), save_optimizer_states
        self.period = 1 if period is None and minutes is None else period
        self.minutes, self.keep, self.keep_best, self.mode = minutes, keep, keep_best, mode
        self.best = worst(mode)
        """The best value of ``keep_best`` so far."""
        self._since: float | None = None
        self._saved_at: tuple[int, int] | None = None  # the module's step, and the epochs completed

    def __call__(self, when: int | BatchEndParam, *_: Any) -> None:
        """Save if it is time."""
        if isinstance(when, BatchEndParam):
            begun, done, completed = when.nbatch + 1 - when.batches, when.nbatch + 1, when.epoch
        else:
            begun, done, completed = when, when + 1, when + 1
        is_due = self._minutes_are_over()
        if is_due or (self.period is not None and done // self.period > begun // self.period):
            self.save(completed)

    def _minutes_are_over(self) -> bool:
        if self.minutes is None:
            return False
        now = self.module.workers.clock
        if self._since is None:
            self._since = now
        return now - self._since >= 60 * self.minutes

    def save_at_stop(self, completed: int) -> None:
        """Save what `fit` leaves when it is stopped, unless that is what was saved last."""
        if self._saved_at != (self.module.step, completed):
            self.save(completed)

    def save(self, completed: int) -> None:
        """Save now, after so many epochs completed; a collective of a job's workers."""
        self.module.save_checkpoint(self.prefix, completed, self.save_optimizer_states)
        self._saved_at, self._since = (self.module.step, completed), self.module.workers.clock
        if self.keep is not None and self.module.workers.is_first:
            try:
                remove_older(self.prefix, completed, self.keep)
            except OSError as error:
                _log.warning("an older checkpoint cannot be removed, and stays: %s", error)

    def after_validation(self, values: Mapping[str, float]) -> None:
        """Save the best, if this is it; `fit` calls it after each validation, on all workers.

        Args:
            values: of the metrics, by name, the same on all workers.
        """
        if self.keep_best is not None and is_better(values[self.keep_best], self.best, self.mode):
            self.best = values[self.keep_best]
            self.module.save_checkpoint(self.prefix, BEST, self.save_optimizer_states)

    @property
    def awaited_metric(self) -> str | None:
        """What validations must have, if anything; `fit` sees to it."""
        return self.keep_best

    def plan(self) -> list[Any]:
        """What must be equal on all workers of a job."""
        return [self.period, self.minutes, self.keep_best, self.mode, self.save_optimizer_states]

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of this."""
        return {"best": self.best}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Have the best value be that of the run that goes on."""
        self.best = state["best"]


def module_checkpoint(
    module: Module, prefix: str | Path, period: int = 1, save_optimizer_states: bool = False
) -> Checkpoint:
    """MXNet's name for an epoch callback that saves."""
    return Checkpoint(module, prefix, period, save_optimizer_states)
