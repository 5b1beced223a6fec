"""Comparison of metric values, for callbacks that keep the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MODES = ("max", "min")


def worst(mode: str) -> float:
    """Return the value that any number improves on.

    Raises:
        ValueError: if the mode is unknown.
    """
    if mode not in _MODES:
        raise ValueError(f"mode is {mode!r}; expected one of {list(_MODES)}")
    return -math.inf if mode == "max" else math.inf


def is_better(value: float, best: float, mode: str, min_delta: float = 0.0) -> bool:
    """Return True if ``value`` improves on ``best`` by more than ``min_delta``; NaN never does."""
    return value > best + min_delta if mode == "max" else value < best - min_delta


def check_metric(user: str, metric: str, names: Sequence[str]) -> None:
    """Check that validation computes a metric that ``user`` needs; "" means any metric.

    Raises:
        ValueError: if it does not; the message names the metrics it has.
    """
    if not names or metric not in ("", *names):
        computed = f"computes {list(names)}" if names else "is off, because there is no eval_data"
        raise ValueError(
            f"{user} needs {metric or 'a metric'!r}, but validation {computed}; expected one of its metrics"
        )
