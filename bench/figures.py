"""What the fields of a bench's rows are: descriptions of what was measured, or figures, and which figures are rates."""

from __future__ import annotations

from gangline.bench.report import Row

RATES = ("samples_per_s", "gb_per_s_per_device", "gb_per_s", "busbw_gbs", "algbw_gbs")
"""More is better."""
TIMES = ("seconds", "time_us")
"""Less is better."""
_OF_A_RUN = (
    "setting",
    "wrong",
    "split",
    "p50",
    "min",
    "p99",
    "max",
    "runs",
)  # no floats, and yet they may differ between runs of the same thing


def describing(row: Row) -> Row:
    """The fields that say what was measured, by which two runs' rows are matched."""
    return {
        name: value
        for name, value in row.items()
        if not isinstance(value, float) and value is not None and name not in (*RATES, *TIMES, *_OF_A_RUN)
    }


def figure(row: Row) -> tuple[str, bool]:
    """The field whose median a row's p50 is, and whether more of it is better; p50 itself where none is known."""
    for name in (*RATES, *TIMES):
        if row.get(name) is not None and row[name] == row.get("p50"):
            return name, name in RATES
    return "p50", False
