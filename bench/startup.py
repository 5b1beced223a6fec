"""`gangline bench startup`: seconds until a command has printed its help."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial

from gangline.bench.report.machine import command_line
from gangline.bench.report.output import check_outputs, publish
from gangline.bench.report.rows import spread
from gangline.bench.workload.options import Json, Runs

_COMMANDS = {
    "gangline --help": [sys.executable, "-m", "gangline", "--help"],
    "gangline train --help": [sys.executable, "-m", "gangline", "train", "--help"],
    "python -c pass": [sys.executable, "-c", "pass"],
}


def startup(runs: Runs = 9, json: Json = None) -> None:
    """Measure the seconds until `gangline --help` and `gangline train --help` have finished."""
    from gangline.bench.driver.candidates import in_turn

    check_outputs(json)
    seconds = in_turn({name: partial(_seconds, command) for name, command in _COMMANDS.items()}, runs)
    publish(command_line(), [{"who": name, **spread(values)} for name, values in seconds.items()], json)


def _seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start
