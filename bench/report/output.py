"""Output of a bench: a table on stdout, and JSON and PNG files with the machine and the command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import gangline
from gangline.bench.report.plots import load_matplotlib
from gangline.bench.report.rows import Row
from gangline.bench.report.tables import print_table
from gangline.collectives.host_files import write_text
from gangline.doctor.inventory import device_table


def publish(rows: Sequence[Row], json_path: Path | None) -> None:
    """Print the rows as a table with the machine, and write them with the command to a path, if given."""
    print_table(command_line(), rows)
    here = machine()
    print(f"# on {', '.join(filter(None, [here['cpu'], here['gpu']]))}, torch {here['torch']}")
    if json_path is not None:
        write_json(rows, json_path)


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Write the rows with the command and the machine."""
    result = {"command": command_line(), "machine": machine(), "rows": list(rows)}
    write_text(path, json.dumps(result, indent=1) + "\n")


def machine() -> Row:
    """Return processor, memory, GPUs and versions of this machine."""
    host, *gpus = device_table()
    return {
        "cpu": host.name,
        "cores": os.cpu_count(),
        "memory_gb": round(host.memory_total / 1e9, 1),
        "gpu": ", ".join(gpu.name for gpu in gpus) or None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gangline": gangline.__version__,
    }


def command_line() -> str:
    """Return the command that repeats this result: as typed, without its output files."""
    words = ["gangline"]
    rest = iter(sys.argv[1:])
    for word in rest:
        if word in ("--json", "--plot"):
            next(rest, None)
        elif not word.startswith(("--json=", "--plot=")):
            words.append(word)
    return shlex.join(words)


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
        load_matplotlib(plot)
