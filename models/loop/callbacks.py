"""Callbacks for `fit`: speed, a progress bar, checkpoints.

A batch callback gets a `BatchEndParam`. An epoch callback gets (epoch, network, params, buffers), as MXNet's do.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gangline.kvstore.errors import DiskFullError
from gangline.models.arguments import check_int, check_number
from gangline.models.checkpoint.checkpoint import BEST, epochs, remove_older
from gangline.models.metrics.metric import EvalMetric, reported_name

if TYPE_CHECKING:
    from tqdm import tqdm

    from gangline.models.module import Module

_log = logging.getLogger("gangline")
_MODES = ("max", "min")


@dataclass(frozen=True)
class BatchEndParam:
    """State of a loop after a batch."""

    epoch: int
    nbatch: int
    """Index of the batch in its epoch."""
    eval_metric: EvalMetric
    locals: dict[str, Any] = field(default_factory=dict)
    """``module``, ``data``, ``label``, and ``num_batches`` of an epoch (None if unknown)."""
    batches: int = 1
    """Number of batches in the update; this is the last of them."""


BatchCallback = Callable[[BatchEndParam], object]
"""Batch callback; `fit` ends if it returns True."""
EpochCallback = Callable[[int, nn.Module, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], object]


class Speedometer:
    """Logs samples per second and the metric every ``frequent`` batches, in MXNet's format.

    In a job rank 0 logs the speed of all workers, and the metric of its own samples.
    """

    def __init__(self, batch_size: int, frequent: int = 50, auto_reset: bool = True) -> None:
        """Configure the callback.

        Args:
            batch_size: number of samples in a batch, over all workers.
            frequent: number of batches between two lines.
            auto_reset: reset the metric after each line, so that a line covers its own batches only.

        Raises:
            ValueError: if ``frequent`` is below 1; TypeError if it is not an int.
        """
        check_int("frequent", frequent)
        self.batch_size, self.frequent, self.auto_reset = batch_size, frequent, auto_reset
        self._since = 0.0
        self._begin: tuple[int, int] | None = None  # epoch and batch at which counting began

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
    """A tqdm progress bar for each epoch: time left, samples per second and metrics; in a job rank 0 shows it."""

    def __init__(self, total: int | None = None, batch_size: int | None = None) -> None:
        """Configure the callback.

        Args:
            total: number of batches in an epoch; None takes it from the data.
            batch_size: number of samples in a batch, over all workers; None shows no samples per second.
        """
        self._total, self._batch_size = total, batch_size
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
        shown: dict[str, Any] = {name: f"{value:.4g}" for name, value in param.eval_metric.get_name_value()}
        rate = self._bar.format_dict["rate"]  # batches per second
        if self._batch_size is not None and rate:
            shown["samples/s"] = f"{rate * self._batch_size:.0f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(param.nbatch + 1 - self._bar.n)
        if total is not None and param.nbatch + 1 >= total:
            self.close()

    def close(self) -> None:
        """Remove the bar; `fit` calls this at its end."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _reports(param: BatchEndParam) -> bool:
    module = param.locals.get("module")
    return module is None or bool(module.workers.is_first)


def worst(mode: str) -> float:
    """Return the value that any number improves on, for the mode "max" or "min"."""
    if mode not in _MODES:
        raise ValueError(f"mode is {mode!r}; expected one of {list(_MODES)}")
    return -math.inf if mode == "max" else math.inf


def is_better(value: float, best: float, mode: str, min_delta: float = 0.0) -> bool:
    """Return True if ``value`` improves on ``best`` by more than ``min_delta``; NaN never does."""
    return value > best + min_delta if mode == "max" else value < best - min_delta


def check_metric(user: str, metric: str, names: Sequence[str]) -> None:
    """Check that validation computes a metric that ``user`` needs; "" means any metric."""
    if not names or metric not in ("", *names):
        computed = f"computes {list(names)}" if names else "is off, because there is no eval_data"
        raise ValueError(
            f"{user} needs {metric or 'a metric'!r}, but validation {computed}; expected one of its metrics"
        )


