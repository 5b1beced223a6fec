"""`--plot` of the parameter server's bench: time over the key's size, a curve for each side."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from gangline.bench.plot import COLOURS, check
from gangline.bench.report import Row


def draw(title: str, rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of medians, and around them what the runs gave from the least to the most; both axes logarithmic.

    Raises:
        ValueError: ``path`` is no .png, or there are no rows.
        RuntimeError: matplotlib is not installed.
    """
    matplotlib = check(path)
    if not rows:
        raise ValueError(f"there are no rows to draw in {path}")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    for place, side in enumerate(dict.fromkeys(_side(row) for row in rows)):
        found = [row for row in rows if _side(row) == side]
        sizes, colour = [row["size"] for row in found], COLOURS[place % len(COLOURS)]
        axes.plot(sizes, [row["p50"] for row in found], marker="o", markersize=3, color=colour, label=side)
        lows, highs = ([row[end] for row in found] for end in ("min", "max"))
        axes.fill_between(sizes, lows, highs, color=colour, alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("bytes of the key")
    axes.set_ylabel(f"{rows[0]['mode']}, {rows[0]['workers']} workers: time us (less is better)")
    axes.grid(alpha=0.3)
    axes.legend()
    drawing.suptitle("\n".join(textwrap.wrap(title, 90)), fontsize=9, x=0.01, horizontalalignment="left")
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


def _side(row: Row) -> str:
    """Who, how, and by what; a setting that differs from size to size does not make another side."""
    return ", ".join(filter(None, [row["who"], row["transport"], row["call"], row["compression"]]))
