"""Seconds until `gangline --help` has answered: `python -m gangline.bench.startup`."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gangline.bench.report import in_turn, publish, spread

_COMMANDS = {
    "gangline --help": [sys.executable, "-m", "gangline", "--help"],
    "gangline train --help": [sys.executable, "-m", "gangline", "train", "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
}


def main(
    runs: Annotated[int, typer.Option(help="Runs of each command, in turn.")] = 9,
    json: Annotated[Path | None, typer.Option(help="Write the rows here.")] = None,
) -> None:
    """Measure, and print the table."""
    seconds = in_turn({name: partial(_seconds, command) for name, command in _COMMANDS.items()}, runs)
    publish("startup", [{"who": name, **spread(values)} for name, values in seconds.items()], json)


def _seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    typer.run(main)
