"""The page of `gangline advise --page`: where the time of a step goes, and how step times grow with the batch size."""

from __future__ import annotations

from html import escape

from gangline.advise.advice import Advice
from gangline.advise.scaling import Scaling
from gangline.advise.steps import COLUMNS
from gangline.models.reports.chart import Line, color, line_chart, page, table

_POINTS = 60


def advice_page(advice: Advice) -> str:
    """Return the HTML page of a verdict: a bar for the step of each process, and the remedies."""
    totals = [sum(row[name] for name in COLUMNS) for row in advice.table]
    longest = max(totals) or 1.0
    bars = []
    for row, total in zip(advice.table, totals, strict=True):
        parts = "".join(
            f'<div style="width:{row[name] / longest:.3%};background:{color(number)}" '
            f'title="{name}: {row[name]:.2f} ms"></div>'
            for number, name in enumerate(COLUMNS)
        )
        bars.append(
            f'<div class="row"><span>{escape(row["process"])}</span><div class="bar">{parts}</div>'
            f"<span>{total:.1f} ms</span></div>"
        )
    keys = "".join(
        f'<span class="key" style="background:{color(number)}"></span>{name}' for number, name in enumerate(COLUMNS)
    )
    rate = f", {advice.samples_per_second:.0f} samples/s" if advice.samples else ""
    step = (
        f"<h2>A step: {advice.step_seconds * 1e3:.1f} ms{rate} (medians)</h2>{''.join(bars)}"
        f'<p class="soft">{keys}<br>late: waits for the gradients of slower processes; '
        "transfer: the exchange once all had arrived</p>"
    )
    remedies = ""
    for finding in advice.findings:
        items = (
            f"<li>{escape(one.text)} (up to {one.gain:.0%} of the step): <code>{escape(one.command)}</code></li>"
            for one in finding.remedies
        )
        remedies += f"<h2>{escape(finding.text)}</h2><ul>{''.join(items)}</ul>"
    return page("gangline advise", advice.verdict, [step, remedies])


def scaling_page(scaling: Scaling) -> str:
    """Return the HTML page of step times: samples per second over the batch size, a line for each number of devices."""
    sizes = [size for one in scaling.times for size, _ in one.points]
    low, high = min(sizes), max(sizes)
    steps = [low * (high / low) ** (number / _POINTS) for number in range(_POINTS + 1)]
    lines = [
        Line(
            str(one.count),
            [(size, size / one.seconds(size)) for size in steps],
            [(size, size / seconds) for size, seconds in one.points],
            [(c.batch_size, c.batch_size / c.measured) for c in scaling.checks if c.count == one.count],
        )
        for one in scaling.times
    ]
    rows = [
        [one.count, one.batch_size, *(f"{s * 1e3:.2f} ms" for s in (one.predicted, one.measured)), f"{one.error:+.0%}"]
        for one in scaling.checks
    ]
    picture = (
        f"<h2>Speed by the number of {scaling.units}</h2>{line_chart(lines, 'batch size', 'samples/s', from_zero=True)}"
        '<p class="soft">Discs: measured, and lines that predict the rest; rings: measured as well.</p>'
    )
    heads = (scaling.unit, "batch size", "predicted", "measured", "error")
    return page("gangline advise", scaling.verdict, [picture, table(heads, rows) if rows else ""])
