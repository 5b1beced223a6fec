"""How many seconds to wait for whom, as the environment says."""

from __future__ import annotations

import math
import os
from typing import NamedTuple


class Limits(NamedTuple):
    """Seconds, as the environment gives them."""

    heartbeat: float
    """GANGLINE_HEARTBEAT, default 1: between two signs of life."""
    heartbeat_limit: float
    """GANGLINE_HEARTBEAT_LIMIT, default 10: without one, and a rank is dead."""
    stall_warn: float
    """GANGLINE_STALL_WARN, default 60: a rank that is late by this is named in a warning."""
    timeout: float
    """GANGLINE_TIMEOUT, default 1800: late by this it is a `StallError`."""


def limits() -> Limits:
    """The limits that the environment sets.

    Raises:
        ValueError: a variable is no number of seconds above 0.
    """
    return Limits(
        _seconds("GANGLINE_HEARTBEAT", 1),
        _seconds("GANGLINE_HEARTBEAT_LIMIT", 10),
        _seconds("GANGLINE_STALL_WARN", 60),
        _seconds("GANGLINE_TIMEOUT", 1800),
    )


def _seconds(name: str, default: float) -> float:
    word = os.environ.get(name, str(default))
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < 1e6:
        raise ValueError(f"{name} is {word!r}; expected a number of seconds above 0 and below a million")
    return seconds
