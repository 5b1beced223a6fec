"""`mx.callback`: functions that `Module.fit` calls after batches and epochs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from gangline.models.loop.callbacks import BatchEndParam as BatchEndParam
from gangline.models.loop.callbacks import ProgressBar as ProgressBar
from gangline.models.loop.callbacks import Speedometer as Speedometer
from gangline.mxnet.model import save_checkpoint


def log_train_metric(period: int, auto_reset: bool = False) -> Callable[[BatchEndParam], None]:
    """Return a function that logs the metric each ``period`` batches."""

    def log(param: BatchEndParam) -> None:
        if param.nbatch % period == 0:
            for name, value in param.eval_metric.get_name_value():
                logging.info("Iter[%d] Batch[%d] Train-%s=%f", param.epoch, param.nbatch, name, value)
            if auto_reset:
                param.eval_metric.reset_local()

    return log


def do_checkpoint(prefix: str, period: int = 1) -> Callable[..., None]:
    """Return a function that writes the weights each ``period`` epochs, as ``prefix-0001.params``."""
    return _each(period, partial(save_checkpoint, prefix))


def module_checkpoint(
    mod: Any, prefix: str, period: int = 1, save_optimizer_states: bool = False
) -> Callable[..., None]:
    """Return a function that writes a module's weights, and its optimizer's state, each ``period`` epochs."""
    return _each(period, lambda epoch, *_: mod.save_checkpoint(prefix, epoch, save_optimizer_states))


def _each(period: int, save: Callable[..., None]) -> Callable[..., None]:
    def call(epoch: int, symbol: Any = None, arg: Any = None, aux: Any = None) -> None:
        if (epoch + 1) % period == 0:
            save(epoch + 1, symbol, arg, aux)

    return call
