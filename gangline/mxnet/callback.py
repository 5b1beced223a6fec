"""`mx.callback`: functions that `Module.fit` calls after batches and epochs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from gangline.mxnet import metric
from gangline.mxnet.model import save_checkpoint


class BatchEndParam(NamedTuple):
    """Argument of the functions that are called after a batch."""

    epoch: int
    nbatch: int
    eval_metric: metric.EvalMetric | None
    locals: dict[str, Any]


class Speedometer:
    """Logs samples per second and the metric each ``frequent`` batches."""

    def __init__(self, batch_size: int, frequent: int = 50, auto_reset: bool = True) -> None:
        self.batch_size, self.frequent, self.auto_reset = batch_size, frequent, auto_reset
        self._began, self._last = 0.0, 0

    def __call__(self, param: BatchEndParam) -> None:
        """Count a batch."""
        if param.nbatch < self._last or not self._began:
            self._began = time.monotonic()
        elif param.nbatch % self.frequent == 0:
            speed = self.frequent * self.batch_size / max(time.monotonic() - self._began, 1e-9)
            pairs = [] if param.eval_metric is None else param.eval_metric.get_name_value()
            shown = "".join(f"\t{name}={value:f}" for name, value in pairs)
            logging.info("Epoch[%d] Batch [%d]\tSpeed: %.2f samples/sec%s", param.epoch, param.nbatch, speed, shown)
            if param.eval_metric is not None and self.auto_reset:
                param.eval_metric.reset_local()
            self._began = time.monotonic()
        self._last = param.nbatch


def log_train_metric(period: int, auto_reset: bool = False) -> Callable[[BatchEndParam], None]:
    """Return a function that logs the metric each ``period`` batches."""

    def log(param: BatchEndParam) -> None:
        if param.nbatch % period == 0 and param.eval_metric is not None:
            for name, value in param.eval_metric.get_name_value():
                logging.info("Iter[%d] Batch[%d] Train-%s=%f", param.epoch, param.nbatch, name, value)
            if auto_reset:
                param.eval_metric.reset_local()

    return log


def do_checkpoint(prefix: str, period: int = 1) -> Callable[..., None]:
    """Return a function that writes the weights each ``period`` epochs, as ``prefix-0001.params``."""

    def save(epoch: int, symbol: Any = None, arg: Any = None, aux: Any = None) -> None:
        if (epoch + 1) % period == 0:
            save_checkpoint(prefix, epoch + 1, symbol, arg, aux)

    return save


def module_checkpoint(
    mod: Any, prefix: str, period: int = 1, save_optimizer_states: bool = False
) -> Callable[..., None]:
    """Return a function that writes a module's weights, and its optimizer's state, each ``period`` epochs."""

    def save(epoch: int, *_: Any) -> None:
        if (epoch + 1) % period == 0:
            mod.save_checkpoint(prefix, epoch + 1, save_optimizer_states)

    return save
