"""Rows of results, and statistics over the runs of one measurement."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

NOISY = 0.3
"""min..max over the median from which a measurement counts as noisy."""


def spread(values: Sequence[float]) -> Row:
    """Return median, minimum, 99th percentile, maximum and number of runs."""
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "min": ordered[0],
        "p99": ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))],
        "max": ordered[-1],
        "runs": len(ordered),
    }


def times_as_fast(seconds: Sequence[float], other: Sequence[float]) -> float:
    """Return how many times as fast something is as the other: the median over pairs of neighbouring runs."""
    return statistics.median(theirs / own for own, theirs in zip(seconds, other, strict=True))


def is_noisy(row: Row) -> bool:
    """Return whether a row's runs differ by more than `NOISY` of their median."""
    return "min" in row and row["runs"] > 1 and row["max"] - row["min"] > NOISY * row["p50"]
