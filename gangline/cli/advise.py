"""`gangline advise`: say what bounds a training job."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gangline.advise.advice import Advice
from gangline.advise.advice import advise as advise_on
from gangline.advise.job_scaling import run_with_timeline, scaling_of_job
from gangline.advise.steps import read_events, steps_of
from gangline.cli.training.options import TrainOptions
from gangline.usage_error import UsageError


def advise(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="[TIMELINE...] | -- CMD", help="Timelines that were written, or a command to run."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeline: Annotated[Path | None, typer.Option(help="Where to keep the timeline of CMD.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run CMD again with the first remedy that can be applied to it.")
    ] = False,
    scale: Annotated[
        bool,
        typer.Option(
            "--scale",
            help="Run CMD with 1 up to its number of processes, or contexts of one gangline train, at several batch "
            "sizes, and say how many pay.",
        ),
    ] = False,
    seconds: Annotated[float, typer.Option(metavar="S", min=1, help="Time for which each run of --scale trains.")] = 4,
) -> None:
    """Run a training command, or read its timeline, and say what bounds it: which process, which phase, what to do.

    The exit code is that of the command.
    """
    paths = [Path(argument) for argument in arguments]
    is_timeline = all(path.suffix == ".json" for path in paths)
    if verify and (is_timeline or scale):
        raise UsageError("--verify runs a command again with a remedy; expected -- CMD, without --scale")
    if scale:
        if is_timeline:
            raise UsageError("--scale runs a command; expected -- CMD, not a timeline")
        scaling = scaling_of_job(arguments, seconds)
        print(json.dumps(scaling.as_json()) if as_json else scaling)
        return
    code, events = (
        (0, [event for path in paths for event in read_events(path)])
        if is_timeline
        else run_with_timeline(arguments, timeline)
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
    _, events = run_with_timeline(words, None, dict(remedy.variables))
    after = advise_on(steps_of(events)).samples_per_second
    predicted = before.samples_per_second / (1 - min(remedy.gain, 0.99))
    applied = " ".join([*(f"{name}={value}" for name, value in remedy.variables), *words[len(arguments) :]])
    return (
        f"Verify: {applied}: {before.samples_per_second:.0f} samples/s before, at most {predicted:.0f} predicted, "
        f"{after:.0f} measured"
    )
