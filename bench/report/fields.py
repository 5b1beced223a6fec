"""Fields of rows: descriptions of what was measured, rates, and times."""

from __future__ import annotations

from gangline.bench.report.rows import Row

RATES = ("samples_per_s", "gb_per_s_per_device", "gb_per_s", "busbw_gbs", "algbw_gbs")
"""Fields for which more is better."""
TIMES = {"seconds": 1.0, "time_us": 1e-6, "time_ms": 1e-3}
"""Fields for which less is better, and their unit in seconds."""
RUNS = ("p50", "min", "p99", "max", "runs")
"""Fields of `spread`."""
_MAY_DIFFER = ("setting", "wrong", "split", *RUNS)
"""Fields other than floats that may differ between two measurements of the same thing."""


def describing(row: Row) -> Row:
    """Return the fields that say what was measured; two results' rows are matched by them."""
    return {
        name: value
        for name, value in row.items()
        if not isinstance(value, float) and value is not None and name not in (*RATES, *TIMES, *_MAY_DIFFER)
    }


def figure(row: Row) -> tuple[str, bool]:
    """Return the field whose median is the row's p50, or "p50" if none is known, and whether more of it is better."""
    for name in (*RATES, *TIMES):
        if row.get(name) is not None and row[name] == row.get("p50"):
            return name, name in RATES
    return "p50", False
