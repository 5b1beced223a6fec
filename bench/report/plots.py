"""Plots of a bench: bars with their spread, and curves over sizes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from gangline.bench.report.fields import RATES, TIMES, describing, figure
from gangline.bench.report.rows import Row
from gangline.bench.report.tables import case_label, format_size, formatter
from gangline.collectives.errors import UsageError

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # distinct for colour-blind readers too
_TICKS = 6  # labels of an axis of sizes
_UNITS = {
    "gb_per_s_per_device": "GB/s per device",
    "gb_per_s": "GB/s",
    "busbw_gbs": "bus bandwidth in GB/s",
    "algbw_gbs": "algorithm bandwidth in GB/s",
    "samples_per_s": "samples per second",
}


def draw_bars(title: str, rows: Sequence[Row], path: Path, group_by: Sequence[str] = ()) -> None:
    """Write a PNG with a bar for each row, as long as its median, and a line from the minimum to the maximum.

    Args:
        title: title of the figure.
        rows: results.
        path: file to write.
        group_by: fields whose values head a group of bars.

    Raises:
        ValueError: if ``path`` is not a .png, or there are no rows.
        RuntimeError: if matplotlib is missing.
    """
    pyplot = _pyplot(path, rows)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(", ".join(case_label(name, row.get(name)) for name in group_by), []).append(row)
    drawing, axes = pyplot.subplots(
        len(groups),
        1,
        squeeze=False,
        sharex=True,
        figsize=(9, 1.2 + 0.4 * len(rows) + 0.35 * len(groups)),
        height_ratios=[len(of_group) for of_group in groups.values()],
        layout="constrained",
    )
    whos = list(dict.fromkeys(row["who"] for row in rows))
    name, more_is_better = figure(rows[0])
    shown = formatter(name)
    for panel, (group, of_group) in zip(axes[:, 0], groups.items(), strict=True):
        medians = [row["p50"] for row in of_group]
        lows = [row["p50"] - row.get("min", row["p50"]) for row in of_group]
        highs = [row["max"] - row["p50"] for row in of_group]
        colours = [COLOURS[whos.index(row["who"]) % len(COLOURS)] for row in of_group]
        bars = panel.barh(
            range(len(of_group)), medians, xerr=[lows, highs], color=colours, height=0.7, capsize=3, ecolor="#444444"
        )
        panel.bar_label(bars, [shown(median) for median in medians], padding=6)
        panel.set_yticks(range(len(of_group)), bar_labels(of_group, rows, group_by))
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(group, fontsize=10, loc="left")
    axes[-1, 0].xaxis.set_major_formatter(lambda value, _: shown(value) if value else "0")
    axes[-1, 0].set_xlabel(f"{_quantity(name)} ({'more' if more_is_better else 'less'} is better)")
    save(drawing, title, path, 110)


def bar_labels(of_group: Sequence[Row], rows: Sequence[Row], group_by: Sequence[str] = ()) -> list[str]:
    """Return a label for each bar: who, and what else differs between rows and does not head the group."""
    fields = list(dict.fromkeys(name for row in rows for name in describing(row)))
    telling = [
        name
        for name in fields
        if name == "who" or (name not in group_by and len({str(row.get(name)) for row in rows}) > 1)
    ]
    return [", ".join(case_label(name, row[name]) for name in telling if row.get(name) is not None) for row in of_group]


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

    A curve is the medians of a side, and the band around it reaches from the minimum to the maximum; it has a gap where
    a size was not measured.

    Args:
        title: title of the figure.
        rows: results with a ``size``.
        path: file to write.
        panels: name of the panel that a row belongs to.
        curves: name of the curve that a row belongs to.
        figures: fields to draw, each in a row of panels: times or rates.

    Raises:
        ValueError: if ``path`` is not a .png, or there are no rows.
        RuntimeError: if matplotlib is missing.
    """
    pyplot = _pyplot(path, rows)
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
                _draw_curve(panel, field, of_side, of_panel, COLOURS[number % len(COLOURS)], side)
            _label_sizes(panel, sorted({row["size"] for row in of_panel}))
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(_axis_formatter(field))
            panel.yaxis.set_minor_formatter("")
            panel.set_title(name, fontsize=10)
            panel.grid(alpha=0.3)
        line[0].set_ylabel(f"{_quantity(field)} ({'more' if field in RATES else 'less'} is better)")
    axes[0][0].legend()
    save(drawing, title, path, max(90, 60 * len(names)))


def load_matplotlib(path: Path) -> ModuleType:
    """Return matplotlib if it can draw a plot to ``path``.

    Raises:
        ValueError: if ``path`` is not a .png.
        RuntimeError: if matplotlib is missing.
    """
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot is {path}; expected a file that ends in .png")
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError('--plot needs matplotlib; install it with: pip install "gangline[bench]"') from None
    return matplotlib


def save(drawing: Any, title: str, path: Path, width: int) -> None:
    """Write a figure with a title, whose lines have at most ``width`` characters, and free it."""
    from matplotlib import pyplot

    lines = [line for part in title.splitlines() for line in textwrap.wrap(part, width)]
    drawing.suptitle("\n".join(lines), fontsize=9, x=0.01, horizontalalignment="left")
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


def _pyplot(path: Path, rows: Sequence[Row]) -> ModuleType:
    matplotlib = load_matplotlib(path)
    if not rows:
        raise ValueError(f"there are no rows to draw in {path}")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


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


def _axis_formatter(field: str) -> Callable[[float, object], str]:
    shown = formatter(field)
    return lambda value, _: shown(value)


def _quantity(name: str) -> str:
    return "time" if name in TIMES else _UNITS.get(name, name.replace("_", " "))
