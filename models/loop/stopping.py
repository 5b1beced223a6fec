"""Stopping: signals that end training cleanly, and patience with a metric that no longer improves."""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gangline.models.loop.callbacks import BatchEndParam
from gangline.models.loop.improvement import check_metric, is_better, worst

_log = logging.getLogger("gangline")
_heard: str | None = None
"""The name of the signal that a block of `stop_on` has heard."""
_blocks = 0


@contextmanager
def stop_on(*numbers: signal.Signals) -> Iterator[None]:
    """A block in which these signals have `fit` end, once the step that runs is over, instead of killing the process.

    In a job all workers end after the same step if one of them hears the signal. The first signal is taken as said; a
    second one does what it did before the block. Only the main thread can hear signals: in another one nothing
    happens but a warning.

    Args:
        numbers: such as `signal.SIGTERM`.
    """
    global _heard, _blocks
    if threading.current_thread() is not threading.main_thread():
        _log.warning("stop_on() hears signals in the main thread alone: here it does nothing")
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}

    def take(number: int, _: FrameType | None) -> None:
        global _heard
        _heard = signal.Signals(number).name
        for each, handler in before.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)

    for number in numbers:
        signal.signal(number, take)
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1
        for number, handler in before.items():
            if signal.getsignal(number) is take:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if not _blocks:
            _heard = None


def signal_heard() -> str | None:
    """The name of the signal that a block of `stop_on` has heard, if one has."""
    return _heard


class EarlyStopping:
    """An ``eval_end_callback`` of `fit` that ends training when a metric has not improved for some validations.

    What it has counted belongs to checkpoints, so that a run that goes on counts on.
    """

    reason = "patience"
    """What `fit` returns when this has ended it."""

    def __init__(self, patience: int, metric: str = "accuracy", mode: str = "max", min_delta: float = 0.0) -> None:
        """Say how long to wait.

        Args:
            patience: end after so many validations in a row without an improvement.
            metric: by the name that validations log it under.
            mode: "max" or "min": what is better.
            min_delta: by how much more than the best a value must be better to count.

        Raises:
            ValueError: a patience below 1, an unknown mode, a negative min_delta.
            TypeError: a patience that is no int.
        """
        if isinstance(patience, bool) or not isinstance(patience, int):
            raise TypeError(f"patience is {patience!r}; expected an int")
        if patience < 1:
            raise ValueError(f"patience is {patience}; expected 1 or more")
        if not 0 <= min_delta < math.inf:
            raise ValueError(f"min_delta is {min_delta}; expected a finite number, 0 or more")
        self.patience, self.metric, self.mode, self.min_delta = patience, metric, mode, min_delta
        self.best = worst(mode)
        """The best value so far."""
        self.waited = 0
        """Validations since it was reached."""

    def __call__(self, param: BatchEndParam) -> bool:
        """Look at a validation; True ends training."""
        values = dict(param.eval_metric.get_global_name_value())
        check_metric("EarlyStopping", self.metric, list(values))
        if is_better(values[self.metric], self.best, self.mode, self.min_delta):
            self.best, self.waited = values[self.metric], 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    @property
    def awaited_metric(self) -> str:
        """What validations must have; `fit` sees to it."""
        return self.metric

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"best": self.best, "waited": self.waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Count on from there."""
        self.best, self.waited = state["best"], state["waited"]
