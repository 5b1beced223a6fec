"""Sweep: run a function for each combination of parameters, on all contexts at once."""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import math
import os
import re
import signal
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch.multiprocessing

from gangline.collectives.host_files import opener
from gangline.kvstore.context import Context, Device
from gangline.kvstore.context import contexts as contexts_of
from gangline.models.data.reader import exit_with

_GUARD = 'expected sweep() in the main part of a script: if __name__ == "__main__":'
_PROCESS = "trial of a sweep"
_END_SECONDS = 5.0


@dataclass
class Trial:
    """A trial of a sweep: the argument of its function, and later its result."""

    parameters: Mapping[str, Any]
    folder: Path
    """Folder for its checkpoints; a trial that was interrupted runs again with the same folder."""
    contexts: tuple[Context, ...] = ()
    """Contexts to train on, for `Module`."""
    value: float | None = None
    """Metric that the function returned; None: the trial failed."""
    error: str = ""
    """Traceback of a trial that failed."""


def sweep(
    function: Callable[[Trial], float],
    grid: Mapping[str, Sequence[Any]],
    contexts: Device | Sequence[Device] = "auto",
    *,
    folder: str | Path = "sweep",
    contexts_per_trial: int = 1,
) -> list[Trial]:
    """Run a function for each combination of parameters, each in a process of its own, on all contexts at once.

    Contexts that are done with a trial take the next one, so faster ones run more of them. A trial that fails ends
    alone. `trials.jsonl` in ``folder`` has a line for each trial that has ended; a sweep that is run again runs only
    the trials without a metric.

    Args:
        function: trains with ``trial.parameters`` on ``trial.contexts`` and returns the metric. It must be importable,
            or be of a script that guards its main part by ``if __name__ == "__main__"``.
        grid: values of each parameter by name, plain data.
        contexts: contexts, or words for them, as for `Module`. A context that is named twice runs two trials at once.
        folder: folder of the results, and of a folder for each trial; created if it does not exist.
        contexts_per_trial: number of contexts of each trial.

    Returns:
        All trials of the grid, those of earlier runs included.

    Raises:
        ValueError: if the grid is empty, the contexts are fewer than a trial needs, or ``folder`` has trials of
            another function.
        RuntimeError: if another sweep runs in ``folder``, or a trial cannot begin.
    """
    if torch.multiprocessing.current_process().name == _PROCESS:
        raise RuntimeError(f"sweep() was called while a trial loads its script; {_GUARD}")
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    combinations = json.loads(json.dumps(combinations))  # as they are read again
    trials = [Trial(parameters, Path(folder, _folder_name(parameters))) for parameters in combinations]
    if not grid or len({trial.folder for trial in trials}) != max(len(trials), 1):
        raise ValueError(f"grid is {grid!r}; expected one value or more of each parameter, and none twice")
    devices, size = contexts_of(contexts), contexts_per_trial
    if not 1 <= size <= len(devices):
        raise ValueError(f"contexts_per_trial is {size}; expected 1 to {len(devices)}")
    groups = [tuple(devices[first : first + size]) for first in range(0, len(devices) - size + 1, size)]
    Path(folder).mkdir(parents=True, exist_ok=True)
    with open(Path(folder, "trials.jsonl"), "a+", opener=opener) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"another sweep runs in {folder}; expected a folder of its own") from error
        file.seek(0)
        earlier = [json.loads(line) for line in file]
        name = getattr(function, "__qualname__", type(function).__name__)
        if others := {line["function"] for line in earlier} - {name}:
            raise ValueError(f"{folder} has trials of {', '.join(others)}, not of {name!r}; expected another folder")
        known = {_folder_name(line["parameters"]): line["value"] for line in earlier}
        for trial in trials:
            trial.value = known.get(trial.folder.name)
        for trial in _run(function, [trial for trial in trials if trial.value is None], groups):
            line = {"function": name, "parameters": trial.parameters, "value": trial.value, "error": trial.error}
            print(json.dumps(line), file=file, flush=True)
    return trials


def _run(function: Callable[[Trial], float], waiting: list[Trial], idle: list[tuple[Context, ...]]) -> Iterator[Trial]:
    """Run trials on the groups of contexts that are idle; yield each when it has ended."""
    start = torch.multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["gangline.models.module"])
    threads = max((os.cpu_count() or 1) // len(idle), 1)
    running: dict[connection.Connection, tuple[Trial, Any]] = {}
    try:
        while waiting or running:
            while waiting and idle:
                trial = waiting.pop(0)
                trial.contexts = idle.pop(0)
                trial.folder.mkdir(exist_ok=True)
                results, sender = start.Pipe(duplex=False)
                arguments = sender, os.getpid(), function, trial, threads
                process = start.Process(name=_PROCESS, target=_run_trial, args=arguments)
                process.start()
                sender.close()
                running[results] = trial, process
            for ready in connection.wait(list(running)):
                assert isinstance(ready, connection.Connection)
                trial, process = running.pop(ready)
                try:
                    trial.value, trial.error = ready.recv()
                except EOFError:
                    process.join()
                    if process.exitcode == 1:  # of Python, before the function was called
                        raise RuntimeError(f"trial {dict(trial.parameters)} cannot begin; {_GUARD}") from None
                    trial.error = f"its process ended with exit code {process.exitcode}"
                ready.close()
                process.join(_END_SECONDS)
                process.kill()
                idle.append(trial.contexts)
                outcome = trial.value if trial.value is not None else trial.error.splitlines()[-1]
                logging.getLogger("gangline").info("%s on %s: %s", trial.parameters, trial.contexts, outcome)
                yield trial
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _run_trial(
    sender: connection.Connection, parent: int, function: Callable[[Trial], float], trial: Trial, threads: int
) -> None:
    """Call the function in this process, which ends when its parent does, and send its value or its error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep ends its trials
    exit_with(parent)
    torch.set_num_threads(threads)
    try:
        value = float(function(trial))
        if math.isnan(value):
            raise ValueError("the metric is nan")
        sender.send((value, ""))
    except BaseException:  # noqa: BLE001  reported to the sweep
        sender.send((None, traceback.format_exc()))
        os._exit(1)  # threads of a trial that failed may still run


def _folder_name(parameters: Mapping[str, Any]) -> str:
    """Return a name that is the same for equal parameters in every run."""
    words = ",".join(f"{name}={value}" for name, value in sorted(parameters.items()))
    plain = re.sub(r"[^\w.,=+-]", "_", words)[:80]
    return plain if plain == words else f"{plain}-{zlib.crc32(words.encode()):08x}"
