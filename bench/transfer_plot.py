"""`--plot` of `gangline.bench.transfer`: accuracy against time, and images per second, for each number of workers."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

from gangline.bench.plot import COLOURS, check
from gangline.bench.report import Row


def draw(title: str, rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: on the left a curve for each number of workers, a point an epoch; on the right a bar for each.

    A bar is the median of the epochs' speeds, the line over it reaches from the least to the most of them.

    Raises:
        ValueError: ``path`` is no .png, or there are no rows.
        RuntimeError: matplotlib is not installed.
    """
    matplotlib = check(path)
    if not rows:
        raise ValueError(f"there are no rows to draw in {path}")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, (accuracy, speed) = pyplot.subplots(1, 2, figsize=(11, 4.8), width_ratios=(3, 2), layout="constrained")
    numbers = list(dict.fromkeys(row["workers"] for row in rows))
    for place, number in enumerate(numbers):
        own = [row for row in rows if row["workers"] == number]
        colour = COLOURS[place % len(COLOURS)]
        name = "1 worker" if number == 1 else f"{number} workers"
        points = [row["seconds"] for row in own], [row["accuracy"] for row in own]
        accuracy.plot(*points, marker="o", markersize=4, color=colour, label=name)
        speeds = [row["samples_per_s"] for row in own]
        median = statistics.median(speeds)
        ends = [[median - min(speeds)], [max(speeds) - median]]
        bar = speed.bar(place, median, yerr=ends, color=colour, width=0.7, capsize=4, ecolor="#444444")
        speed.bar_label(bar, [f"{median:.0f}"], padding=4)
    accuracy.set_xlim(left=0)
    accuracy.set_xlabel("seconds of training and scoring")
    accuracy.set_ylabel("accuracy on the held-out images after each epoch")
    accuracy.grid(alpha=0.3)
    accuracy.legend(loc="lower right")
    speed.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    speed.set_xlabel("workers")
    speed.set_ylabel("images per second of training (more is better)")
    speed.margins(y=0.15)
    speed.spines[["top", "right"]].set_visible(False)
    lines = [line for part in title.splitlines() for line in textwrap.wrap(part, 120)]
    drawing.suptitle("\n".join(lines), fontsize=9, x=0.01, horizontalalignment="left")
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)
