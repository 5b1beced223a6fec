"""Stopping: signals that end training cleanly, and early stopping on a metric."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from gangline.models.arguments import check_int, check_number
from gangline.models.loop.callbacks import BatchEndParam, check_metric, is_better, worst
from gangline.models.metrics.metric import reported_name

_log = logging.getLogger("gangline")
_received: str | None = None
"""Name of the signal received inside a `stop_on` block."""
_blocks = 0


@contextmanager
def stop_on(*numbers: signal.Signals) -> Iterator[None]:
    """Stop `fit` after the current step at these signals in this context, instead of killing the process.

    In a job all workers end after the same update if one of them receives the signal. A second signal has its previous
    effect. Python delivers signals to the main thread only; in any other thread only a warning is logged.

    Args:
        numbers: signals, such as `signal.SIGTERM`.
    """
    global _received, _blocks
    if threading.current_thread() is not threading.main_thread():
        _log.warning("stop_on() has no effect outside the main thread, which alone receives signals")
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}

    def handle(number: int, _: FrameType | None) -> None:
        global _received
        _received = signal.Signals(number).name
        for each, handler in before.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)

    for number in numbers:
        signal.signal(number, handle)
    _blocks += 1
    try:
        yield
    finally:
        _blocks -= 1
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        if not _blocks:
            _received = None


def received_signal() -> str | None:
    """Return the name of the signal received inside a `stop_on` block, if any."""
    return _received


class EarlyStopping:
    """An ``eval_end_callback`` of `fit` that ends training if a metric has not improved for some validations.

    Checkpoints store its counts, so that a resumed run continues them.
    """

    reason = "patience"
    """Return value of a `fit` that was ended by this callback."""

    def __init__(self, patience: int, metric: str = "accuracy", mode: str = "max", min_delta: float = 0.0) -> None:
        """Configure the callback.

        Args:
            patience: number of validations in a row without an improvement after which training ends.
            metric: name of the metric, as validations log it.
            mode: "max" or "min": the direction of improvement.
            min_delta: minimum difference to the best value that counts as an improvement.

        Raises:
            ValueError: if ``patience`` is below 1, ``mode`` is unknown, or ``min_delta`` is negative or not finite.
            TypeError: if ``patience`` is not an int.
        """
        check_int("patience", patience)
        check_number("min_delta", min_delta)
        self.patience, self.metric, self.mode, self.min_delta = patience, reported_name(metric), mode, min_delta
        self.awaited_metric, self.state_key = self.metric, f"{self.metric} {mode}"
        self.best = worst(mode)
        """Best value so far."""
        self.waited = 0
        """Validations since the best value."""

    def __call__(self, param: BatchEndParam) -> bool:
        """Count a validation; return True to end training."""
        values = dict(param.eval_metric.get_global_name_value())
        check_metric("EarlyStopping", self.metric, list(values))
        if is_better(values[self.metric], self.best, self.mode, self.min_delta):
            self.best, self.waited = values[self.metric], 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def state(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return {"best": self.best, "waited": self.waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.best, self.waited = state["best"], state["waited"]
