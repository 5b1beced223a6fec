"""`gangline advise`: say what bounds a training job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.training.options import TrainOptions
from gangline.collectives.errors import UsageError
from gangline.collectives.timeline.advice import Advice
from gangline.collectives.timeline.advice import advise as advise_on
from gangline.collectives.timeline.recorder import VARIABLE
from gangline.collectives.timeline.steps import Event, read_events, steps_of


def advise(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="[TIMELINE...] | -- CMD", help="Files that --timeline has written, or a command to run."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeline: Annotated[Path | None, typer.Option(help="Where to keep the timeline of CMD.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run CMD again with the first remedy that can be applied to it.")
    ] = False,
) -> None:
    """Run a training command, or read its timeline, and say what bounds it: which process, which phase, what to do.

    The exit code is that of the command.
    """
    paths = [Path(argument) for argument in arguments]
    is_timeline = all(path.suffix == ".json" for path in paths)
    if is_timeline and verify:
        raise UsageError("--verify runs a command again with a remedy; expected -- CMD, not a timeline")
    code, events = (
        (0, [event for path in paths for event in read_events(path)]) if is_timeline else _run(arguments, timeline)
    )
    try:
        found = advise_on(steps_of(events))
    except ValueError as error:
        print(f"gangline: {error}", file=sys.stderr)
        raise typer.Exit(code or 1) from error
    print(json.dumps(found.as_json()) if as_json else found)
    if verify:
        print(_verified(found, arguments))
    raise typer.Exit(code)


def _run(
    arguments: Sequence[str], timeline: Path | None, variables: Mapping[str, str] | None = None
) -> tuple[int, list[Event]]:
    """Run a command; return its exit code and its timeline."""
    with tempfile.TemporaryDirectory(prefix="gangline-advise-") as folder:
        path = (timeline or Path(folder) / "timeline.json").absolute()
        path.unlink(missing_ok=True)
        environment = {**os.environ, VARIABLE: str(path), **(variables or {})}
        code = subprocess.run(arguments, env=environment, check=False).returncode  # noqa: S603  the user's own
        if not path.exists():
            raise UsageError(
                f"{arguments[0]} wrote no timeline (exit code {code}): it must train by gangline, or by "
                "torch.distributed with the backend gangline"
            )
        return code, read_events(path)


def _verified(before: Advice, arguments: Sequence[str]) -> str:
    """Run the command again with the first remedy that can be applied to it; return what was predicted and measured."""
    remedy = before.remedy()
    is_train = "train" in arguments and any("gangline" in argument for argument in arguments)
    if remedy is None or not (is_train or remedy.variables):
        return "Verify: no remedy can be applied to this command"
    words = [*arguments, *remedy.options]
    if remedy.batches > 1:
        given = arguments[arguments.index("--batch-size") + 1] if "--batch-size" in arguments else None
        size = remedy.batches * (TrainOptions.batch_size if given is None else int(given))
        words += ["--batch-size", str(size)]  # the last one counts
    _, events = _run(words, None, dict(remedy.variables))
    after = advise_on(steps_of(events)).samples_per_second
    predicted = before.samples_per_second / (1 - min(remedy.gain, 0.99))
    applied = " ".join([*(f"{name}={value}" for name, value in remedy.variables), *words[len(arguments) :]])
    return (
        f"Verify: {applied}: {before.samples_per_second:.0f} samples/s before, at most {predicted:.0f} predicted, "
        f"{after:.0f} measured"
    )