class Checkpoint:
    """Saves checkpoints of a module every N epochs, batches or minutes.

    Serves as batch callback and as epoch callback. Checkpoints are numbered by the epochs completed, so a checkpoint in
    the middle of the next epoch replaces the one before it. In a job every worker needs the callback. If `fit` is
    stopped in the middle of an epoch, it saves a checkpoint there.

    If a checkpoint does not fit on the disk, a warning is logged, the previous one is kept, and training continues. If
    the last attempt failed, the state is saved again at the end of `fit`, stopped or not; then a failure is an error.
    Weights that are not finite are not saved, so that the newest checkpoint can be resumed.
    """

    def __init__(
        self,
        module: Module | None,
        prefix: str | Path,
        period: int | None = None,
        save_optimizer_states: bool = True,
        *,
        minutes: float | None = None,
        keep: int | None = None,
        keep_best: str | None = None,
        mode: str = "max",
    ) -> None:
        """Configure the callback.

        Args:
            module: module to save; None: the module whose `fit` gets this callback.
            prefix: as for `Module.save_checkpoint`.
            period: number of epochs (as a batch callback: batches) between two checkpoints; None: 1, or no limit if
                ``minutes`` is given.
            save_optimizer_states: include the optimizer's state, which `resume` needs.
            minutes: save after a batch (as an epoch callback: epoch) if this many minutes have passed since the last
                checkpoint, by rank 0's clock.
            keep: number of checkpoints to keep; older ones are removed. None: all.
            keep_best: name of a metric; ``PREFIX-best`` is saved after each validation that improves it.
            mode: "max" or "min": the direction of improvement.

        Raises:
            ValueError: if ``period`` or ``keep`` is below 1, ``minutes`` is not above 0, or ``mode`` is unknown.
            TypeError: if one of them has a wrong type.
        """
        for name, value in (("period", period), ("keep", keep)):
            if value is not None:
                check_int(name, value)
        if minutes is not None:
            check_number("minutes", minutes, excluded=True)
        self._module, self.prefix, self.save_optimizer_states = module, Path(prefix), save_optimizer_states
        self.period = 1 if period is None and minutes is None else period
        self.minutes, self.keep, self.mode = minutes, keep, mode
        self.awaited_metric = self.keep_best = reported_name(keep_best) if keep_best is not None else None
        self.state_key = self.prefix.name if keep_best is None else f"{self.prefix.name} {self.keep_best} {mode}"
        self.best = worst(mode)
        """Best value of ``keep_best`` so far."""
        self._since: float | None = None
        self._saved_at: tuple[int, int] | None = None  # step and epochs completed
        self._is_unsaved = False  # True after a save that did not fit on the disk

    @property
    def module(self) -> Module:
        """The module to save; RuntimeError if none was given and no `fit` has begun."""
        if self._module is None:
            raise RuntimeError(f"the checkpoint callback of {self.prefix} has no module; pass it to fit(), or give one")
        return self._module

    def attach(self, module: Module) -> None:
        """Save this module, if none was given before."""
        self._module = self._module if self._module is not None else module

    def __call__(self, when: int | BatchEndParam, *_: Any) -> None:
        """Save if it is due."""
        if isinstance(when, BatchEndParam):
            begun, done, completed = when.nbatch + 1 - when.batches, when.nbatch + 1, when.epoch
        else:
            begun, done, completed = when, when + 1, when + 1
        is_due = self._minutes_have_passed()
        if is_due or (self.period is not None and done // self.period > begun // self.period):
            try:
                self.save(completed)
            except DiskFullError as error:
                self._is_unsaved, self._since = True, self.module.workers.clock
                self._warn(error)

    def _minutes_have_passed(self) -> bool:
        if self.minutes is None:
            return False
        now = self.module.workers.clock
        if self._since is None:
            self._since = now
        return now - self._since >= 60 * self.minutes

    def save_at_stop(self, completed: int) -> None:
        """Save when `fit` is stopped, unless this state was saved last."""
        if self._saved_at != (self.module.run_state.step, completed):
            self.save(completed)

    def save_at_end(self, completed: int) -> None:
        """Save at the end of `fit` if the newest attempt failed."""
        if self._is_unsaved:
            self.save(completed)

    def save(self, completed: int) -> None:
        """Save now, under the number of epochs completed. Collective.

        Raises:
            DiskFullError: if there is no space for it.
        """
        is_saved = self._save_finite(completed)
        self._saved_at, self._since = (self.module.run_state.step, completed), self.module.workers.clock
        self._is_unsaved = False
        if not is_saved:
            return
        if self.keep is not None and self.module.workers.is_first:
            try:
                remove_older(self.prefix, completed, self.keep)
            except OSError as error:
                _log.warning("an older checkpoint could not be removed: %s", error)

    def _save_finite(self, number: int | str) -> bool:
        """Save, and return True; if the weights of any worker are not finite, return False. Collective."""
        module = self.module
        name = module.bound.replicas.first_non_finite()
        names = [one for one in module.workers.all_gather(name, "save_checkpoint") if one is not None]
        if not names:
            module.save_checkpoint(self.prefix, number, self.save_optimizer_states)
        elif module.workers.is_first:
            _log.warning("checkpoint %s-%s is not saved: parameter %r is not finite", self.prefix, number, names[0])
        return not names

    def after_validation(self, values: Mapping[str, float]) -> None:
        """Save ``PREFIX-best`` if the metric has improved; `fit` calls this after each validation, on all workers.

        Args:
            values: the metrics by name, equal on all workers.
        """
        if self.keep_best is not None and is_better(values[self.keep_best], self.best, self.mode):
            before, self.best = self.best, values[self.keep_best]
            try:
                if not self._save_finite(BEST):
                    self.best = before
            except DiskFullError as error:
                self.best = before
                self._warn(error)

    def _warn(self, error: DiskFullError) -> None:
        if self.module.workers.is_first:
            newest = epochs(self.prefix)[-1:]
            stays = f"checkpoint {newest[0]} stays" if newest else "there is no checkpoint yet"
            _log.warning("%s; training goes on, and %s", error, stays)

    def plan(self) -> list[Any]:
        """Return the settings that must be equal on all workers."""
        return [self.period, self.minutes, self.keep_best, self.mode, self.save_optimizer_states]

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"best": self.best} if self.keep_best is not None else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.best = state.get("best", self.best)

    def load_better(self, state: Mapping[str, Any] | None) -> None:
        """Replace the best value by that of a `state` if it is better."""
        if state and is_better(state["best"], self.best, self.mode):
            self.best = state["best"]


def module_checkpoint(
    module: Module, prefix: str | Path, period: int = 1, save_optimizer_states: bool = False
) -> Checkpoint:
    """Return an epoch callback that saves a module; MXNet's name for `Checkpoint`."""
    return Checkpoint(module, prefix, period, save_optimizer_states)


def do_checkpoint(prefix: str | Path, period: int = 1) -> Checkpoint:
    """Return an epoch callback that saves the module whose `fit` gets it, without optimizer state; MXNet's name."""
    return Checkpoint(None, prefix, period, save_optimizer_states=False)
