"""What every bench prints and writes: a table, and JSON with the machine beside the rows."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def in_turn(sides: Mapping[str, Callable[[], float]], runs: int) -> dict[str, list[float]]:
    """What each side measures, the sides one after another, ``runs`` times over: A B A B."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(runs):
        for name, measure in sides.items():
            found[name].append(measure())
    return found


def spread(values: Sequence[float]) -> Row:
    """Median, minimum, 99th percentile and maximum of a measurement, and how often it ran."""
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "min": ordered[0],
        "p99": ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))],
        "max": ordered[-1],
        "runs": len(ordered),
    }


def publish(command: str, rows: Sequence[Row], path: Path | None, plot: Path | None = None) -> None:
    """Print the rows as a table; write them, with the machine, as JSON, and draw them, where a path is given."""
    print_table(command, rows)
    if path is not None:
        path.write_text(json.dumps({"command": command, "machine": machine(), "rows": list(rows)}, indent=1) + "\n")
    if plot is not None:
        from gangline.bench.plot import draw

        draw(command, rows, plot)


def print_table(title: str, rows: Sequence[Row]) -> None:
    """Print rows under the union of their fields."""
    from rich.console import Console
    from rich.table import Column, Table

    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*(Column(name, overflow="fold") for name in columns), title=title)
    for row in rows:
        table.add_row(*(_shown(row.get(name)) for name in columns))
    Console(width=max(100, 15 * len(columns))).print(table)


def check_outputs(json_path: Path | None, plot: Path | None) -> None:
    """Find out before a long measurement whether its results can be written.

    Raises:
        FileNotFoundError: a path's folder is not there.
        ValueError: the plot is no .png.
        RuntimeError: there is no matplotlib to draw it.
    """
    for path in (json_path, plot):
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"{path.parent} is no folder, so {path} cannot be written; make it first")
    if plot is not None:
        from gangline.bench.plot import check

        check(plot)


def machine() -> Row:
    """What the figures were measured on."""
    import platform

    import torch

    from gangline.collectives.devices.inventory import device_table

    host, *gpus = device_table()
    return {
        "cpu": host.name,
        "cores": os.cpu_count(),
        "memory_gb": round(host.memory_total / 1e9, 1),
        "gpu": ", ".join(gpu.name for gpu in gpus) or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gangline": version("gangline"),
    }


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
