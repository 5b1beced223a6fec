"""`gangline bench compare`: two results of a bench, ratio by ratio."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gangline.bench.figures import describing, figure
from gangline.bench.report import Row, print_table


def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="A result that --json wrote.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another, of the same bench.")],
) -> None:
    """Print how many times as fast B is as A, row by row; above 1, B is better."""
    first, second = _read(before), _read(after)
    rows, alone = ratios(first["rows"], second["rows"])
    if not rows:
        raise ValueError(f"{before} ({first['command']}) and {after} ({second['command']}) have no row in common")
    print_table(f"{before} -> {after}", rows)
    for path, lonely in ((before, alone[0]), (after, alone[1])):
        for row in lonely:
            print(f"only in {path}: {', '.join(f'{name} {value}' for name, value in describing(row).items())}")
    if first["machine"] != second["machine"]:
        differing = [name for name in first["machine"] if first["machine"][name] != second["machine"].get(name)]
        print(f"measured on unlike machines: {', '.join(differing)} differ")


def ratios(before: Sequence[Row], after: Sequence[Row]) -> tuple[list[Row], tuple[list[Row], list[Row]]]:
    """Rows of the two sides' medians and their ratio, and the rows that only one of the sides has.

    Rows match when what describes them is equal. The ratio is above 1 where ``after`` is better: more of a rate,
    less of a time.
    """
    missing = {_key(row): row for row in before}
    found, lonely = [], []
    for row in after:
        other = missing.pop(_key(row), None)
        if other is None:
            lonely.append(row)
            continue
        name, more_is_better = figure(row)
        ours, theirs = float(row["p50"]), float(other["p50"])
        found.append(
            {
                **describing(row),
                "figure": name,
                "A": theirs,
                "B": ours,
                "times_as_fast": ours / theirs if more_is_better else theirs / ours,
            }
        )
    return found, (list(missing.values()), lonely)


def _key(row: Row) -> str:
    return json.dumps(describing(row), sort_keys=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); expected a file that --json of a bench wrote") from None
    if not isinstance(result, dict) or not {"command", "machine", "rows"} <= set(result):
        raise ValueError(f"{path} has no command, machine and rows; expected a file that --json of a bench wrote")
    return result
