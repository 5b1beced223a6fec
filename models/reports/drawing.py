"""The page of a run: charts and tables of a record's data, which the page holds as JSON too."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from gangline.models.reports.chart import Line, Point, line_chart, page, table

DATA = '<script type="application/json" id="data">'
"""Begin of the data in a page; they end at the next tag."""


def drawn(data: dict[str, Any]) -> str:
    """Return the HTML page with these data of a `TrainingProgress`."""
    state = data["state"] + (f": {data['reason']}" if data["reason"] else "")
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(data["written"]))
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", "\\u003c")  # so that the data cannot close the script tag
    sections = [
        table((), [("state", state), ("updated", written), *_summary(data)]),
        *(f"<h2>{title}</h2>{line_chart(lines, 'batch', unit)}" for title, unit, lines in _charts(data)),
        f"<h2>settings</h2>{table((), list(data['settings'].items()))}{DATA}{text}</script>",
    ]
    reload_seconds = max(1, round(data["every_seconds"])) if data["state"] == "running" else None
    return page(f"{data['title']} - training progress", data["title"], sections, reload_seconds=reload_seconds)


def _summary(data: dict[str, Any]) -> list[tuple[str, str]]:
    points, now = data["points"], data["now"]
    batches = f" of {now['batches']}" if now["batches"] else ""
    rows = [
        ("elapsed", str(timedelta(seconds=round(data["elapsed"])))),
        ("epoch", f"{now['epoch']}, batch {now['batch']}{batches}"),
        ("training loss", _text("loss", points["loss"][-1] if points["loss"] else None)),
    ]
    rows += [(f"training {name}", _text(name, values[-1])) for name, values in points["metrics"].items()]
    for name, best in data["best"].items():
        newest = data["validations"][-1]["values"].get(name)
        best_text = f"best {_text(name, best['value'])} in epoch {best['epoch']}"
        rows.append((f"validation {name}", f"{_text(name, newest)}, {best_text}"))
    if seconds := sum(points["seconds"]):
        rows.append(("samples per second", f"{sum(points['total']) / seconds:.4g}"))
        rows.append(("waiting for the store", f"{sum(points['waiting']) / seconds:.1%}"))
    return rows


def _charts(data: dict[str, Any]) -> list[tuple[str, str, list[Line]]]:
    """Return the charts: title, unit and lines of each."""
    points, validations = data["points"], data["validations"]
    steps, seconds = points["step"], points["seconds"]

    def curves(name: str, values: Sequence[Any]) -> list[Line]:
        lines = []
        known = _numbers(steps, values)
        if known:
            lines.append(Line("batches" if data["per_point"] > 1 else "each batch", known, width=0.5))
            lines.append(Line("smoothed", _smoothed(known)))
        at = [validation["step"] for validation in validations]
        validated = _numbers(at, [validation["values"].get(name) for validation in validations])
        return [*lines, Line("validation", validated, validated)] if validated else lines

    loss = curves("loss", points["loss"])
    if data["per_point"] > 1:
        loss += [Line(name, _numbers(steps, points[f"loss_{name[:3]}"]), width=0.5) for name in ("minimum", "maximum")]
    names = dict.fromkeys([*points["metrics"], *(name for validation in validations for name in validation["values"])])
    charts = [(name, name, curves(name, points["metrics"].get(name, ()))) for name in names if name != "loss"]
    throughput = [Line("all", _rates(steps, points["total"], seconds))]
    if len(points["samples"]) > 1 or "workers" in data["settings"]:
        throughput += [Line(name, _rates(steps, counts, seconds)) for name, counts in points["samples"].items()]
    charts += [
        ("loss", "loss", loss),
        ("throughput", "samples/s", throughput),
        (
            "time waiting for the store",
            "part of the time",
            [Line("waiting", _rates(steps, points["waiting"], seconds))],
        ),
        ("learning rate", "learning rate", [Line("learning rate", _numbers(steps, points["learning_rate"]))]),
    ]
    splits, last = data["splits"], steps[-1] if steps else 0
    for kind, labels in (("workers", ()), ("contexts", list(points["samples"]))):
        shares = [(split["step"], split[kind]) for split in splits]
        if len({tuple(share) for _, share in shares}) > 1:  # the split has moved
            count = min(len(share) for _, share in shares)
            lines = [
                Line(
                    labels[part] if part < len(labels) else f"{kind.removesuffix('s')} {part}",
                    _stepped([(step, share[part]) for step, share in shares], last),
                )
                for part in range(count)
            ]
            charts.append((f"split over the {kind}", "part of a batch", lines))
    return charts


def _numbers(steps: Sequence[int], values: Sequence[Any]) -> list[Point]:
    """Return the points of the values that are finite numbers."""
    return [(step, value) for step, value in zip(steps, values, strict=False) if isinstance(value, (int, float))]


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the exponential mean, corrected for its start."""
    keep = 1 - 1 / (1 + min(20, max(4, len(points) / 150)))
    total = weight = 0.0
    means = []
    for step, value in points:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        means.append((step, total / weight))
    return means


def _rates(steps: Sequence[int], amounts: Sequence[float], seconds: Sequence[float]) -> list[Point]:
    """Return amounts by seconds over a moving window."""
    width = max(1, round(len(steps) / 30))
    amount = time_spent = 0.0
    rates: list[Point] = []
    for place, step in enumerate(steps):
        amount, time_spent = amount + amounts[place], time_spent + seconds[place]
        if place >= width:
            amount, time_spent = amount - amounts[place - width], time_spent - seconds[place - width]
        if time_spent > 1e-9:
            rates.append((step, max(0.0, amount / time_spent)))
    return rates


def _stepped(points: Sequence[Point], last: float) -> list[Point]:
    """Return a line that keeps each value until the next one, and the last one until the end."""
    corners = [(later, value) for (_, value), (later, _) in zip(points, [*points[1:], (last, 0.0)], strict=True)]
    return [point for pair in zip(points, corners, strict=True) for point in pair]


def _text(name: str, value: float | str | None) -> str:
    if not isinstance(value, (int, float)):
        return str(value or "-")  # such as "nan"
    return f"{value:.1%}" if name.startswith(("accuracy", "top_k_accuracy")) else f"{value:.4g}"
