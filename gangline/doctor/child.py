"""Process of one check: `python -m gangline.doctor.child MODULE FUNCTION ARGUMENTS PARENT`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from importlib import import_module

from gangline.collectives.processes.parent_death import die_with_parent


def main(module: str, function: str, arguments: str, parent: str) -> None:
    """Call the function of a module of this folder and print what it returns as JSON."""
    die_with_parent(int(parent))
    output = os.dup(1)
    os.dup2(2, 1)  # libraries print to stdout, such as NCCL with NCCL_DEBUG
    value = getattr(import_module(f"{__package__}.{module}"), function)(**json.loads(arguments))
    with os.fdopen(output, "w") as file:
        json.dump(value, file, default=asdict)


if __name__ == "__main__":
    main(*sys.argv[1:])
