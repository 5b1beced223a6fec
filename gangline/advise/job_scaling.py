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

from gangline.advise.scaling import Check, Scaling, StepTimes, checked_sizes, fitted_sizes
from gangline.advise.steps import Event, JobSteps, read_events, steps_of
from gangline.collectives.errors import UsageError
from gangline.collectives.timeline.recorder import VARIABLE

PROCESSES = ("--nproc-per-node", "--nproc_per_node", "-n", "-np", "--workers", "--num-workers", "--num_processes")
"""Options of launchers for the number of processes; the first one in a command counts."""
BATCH_SIZES = ("--batch-size", "--batch_size", "--per_device_train_batch_size")
"""Options of scripts for the batch size; the last one in a command counts."""
_MOST_COUNTS = 4
"""Numbers of processes up to this one are all measured; of more, powers of two."""
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
    """Run a command until it has written its timeline for so many seconds; return its exit code, 0 if it was ended."""
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
                    ends = min(ends, time.monotonic() + seconds)
                time.sleep(0.05)
            code = process.poll()
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
            return code or 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def scaling_of_job(arguments: Sequence[str], seconds: float, *, verifies: bool) -> Scaling:
    """Run a command with 1 up to its number of processes and several batch sizes, each for so many seconds.

    ``verifies``: run other batch sizes as well, beside what is predicted for them.
    """
    most, given = (_value(arguments, names) for names in (PROCESSES, BATCH_SIZES))
    counts = [one for one in range(1, most + 1) if most <= _MOST_COUNTS or one.bit_count() == 1 or one == most]
    whole = _job(arguments, most, given, seconds).samples
    if not whole:
        raise UsageError("the timeline does not have the number of samples; expected a tensor as the model's input")
    of_each = whole > given and most > 1  # else the option means the batch of all processes

    def measure(sizes: Sequence[int]) -> dict[int, dict[int, tuple[int, float]]]:
        """Return, by count and batch size, the samples of a step and its seconds."""
        found: dict[int, dict[int, tuple[int, float]]] = {count: {} for count in counts}
        for size in sizes:
            for count in counts:
                job = _job(arguments, count, max(round(size / count), 1) if of_each else size, seconds)
                found[count][size] = job.samples, job.step_seconds
        return found

    fitted = measure(fitted_sizes(whole, most))
    for count, points in fitted.items():
        if len({samples for samples, _ in points.values()}) < len(points):
            raise UsageError(
                f"with {count} processes a step has {sorted(samples for samples, _ in points.values())} samples at the "
                f"batch sizes {sorted(points)}; expected a script that trains with the batch size of its option"
            )
    times = [StepTimes(count, tuple(sorted(points.values()))) for count, points in fitted.items()]
    measured = measure(checked_sizes(whole) if verifies else ())
    checks = [
        Check(one.count, samples, one.seconds(samples), took)
        for one in times
        for samples, took in measured[one.count].values()
    ]
    return Scaling("process", whole, tuple(times), tuple(checks))


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


def _place(arguments: Sequence[str], names: Sequence[str]) -> tuple[int, str, str]:
    """Return the place of the word that has an option's value, what precedes it in the word, and the value.

    Of several options the first counts for a launcher's, the last for a script's.
    """
    places = [place for place, word in enumerate(arguments) if word.partition("=")[0] in names]
    if not places:
        raise UsageError(f"--scale changes {' or '.join(names)}, and the command has no such option")
    place = places[0 if names is PROCESSES else -1]
    name, equals, text = arguments[place].partition("=")
    return (place, name + equals, text) if equals else (place + 1, "", "".join(arguments[place + 1 : place + 2]))


def _value(arguments: Sequence[str], names: Sequence[str]) -> int:
    """Return the value of an option in a command."""
    place, name, text = _place(arguments, names)
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name.rstrip('=') or arguments[place - 1]} is {text!r}; expected a number")
    return int(text)


def _replaced(arguments: Sequence[str], names: Sequence[str], value: int) -> list[str]:
    """Return a command with another value of an option."""
    place, name, _ = _place(arguments, names)
    return [*arguments[:place], f"{name}{value}", *arguments[place + 1 :]]
