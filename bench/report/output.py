"""Output of a bench: the table on stdout, and files of JSON and PNG."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from gangline.bench.report.machine import machine
from gangline.bench.report.rows import Row
from gangline.bench.report.tables import print_table


def publish(command: str, rows: Sequence[Row], json_path: Path | None) -> None:
    """Print the rows as a table, and write them where a path is given, with the command that repeats them."""
    print_table(command, rows)
    if json_path is not None:
        write_json(command, rows, json_path)


def write_json(command: str, rows: Sequence[Row], path: Path) -> None:
    """Write the rows with the command and the machine."""
    path.write_text(json.dumps({"command": command, "machine": machine(), "rows": list(rows)}, indent=1) + "\n")


def check_outputs(json_path: Path | None, plot: Path | None = None) -> None:
    """Check before a long measurement that its results can be written.

    Raises:
        FileNotFoundError: if a path's folder does not exist.
        ValueError: if the plot is not a .png.
        RuntimeError: if matplotlib is missing.
    """
    for path in (json_path, plot):
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"{path.parent} is not a folder, so {path} cannot be written; create it first")
    if plot is not None:
        from gangline.bench.report.plots import load_matplotlib

        load_matplotlib(plot)
