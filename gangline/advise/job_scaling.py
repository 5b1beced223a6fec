"""`gangline advise --scale`: run a job with fewer processes and other batch sizes, and predict its step time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gangline.advise.scaling import Scaling, StepTimes, fitted_sizes, refined
from gangline.advise.steps import Event, JobSteps, read_events, steps_of
from gangline.collectives.timeline.recorder import VARIABLE
from gangline.usage_error import UsageError

_CONTEXTS = ("--cpus", "--context")
"""Options of `gangline train` for its contexts: their number, and a list of them."""
PROCESSES = (
    *("--nproc-per-node", "--nproc_per_node", "-n", "-np", "--workers", "--num-workers", "--num_processes"),
    *_CONTEXTS,
)
"""Options for the number of processes or contexts; the first one in a command, which is the launcher's, counts."""
BATCH_SIZES = ("--batch-size", "--batch_size", "--per_device_train_batch_size")
"""Options of scripts for the batch size; the last one in a command counts."""
_MOST_COUNTS = 4
"""Numbers of processes up to this one are all measured; of more, powers of two."""
_FARTHEST = 64
"""Largest batch size that is measured, in times the given one."""
_START_SECONDS = 60
"""Longest time from the beginning of the timeline to the first step."""
_END_SECONDS = 30


def run_with_timeline(
    arguments: Sequence[str],
    timeline: Path | None = None,
    variables: Mapping[str, str] | None = None,
    seconds: float | None = None,
) -> tuple[int, list[Event]]:
    """Run a command that trains; return its exit code and its timeline, which is kept if a path is given.

    With ``seconds`` end the command by SIGTERM when it has trained for so long, and print its output only if it failed
    before; else let it end by itself.
    """
    with tempfile.TemporaryDirectory(prefix="gangline-advise-") as folder:
        path = (timeline or Path(folder) / "timeline.json").absolute()
        path.unlink(missing_ok=True)
        environment = {**os.environ, VARIABLE: str(path), **(variables or {})}
        output = Path(folder) / "output"
        if shutil.which(arguments[0]) is None:
            raise UsageError(
                f"there is no command {arguments[0]!r}; expected one such as torchrun or python after --, or a file "
                "of a timeline (.json)"
            )
        if seconds is None:
            code = subprocess.run(arguments, env=environment, check=False).returncode  # noqa: S603  the user's own
        else:
            code = _run_for(arguments, environment, path, output, seconds)
        if not path.exists():
            printed = output.read_text(errors="replace")[-2000:] if output.exists() else ""
            raise UsageError(
                f"{arguments[0]} wrote no timeline (exit code {code}): it must train by gangline, or by "
                f"torch.distributed with the backend gangline{printed and f'. It printed: {printed}'}"
            )
        return code, read_events(path)


def _run_for(arguments: Sequence[str], environment: Mapping[str, str], path: Path, output: Path, seconds: float) -> int:
    """Run a command until it has trained for so many seconds; return its exit code, 0 if it was ended."""
    with (
        output.open("w") as printed,
        subprocess.Popen(  # noqa: S603  the user's own
            arguments, env=environment, stdout=printed, stderr=printed, start_new_session=True
        ) as process,
    ):
        try:
            ends = float("inf")
            while process.poll() is None and time.monotonic() < ends:
                if path.exists() and path.stat().st_size:
                    has_begun = b'"backward"' in path.read_bytes()
                    ends = min(ends, time.monotonic() + (seconds if has_begun else _START_SECONDS))
                time.sleep(0.05)
            code = process.poll()
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            return code or 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def scaling_of_job(arguments: Sequence[str], seconds: float) -> Scaling:
    """Run a command with 1 up to its number of processes or contexts and several batch sizes, each for so many seconds.

    The batch size from which all of them win is found by `refined`.
    """
    most, given = (_value(arguments, names) for names in (PROCESSES, BATCH_SIZES))
    counts = [one for one in range(1, most + 1) if most <= _MOST_COUNTS or one.bit_count() == 1 or one == most]
    whole = _job(arguments, most, given, seconds).samples
    if not whole:
        raise UsageError("the timeline does not have the number of samples; expected a tensor as the model's input")
    of_each = whole > given and most > 1  # else the option means the batch of all processes
    unit = "context" if _place(arguments, PROCESSES).option in _CONTEXTS else "process"

    def measure(count: int, size: int) -> tuple[int, float]:
        """Return the samples of a step and its seconds."""
        job = _job(arguments, count, max(round(size / count), 1) if of_each else size, seconds)
        return job.samples, job.step_seconds

    times: list[StepTimes] = []
    sizes = fitted_sizes(whole, most)
    for count in counts:
        points = sorted(measure(count, size) for size in sizes)
        if len(dict(points)) < len(points):
            raise UsageError(
                f"{unit} count {count}: a step has {[samples for samples, _ in points]} samples at the batch sizes "
                f"{[*sizes]}; expected a script that trains with the batch size of its option"
            )
        times.append(StepTimes(count, tuple(points)))
    if len(times) > 1:
        times = refined(times, measure, _FARTHEST * whole)
    return Scaling(unit, whole, tuple(times))


def _job(arguments: Sequence[str], count: int, batch_size: int, seconds: float) -> JobSteps:
    """Run a command with a number of processes and a value of its batch size."""
    words = _replaced(_replaced(arguments, PROCESSES, count), BATCH_SIZES, batch_size)
    code, events = run_with_timeline(words, None, None, seconds)
    if code:
        raise UsageError(f"{' '.join(words)} left with {code}; expected it to train with any number of processes")
    try:
        return steps_of(events)
    except ValueError as error:
        raise UsageError(f"{' '.join(words)}: {error}") from error


class _Place(NamedTuple):
    """Place of an option's value in a command."""

    at: int
    """Index of the word."""
    option: str
    prefix: str
    """Text before the value in the word."""
    text: str
    """The value."""


def _place(arguments: Sequence[str], names: Sequence[str]) -> _Place:
    """Return the place of an option's value: of several options the first for a launcher's, the last for a script's."""
    indices = [index for index, word in enumerate(arguments) if word.partition("=")[0] in names]
    if not indices:
        raise UsageError(f"--scale changes {' or '.join(names)}, and the command has no such option")
    index = indices[0 if names is PROCESSES else -1]
    option, equals, text = arguments[index].partition("=")
    if equals:
        return _Place(index, option, option + equals, text)
    return _Place(index + 1, option, "", "".join(arguments[index + 1 : index + 2]))


def _value(arguments: Sequence[str], names: Sequence[str]) -> int:
    """Return the value of an option in a command; of a list, its length."""
    place = _place(arguments, names)
    if place.option == "--context":
        return len(place.text.split(","))
    if not place.text.isdecimal() or int(place.text) < 1:
        raise UsageError(f"{place.option} is {place.text!r}; expected a number")
    return int(place.text)


def _replaced(arguments: Sequence[str], names: Sequence[str], value: int) -> list[str]:
    """Return a command with another value of an option; of a list, with its first entries."""
    place = _place(arguments, names)
    text = ",".join(place.text.split(",")[:value]) if place.option == "--context" else str(value)
    return [*arguments[: place.at], f"{place.prefix}{text}", *arguments[place.at + 1 :]]
