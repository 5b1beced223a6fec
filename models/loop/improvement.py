"""Whether a metric's value is better than another."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MODES = ("max", "min")


def worst(mode: str) -> float:
    """What any number is better than.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in _MODES:
        raise ValueError(f"mode is {mode!r}; expected one of {list(_MODES)}")
    return -math.inf if mode == "max" else math.inf


def is_better(value: float, best: float, mode: str, min_delta: float = 0.0) -> bool:
    """Whether ``value`` improves on ``best`` by more than ``min_delta``; NaN never does."""
    return value > best + min_delta if mode == "max" else value < best - min_delta


def check_metric(who: str, metric: str, names: Sequence[str]) -> None:
    """See that validations have a metric; "" stands for any.

    Raises:
        ValueError: they have not; the message names those there are.
    """
    if not names or metric not in ("", *names):
        there = f"has {list(names)}" if names else "does not happen: there is no eval_data"
        raise ValueError(
            f"{who} waits for {metric or 'a metric'!r}, but validation {there}; expected one of its metrics"
        )
