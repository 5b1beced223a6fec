"""Plots of a bench: curves over sizes, with their spread, and the parts of a step."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gangline.bench.report.rows import RATES, Row
from gangline.bench.report.tables import format_seconds, format_size, formatter
from gangline.usage_error import UsageError

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # distinct for colour-blind readers
_PARTS = {"computes": _COLOURS[0], "computes padding": _COLOURS[1], "waits for other ranks": "#dddddd"}
_TICKS = 6  # labels of an axis of sizes
_QUANTITIES = {"time_us": "time", "busbw_gbs": "bus bandwidth in GB/s"}


def draw_curves(
    title: str,
    rows: Sequence[Row],
    path: Path,
    *,
    panels: Callable[[Row], str],
    curves: Callable[[Row], str],
    figures: Sequence[str],
) -> None:
    """Write a PNG of figures over sizes, both axes logarithmic.

    A curve shows the medians of a side, with a band from minimum to maximum and gaps at sizes that were not measured.

    Args:
        title: title of the figure.
        rows: results with a ``size``.
        path: file to write.
        panels: name of the panel that a row belongs to.
        curves: name of the curve that a row belongs to.
        figures: fields to draw, each in a row of panels: times or rates.
    """
    load_matplotlib(path).use("Agg")
    from matplotlib import pyplot

    if not rows:
        raise ValueError(f"there are no rows to draw in {path}")
    names = list(dict.fromkeys(panels(row) for row in rows))
    sides = list(dict.fromkeys(curves(row) for row in rows))
    drawing, axes = pyplot.subplots(
        len(figures),
        len(names),
        figsize=(1 + 5 * len(names), 0.7 + 4.3 * len(figures)),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    for line, field in zip(axes, figures, strict=True):
        for panel, name in zip(line, names, strict=True):
            of_panel = [row for row in rows if panels(row) == name]
            for number, side in enumerate(sides):
                of_side = {row["size"]: row for row in of_panel if curves(row) == side}
                _draw_curve(panel, field, of_side, of_panel, _COLOURS[number % len(_COLOURS)], side)
            _label_sizes(panel, sorted({row["size"] for row in of_panel}))
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(lambda value, _, field=field: formatter(field)(value))
            panel.yaxis.set_minor_formatter("")
            panel.set_title(name, fontsize=10)
            panel.grid(alpha=0.3)
        line[0].set_ylabel(f"{_QUANTITIES[field]} ({'more' if field in RATES else 'less'} is better)")
    axes[0][0].legend()
    drawing.suptitle(textwrap.fill(title, max(90, 60 * len(names))), fontsize=9, x=0.01, horizontalalignment="left")
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


def draw_step(title: str, steps: Mapping[str, Sequence[Row]], ranks: Sequence[str], path: Path) -> None:
    """Write a PNG of a step: for each way to train, a bar of each rank.

    Args:
        title: title of the figure.
        steps: by way, for each rank its ``own`` seconds without waiting, ``padded`` and ``real`` tokens, and the
            ``seconds`` of the whole step.
        ranks: names of the ranks.
        path: file to write.
    """
    load_matplotlib(path).use("Agg")
    from matplotlib import pyplot

    height = 0.9 + len(steps) * (0.5 + 0.42 * len(ranks))
    drawing, axes = pyplot.subplots(
        len(steps), 1, figsize=(9, height), squeeze=False, sharex=True, layout="constrained"
    )
    for panel, (name, of_ranks) in zip(axes.flat, steps.items(), strict=True):
        whole = max(step["seconds"] for step in of_ranks)
        parts = [(step["own"] * step["real"] / step["padded"], step["own"], whole) for step in of_ranks]
        begins = [0.0] * len(ranks)
        for ends, (label, colour) in zip(zip(*parts, strict=True), _PARTS.items(), strict=True):
            lengths = [1e3 * max(0.0, end - begin) for begin, end in zip(begins, ends, strict=True)]
            panel.barh(ranks, lengths, 0.72, [1e3 * begin for begin in begins], color=colour, label=label)
            begins = list(ends)
        panel.invert_yaxis()
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"{name}: {format_seconds(whole)}", fontsize=10, loc="left")
    panel.set_xlabel("milliseconds")
    panel.legend(fontsize=9, loc="lower right")
    drawing.suptitle(title, fontsize=9, x=0.01, horizontalalignment="left")
    drawing.savefig(path, dpi=100)
    pyplot.close(drawing)


def load_matplotlib(path: Path) -> ModuleType:
    """Return matplotlib; raise if it is not installed or the path does not end in .png."""
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot is {path}; expected a file that ends in .png")
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError('--plot needs matplotlib; install it with: pip install "gangline[bench]"') from None
    return matplotlib


def _draw_curve(
    panel: Any, field: str, of_side: dict[int, Row], of_panel: Sequence[Row], colour: str, label: str
) -> None:
    """Draw one curve; a size without a row becomes a gap."""
    sizes = sorted({row["size"] for row in of_panel})
    rows = [of_side.get(size) for size in sizes]
    medians = [math.nan if row is None else row[field] for row in rows]
    factors = [
        (math.nan, math.nan) if row is None else (row["min"] / row["p50"], row["max"] / row["p50"]) for row in rows
    ]
    ends = [
        (median / most, median / least) if field in RATES else (median * least, median * most)
        for median, (least, most) in zip(medians, factors, strict=True)
    ]
    panel.plot(sizes, medians, marker="o", markersize=3, color=colour, label=label)
    panel.fill_between(sizes, *zip(*ends, strict=True), color=colour, alpha=0.2, linewidth=0)


def _label_sizes(panel: Any, sizes: Sequence[int]) -> None:
    """Label an axis with some of the measured sizes."""
    panel.set_xscale("log", base=2)
    every = math.ceil(len(sizes) / _TICKS)
    panel.set_xticks(sizes[::every], [format_size(size) for size in sizes[::every]])
    panel.minorticks_off()
