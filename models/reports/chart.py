"""A static page with line charts, without scripts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_COLORS = 7
_TEMPLATE = Path(__file__).with_name("chart.html")
_WIDTH, _HEIGHT, _MARGIN, _TICKS = 840, 300, 56, 5

Place = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    name: str
    points: Sequence[Place]
    width: float = 2
    """Pixels of the stroke."""
    has_discs: bool = False
    """True if each point has a disc."""


def line_chart(lines: Sequence[Line], across: str, up: str) -> str:
    """Return a chart as SVG, under a legend if it has several lines; ``across`` and ``up`` say what the axes show."""
    points = [point for line in lines for point in line.points]
    if not points:
        return '<p class="soft">no values yet</p>'
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> tuple[str, str]:
        along = (x - left) / (right - left or 1) * (_WIDTH - 2 * _MARGIN) + _MARGIN
        return f"{along:.1f}", f"{_HEIGHT - _MARGIN - (y - low) / (high - low or 1) * (_HEIGHT - 2 * _MARGIN):.1f}"

    shapes = []
    for number, line in enumerate(lines):
        path, name = " ".join(",".join(place(*point)) for point in line.points), escape(line.name)
        style = f'fill="none" stroke="{_color(number)}" stroke-width="{line.width}"'
        shapes.append(f'<polyline points="{path}" {style}><title>{name}</title></polyline>')
        for x, y in (place(*point) for point in line.points if line.has_discs):
            shapes.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{_color(number)}"/>')
    for tick in _ticks(left, right):
        x, _ = place(tick, low)
        shapes.append(f'<text x="{x}" y="{_HEIGHT - _MARGIN + 18}" text-anchor="middle">{tick:,.6g}</text>')
    for tick in _ticks(low, high):
        _, y = place(left, tick)
        shapes.append(f'<text x="{_MARGIN - 4}" y="{y}" text-anchor="end">{tick:,.6g}</text>')
    keys = [
        f'<span class="key" style="background:{_color(n)}"></span>{escape(line.name)}' for n, line in enumerate(lines)
    ]
    axis = f"M{_MARGIN},{_MARGIN / 2} V{_HEIGHT - _MARGIN} H{_WIDTH - _MARGIN}"
    return (
        f'<p class="soft">{"".join(keys) if len(lines) > 1 else ""}</p>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%"><path d="{axis}" fill="none" stroke="var(--line)"/>'
        f'<text x="{_MARGIN}" y="14">{escape(up)}</text>'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(across)}</text>{"".join(shapes)}</svg>'
    )


def _color(number: int) -> str:
    return f"var(--c{number % _COLORS})"


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers of an axis: multiples of 1, 2 or 5 times a power of ten."""
    least = (high - low) / _TICKS
    if not 0 < least < math.inf:  # 0 also if the difference underflows
        return [low]
    power = 10.0 ** math.floor(math.log10(least))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= least), 10 * power)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table, without a first row if there are no heads."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def page(title: str, heading: str, sections: Sequence[str], *, reload_seconds: int | None = None) -> str:
    """Return a page of sections of HTML, whose texts the caller has escaped."""
    parts = {
        "@title@": escape(title),
        "@reload@": f'<meta http-equiv="refresh" content="{reload_seconds}">' if reload_seconds is not None else "",
        "@heading@": escape(heading),
        "@body@": "".join(f"<section>{section}</section>\n" for section in sections if section),
    }
    return re.sub("|".join(parts), lambda found: parts[found[0]], _TEMPLATE.read_text(encoding="utf-8"))
