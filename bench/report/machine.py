"""The machine and the command that a result belongs to."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.metadata import version

from gangline.bench.report.rows import Row


def machine() -> Row:
    """Return processor, memory, GPUs and versions of this machine."""
    import platform

    import torch

    from gangline.doctor.inventory import device_table

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
