"""`--plot`: a bench's rows as bars, each with its spread."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from gangline.bench.figures import describing, figure
from gangline.bench.report import Row

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")  # told apart by colour-blind eyes too


def draw(title: str, rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: a bar a row as long as its median, a line over it from the least to the most of its runs.

    Raises:
        ValueError: ``path`` is no .png, or there are no rows.
        RuntimeError: matplotlib is not installed.
    """
    matplotlib = check(path)
    if not rows:
        raise ValueError(f"there are no rows to draw in {path}")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    whos = list(dict.fromkeys(row["who"] for row in rows))
    medians = [row["p50"] for row in rows]
    lows = [row["p50"] - row.get("min", row["p50"]) for row in rows]
    highs = [row["max"] - row["p50"] for row in rows]
    drawing, axes = pyplot.subplots(figsize=(9, 1.2 + 0.4 * len(rows)), layout="constrained")
    colours = [COLOURS[whos.index(row["who"]) % len(COLOURS)] for row in rows]
    places = range(len(rows))
    bars = axes.barh(places, medians, xerr=[lows, highs], color=colours, height=0.7, capsize=3, ecolor="#444444")
    axes.bar_label(bars, [f"{median:.4g}" for median in medians], padding=6)
    axes.set_yticks(places, _labels(rows))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    name, more_is_better = figure(rows[0])
    axes.set_xlabel(f"{name.replace('_', ' ')} ({'more' if more_is_better else 'less'} is better)")
    drawing.suptitle("\n".join(textwrap.wrap(title, 110)), fontsize=9, x=0.01, horizontalalignment="left")
    drawing.savefig(path, dpi=120)
    pyplot.close(drawing)


def check(path: Path) -> ModuleType:
    """Matplotlib, if a plot can be drawn with it.

    Raises:
        ValueError: ``path`` is no .png.
        RuntimeError: matplotlib is not installed.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot is {path}; expected a file that ends in .png")
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError('--plot needs matplotlib; install it with: pip install "gangline[bench]"') from None
    return matplotlib


def _labels(rows: Sequence[Row]) -> list[str]:
    """Who, and whatever else of a row's description is not the same in all."""
    fields = list(dict.fromkeys(name for row in rows for name in describing(row)))
    telling = [name for name in fields if name == "who" or len({str(row.get(name)) for row in rows}) > 1]
    return [", ".join(_word(name, row[name]) for name in telling if row.get(name) is not None) for row in rows]


def _word(name: str, value: object) -> str:
    return str(value) if isinstance(value, str) else f"{name.replace('_', ' ')} {value}"
