"""`gangline advise`: say what bounds a training job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gangline.collectives.errors import UsageError
from gangline.collectives.timeline.advice import advise as advise_on
from gangline.collectives.timeline.recorder import VARIABLE
from gangline.collectives.timeline.steps import read_events, steps_of


def advise(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[TIMELINE...] | -- CMD", help="Files that --timeline has written, or a command to run."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeline: Annotated[Path | None, typer.Option(help="Where to keep the timeline of CMD.")] = None,
) -> None:
    """Run a training command, or read its timeline, and say what bounds it: which process, which phase, what to do.

    The exit code is that of the command.
    """
    paths = [Path(argument) for argument in arguments]
    if all(path.suffix == ".json" for path in paths):
        code, events = 0, [event for path in paths for event in read_events(path)]
    else:
        with tempfile.TemporaryDirectory(prefix="gangline-advise-") as folder:
            path = (timeline or Path(folder) / "timeline.json").absolute()
            path.unlink(missing_ok=True)
            code = subprocess.run(arguments, env={**os.environ, VARIABLE: str(path)}, check=False).returncode  # noqa: S603  the user's own
            if not path.exists():
                raise UsageError(
                    f"{arguments[0]} wrote no timeline (exit code {code}): it must train by gangline, or by "
                    "torch.distributed with the backend gangline"
                )
            events = read_events(path)
    try:
        found = advise_on(steps_of(events))
    except ValueError as error:
        print(f"gangline: {error}", file=sys.stderr)
        raise typer.Exit(code or 1) from error
    print(json.dumps(found.as_json()) if as_json else found)
    raise typer.Exit(code)
