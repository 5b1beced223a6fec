"""Timelines of ranks of unequal speed: when each one computes and when it waits, drawn from a real run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gangline.bench.report.plots import COLOURS, load_matplotlib, save

Step = tuple[float, float, float]
"""Seconds at which a rank began a step, had its last gradient, and ended the step."""


def draw_timelines(
    title: str, panels: Mapping[str, Sequence[Sequence[Step]]], labels: Sequence[str], path: Path
) -> None:
    """Write a PNG with a panel for each run and a line for each rank, all of one scale.

    Args:
        title: title of the figure.
        panels: steps of each rank, by the name of the run; times count from the beginning of the first step.
        labels: names of the ranks.
        path: file to write.

    Raises:
        UsageError: if ``path`` is not a .png.
        RuntimeError: if matplotlib is missing.
    """
    load_matplotlib(path).use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(len(panels), 1, sharex=True, squeeze=False, figsize=(9, 4), layout="constrained")
    for panel, (name, ranks) in zip(axes[:, 0], panels.items(), strict=True):
        for line, steps in enumerate(ranks):
            computing = [(1e3 * begin, 1e3 * (computed - begin)) for begin, computed, _ in steps]
            waiting = [(1e3 * computed, 1e3 * (end - computed)) for _, computed, end in steps]
            panel.broken_barh(computing, (line - 0.36, 0.72), color=COLOURS[0], edgecolor="white", label="computes")
            panel.broken_barh(waiting, (line - 0.36, 0.72), color="#dddddd", label="waits for the other rank")
        panel.set_yticks(range(len(labels)), labels)
        panel.invert_yaxis()
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(name, fontsize=10, loc="left")
    axes[-1, 0].set_xlabel("milliseconds")
    handles, names = axes[0, 0].get_legend_handles_labels()
    axes[-1, 0].legend(handles[:2], names[:2], loc="center right", fontsize=9)
    save(drawing, title, path, 110)
