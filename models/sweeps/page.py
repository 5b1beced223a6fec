"""The page of a sweep: the curves of all trials, and their table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gangline.models.reports.chart import Line, line_chart, page, table
from gangline.models.sweeps.trial import State, TrialResult

_RELOAD_SECONDS = 2


def write_page(path: Path, trials: Sequence[TrialResult], *, is_over: bool) -> None:
    """Write the page, in place of an earlier one; it reloads itself until the sweep is over."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.parameters))
    lines = [Line(str(trial.number), trial.curve) for trial in trials if trial.curve]
    rows = [
        [
            trial.number,
            *(trial.parameters.get(name, "") for name in names),
            trial.state or ("runs" if trial.contexts else "waits"),
            "" if trial.value is None else f"{trial.value:.6g}",
            f"{trial.seconds:.1f}" if trial.state else "",
            trial.contexts,
            trial.error.strip().splitlines()[-1] if trial.error.strip() else "",
        ]
        for trial in trials
    ]
    counts = Counter(trial.state for trial in trials)
    ended = ", ".join(f"{counts[state]} {state}" for state in State if counts[state])
    text = page(
        "gangline sweep",
        f"{sum(counts[state] for state in State)} of {len(trials)} trials have ended{f': {ended}' if ended else ''}",
        [
            line_chart(lines, "step", "metric"),
            table(["trial", *names, "state", "metric", "seconds", "contexts", "error"], rows),
        ],
        reload_seconds=None if is_over else _RELOAD_SECONDS,
    )
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(text)
    aside.replace(path)
