"""Plot of the transfer bench: accuracy against time, and images per second, for each number of workers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from gangline.bench.report.plots import COLOURS, load_matplotlib, save
from gangline.bench.report.rows import Row


def draw_transfer(title: str, rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: left a curve for each number of workers, with a point per epoch; right a bar for each.

    A bar is the median of the epochs' speeds, the line over it reaches from their minimum to their maximum.

    Raises:
        ValueError: if ``path`` is not a .png, or there are no rows.
        RuntimeError: if matplotlib is missing.
    """
    matplotlib = load_matplotlib(path)
    if not rows:
        raise ValueError(f"there are no rows to draw in {path}")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, (accuracy, speed) = pyplot.subplots(1, 2, figsize=(11, 4.8), width_ratios=(3, 2), layout="constrained")
    numbers = list(dict.fromkeys(row["workers"] for row in rows))
    for position, number in enumerate(numbers):
        own = [row for row in rows if row["workers"] == number]
        colour = COLOURS[position % len(COLOURS)]
        name = "1 worker" if number == 1 else f"{number} workers"
        points = [row["seconds"] for row in own], [row["accuracy"] for row in own]
        accuracy.plot(*points, marker="o", markersize=4, color=colour, label=name)
        speeds = [row["samples_per_s"] for row in own]
        median = statistics.median(speeds)
        ends = [[median - min(speeds)], [max(speeds) - median]]
        bar = speed.bar(position, median, yerr=ends, color=colour, width=0.7, capsize=4, ecolor="#444444")
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
    save(drawing, title, path, 120)
