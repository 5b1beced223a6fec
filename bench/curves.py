"""`--plot` of a range of sizes: time over size, a curve for each side."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from gangline.bench.plot import COLOURS, check
from gangline.bench.report import Row


def draw(title: str, rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: a panel for each number of ranks, out of place and in place; both axes are logarithmic.

    A curve is the medians of a side; around it lies what its runs gave from the least to the most.

    Raises:
        ValueError: ``path`` is no .png, or there are no rows.
        RuntimeError: matplotlib is not installed.
    """
    matplotlib = check(path)
    if not rows:
        raise ValueError(f"there are no rows to draw in {path}")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((row["ranks"], row["in_place"]) for row in rows))
    sides = list(dict.fromkeys(_side(row) for row in rows))
    drawing, axes = pyplot.subplots(
        1, len(panels), figsize=(1 + 5 * len(panels), 5.5), squeeze=False, sharey=True, layout="constrained"
    )
    for panel, (ranks, in_place) in zip(axes[0], panels, strict=True):
        for place, side in enumerate(sides):
            found = [row for row in rows if (row["ranks"], row["in_place"], _side(row)) == (ranks, in_place, side)]
            sizes, colour = [row["size"] for row in found], COLOURS[place % len(COLOURS)]
            panel.plot(sizes, [row["p50"] for row in found], marker="o", markersize=3, color=colour, label=side)
            lows, highs = ([row[end] for row in found] for end in ("min", "max"))
            panel.fill_between(sizes, lows, highs, color=colour, alpha=0.2, linewidth=0)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(f"{ranks} ranks, {'in place' if in_place else 'out of place'}", fontsize=10)
        panel.set_xlabel("bytes")
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel(f"{rows[0]['collective']}: time us (less is better)")
    axes[0][0].legend()
    drawing.suptitle("\n".join(textwrap.wrap(title, 60 * len(panels))), fontsize=9, x=0.01, horizontalalignment="left")
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


def _side(row: Row) -> str:
    return f"{row['who']}, registered" if row["registered"] else str(row["who"])
