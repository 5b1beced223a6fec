"""Rows of results: their fields, and statistics over the runs of one measurement."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

NOISY = 0.3
"""Ratio of range to median from which a measurement counts as noisy."""

RATES = ("samples_per_s", "tokens_per_s", "gb_per_s_per_device", "gb_per_s", "busbw_gbs", "algbw_gbs")
"""Fields for which more is better."""
TIMES = {"seconds": 1.0, "time_us": 1e-6, "time_ms": 1e-3}
"""Fields for which less is better, and their unit in seconds."""
RUNS = ("p50", "min", "p99", "max", "runs")
"""Fields of `spread`."""
_MAY_DIFFER = ("setting", "wrong", "split", *RUNS)
"""Fields other than floats that may differ between two measurements of the same thing."""


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
    """Return the speed-up over ``other``: the median over pairs of neighbouring runs."""
    return statistics.median(theirs / own for own, theirs in zip(seconds, other, strict=True))


def is_noisy(row: Row) -> bool:
    """Return whether a row's runs differ by more than `NOISY` of their median."""
    return "min" in row and row["runs"] > 1 and row["max"] - row["min"] > NOISY * row["p50"]


def describing(row: Row) -> Row:
    """Return the fields that identify the measurement, by which rows of two results are matched."""
    return {
        name: value
        for name, value in row.items()
        if not isinstance(value, float) and value is not None and name not in (*RATES, *TIMES, *_MAY_DIFFER)
    }


def figure(row: Row) -> tuple[str, bool]:
    """Return the field whose median is the row's p50 (else "p50"), and whether higher values are better."""
    for name in (*RATES, *TIMES):
        if row.get(name) is not None and row[name] == row.get("p50"):
            return name, name in RATES
    return "p50", False
