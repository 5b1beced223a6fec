"""`gangline sweep`: train a network for each combination of options, on all devices at once."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.cli.logs import logging_to_stderr
from gangline.cli.options import DeviceOptions
from gangline.cli.training.options import TrainOptions, parsed
from gangline.collectives.errors import UsageError

if TYPE_CHECKING:
    from gangline.collectives.context import Context
    from gangline.models.loop.callbacks import BatchEndParam
    from gangline.sweeps.trial import Trial

_DEVICES = ("--cpus", "--gpus", "--context", "--work-load-list")
_NOT_IN_TRIALS = ("--test-io",)


def sweep(
    train_options: Annotated[
        list[str] | None, typer.Argument(metavar="-- OPTIONS", help="Options of gangline train for all trials.")
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="OPTION=VALUES",
            help="Values of an option of gangline train, such as lr=0.1,0.01; with ; between values that have commas.",
        ),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Folder of the results: sweep.csv and sweep.html.")] = Path("sweep"),
    gpus: Annotated[str | None, typer.Option(help="GPUs by index, such as 0,2; one named twice runs two.")] = None,
    cpus: Annotated[int | None, typer.Option(help="Number of CPU contexts.", min=1)] = None,
    contexts_per_trial: Annotated[int, typer.Option(help="Number of contexts of each trial.", min=1)] = 1,
    early_stopping: Annotated[
        bool,
        typer.Option(
            "--early-stopping",
            help="End trials whose best accuracy is below the median of three or more others at the same epoch.",
        ),
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run trials again that failed in an earlier run.")
    ] = False,
) -> None:
    """Train a network for each combination of options, one on each device; the best validation accuracy counts.

    Run it again with the same folder to go on where it was stopped.
    """
    from gangline.sweeps.sweep import sweep as run_sweep

    options = train_options or []
    for word in (*options, *(f"--{value.partition('=')[0]}" for value in values or [])):
        name = word.partition("=")[0]
        if name in _DEVICES:
            raise UsageError(f"{name} is given to trials by the sweep; write it before --")
        if name in _NOT_IN_TRIALS:
            raise UsageError(f"{name} is for one gangline train; a sweep has no such option")
    grid: dict[str, list[str]] = {}
    for name, words in map(_values_of, values or []):
        if name in grid or any(word.partition("=")[0] == f"--{name}" for word in options):
            raise UsageError(f"--{name} is given twice; expected all its values in one --set {name}=...")
        grid[name] = words
    if not grid:
        raise UsageError("there is no --set; expected one or more, such as --set lr=0.1,0.01")
    function = TrainTrial(tuple(options))
    for name, words in grid.items():
        for value in words:
            function.options_of({name: value})
    try:
        with logging_to_stderr():
            found = run_sweep(
                function,
                grid,
                DeviceOptions(gpus=gpus, cpus=cpus).devices(),
                folder=folder,
                contexts_per_trial=contexts_per_trial,
                early_stopping=early_stopping,
                retry_failed=retry_failed,
            )
    except KeyboardInterrupt:
        print(f"stopped; {folder} holds the trials that have ended, and the same command goes on", file=sys.stderr)
        raise typer.Exit(128 + signal.SIGINT) from None
    print(found)
    print(f"table: {folder / 'sweep.csv'}, curves: {folder / 'sweep.html'}")
    try:
        best = found.best
    except ValueError as error:
        raise UsageError(f"{error}: all trials failed; see {folder / 'trials.jsonl'}") from error
    print(f"best: {' '.join(f'--{name} {value}' for name, value in best.parameters.items())}: {best.value:.6g}")


@dataclass(frozen=True)
class TrainTrial:
    """Function of a sweep that runs `gangline train` in its process."""

    options: tuple[str, ...]
    """Options of all trials."""

    def __repr__(self) -> str:
        return shlex.join(["gangline", "train", *self.options])

    def __call__(self, trial: Trial) -> float | None:
        """Train with the parameters of a trial; return the validation accuracy."""
        from gangline.cli.training.run import run

        def report(param: BatchEndParam) -> None:
            [(_, accuracy), *_] = param.eval_metric.get_name_value()
            trial.report(param.epoch + 1, accuracy)

        options = self.options_of(trial.parameters)
        options = replace(options, **_device_options(trial.contexts), **_own_files(options, trial.folder))
        with logging_to_stderr(f"trial {trial.number}: ", trial.folder / "log.txt"):
            result = run(options, after_validation=[report])
        if result is None or result["exit_code"]:
            raise RuntimeError(f"training was stopped by {result and result['ended']}")
        accuracy: float = result["validation_accuracy"]
        return accuracy

    def options_of(self, parameters: dict[str, Any] | Any) -> TrainOptions:
        """Return the options of a trial.

        Raises:
            UsageError: if `gangline train` has no such option, or does not accept its value.
        """
        words = [*self.options, *(word for name, value in parameters.items() for word in (f"--{name}", str(value)))]
        found = parsed(words)
        if found.plots and found.model_prefix is None:
            raise UsageError("--plots writes PREFIX.html in a sweep; expected a --model-prefix PREFIX as well")
        return found


def _values_of(word: str) -> tuple[str, list[str]]:
    name, equals, text = word.partition("=")
    found = [value for value in text.split(";" if ";" in text else ",") if value]
    if not equals or not name or not found:
        raise UsageError(f"--set is {word!r}; expected an option and its values, such as lr=0.1,0.01")
    if len(set(found)) < len(found):
        raise UsageError(f"--set is {word!r}, with a value twice; expected ; between values that have commas")
    return name.removeprefix("--"), found


def _own_files(options: TrainOptions, folder: Path) -> dict[str, Any]:
    """Return the options that name files, in the folder of a trial."""
    own: dict[str, Any] = {}
    if options.model_prefix is not None:
        own["model_prefix"] = str(folder / Path(options.model_prefix).name)
    return own


def _device_options(contexts: Sequence[Context]) -> dict[str, Any]:
    """Return the options that name the contexts of a trial, which are all of one kind."""
    gpus = [context.device_id for context in contexts if context.device_type == "gpu"]
    if gpus:
        return {"gpus": ",".join(map(str, gpus)), "cpus": None}
    return {"gpus": None, "cpus": len(contexts)}
