"""`gangline bench compare`: two results of a bench, ratio by ratio."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gangline.bench.report.rows import Row, describing, figure, is_noisy
from gangline.bench.report.tables import print_table


def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="A result written by --json.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Another result of the same bench.")],
) -> None:
    """Print how many times as fast B is as A, row by row; above 1, B is better."""
    first, second = _read(before), _read(after)
    rows, alone = ratios(first["rows"], second["rows"])
    if not rows:
        raise ValueError(f"{before} ({first['command']}) and {after} ({second['command']}) have no row in common")
    print_table(f"times as fast: {after} over {before}", rows)
    for path, unmatched in ((before, alone[0]), (after, alone[1])):
        for row in unmatched:
            print(f"only in {path}: {_sentence(describing(row))}")
    if first["machine"] != second["machine"]:
        differing = [name for name in first["machine"] if first["machine"][name] != second["machine"].get(name)]
        print(f"measured on different machines: {', '.join(differing)} differ")


def ratios(before: Sequence[Row], after: Sequence[Row]) -> tuple[list[Row], tuple[list[Row], list[Row]]]:
    """Match rows by `describing` and return their ratios, and the rows that only one result has.

    The ratio ``times_as_fast`` is above 1 where ``after`` is better: a higher rate or a shorter time.
    """
    missing = {_key(row): row for row in before}
    found, unmatched = [], []
    for row in after:
        other = missing.pop(_key(row), None)
        if other is None:
            unmatched.append(row)
            continue
        name, more_is_better = figure(row)
        new, old = float(row["p50"]), float(other["p50"])
        found.append(
            {
                **describing(row),
                "figure": name,
                "A": old,
                "B": new,
                "times_as_fast": new / old if more_is_better else old / new,
                "noisy": is_noisy(row) or is_noisy(other),
            }
        )
    return found, (list(missing.values()), unmatched)


def _sentence(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items() if value is not None)


def _key(row: Row) -> str:
    return json.dumps(describing(row), sort_keys=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); expected a file that --json of a bench wrote") from None
    if not isinstance(result, dict) or not {"command", "machine", "rows"} <= set(result):
        raise ValueError(f"{path} has no command, machine and rows; expected a file that --json of a bench wrote")
    return result
