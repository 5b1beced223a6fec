"""Sweep: train a network for each combination of parameters, on all devices at once."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import itertools
import json
import logging
import math
import os
import pickle
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import IO, Any, Literal

import torch.multiprocessing

from gangline.collectives.context import Context, Device
from gangline.collectives.context import contexts as contexts_of
from gangline.collectives.host_files import opener, write_text
from gangline.models.reports.chart import Line, line_chart, page, table
from gangline.sweeps.queue import Place, is_worse_than_median, takes_next
from gangline.sweeps.trial import Function, Parameters, State, Trial, TrialResult, run_trial

Grid = Mapping[str, Sequence[Any]] | Sequence[Parameters]
_PRELOAD = ["gangline.models.module", "gangline.sweeps.trial"]
_PAGE_SECONDS = 1.0
_RELOAD_SECONDS = 2
_END_SECONDS = 5.0
_TRIAL = "trial of a sweep"
_GUARD = (
    "expected a function of a module, or of a script that calls sweep() in its main part alone: "
    'if __name__ == "__main__":'
)
_LONGEST_NAME = 80
_log = logging.getLogger("gangline")


@dataclass(frozen=True)
class SweepResult:
    """The trials of a sweep, in the order of its grid."""

    trials: tuple[TrialResult, ...]
    maximize: bool

    @property
    def best(self) -> TrialResult:
        """The trial with the best metric; ValueError if none has one."""
        known = [
            trial
            for trial in self.trials
            if trial.state is State.DONE and trial.value is not None and not math.isnan(trial.value)
        ]
        if not known:
            raise ValueError("no trial has ended with a metric")
        return (max if self.maximize else min)(known, key=lambda trial: trial.value or 0.0)

    def __str__(self) -> str:
        rows = _texts(self.trials)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)) for row in rows)


def sweep(
    function: Function,
    grid: Grid,
    contexts: Device | Sequence[Device] = "auto",
    *,
    folder: str | Path = "sweep",
    contexts_per_trial: int = 1,
    mode: Literal["max", "min"] = "max",
    early_stopping: bool = False,
    retry_failed: bool = False,
) -> SweepResult:
    """Run a function for each combination of parameters, each in a process of its own, on all contexts at once.

    A context that is done with a trial takes the next one, so faster ones run more of them. A trial that fails ends
    alone. ``folder`` holds the results: `trials.jsonl`, a line for each trial that has ended; `sweep.csv`, the table;
    `sweep.html`, a page of all curves; and a folder for each trial, named by its parameters. A sweep that was killed
    and is run again runs only the trials that are not in `trials.jsonl`.

    Args:
        function: trains with ``trial.parameters`` on ``trial.contexts`` and returns the metric; ``trial.report(step,
            value)`` adds to its curve. It must be importable, or be of a script that guards its main part by
            ``if __name__ == "__main__"``.
        grid: values of each parameter by name, of which all combinations are run; or a list of parameters.
        contexts: contexts, or words for them, as for `Module`. A context that is named twice runs two trials at once.
        folder: folder of the results; created if it does not exist.
        contexts_per_trial: number of contexts of each trial.
        mode: whether the metric is to be large or small.
        early_stopping: end trials whose best report is worse than the median of the others at the same step.
        retry_failed: run trials again that failed in an earlier run.

    Returns:
        All trials of the grid, those of earlier runs included.

    Raises:
        ValueError: if the grid is empty, parameters are not plain data, the contexts are fewer than a trial needs, or
            the folder holds trials of another function.
        TypeError: if the function cannot be sent to other processes, or the values of a parameter are not a list.
        RuntimeError: if another sweep runs in the folder, or a trial cannot begin.
    """
    if torch.multiprocessing.parent_process() is not None and torch.multiprocessing.current_process().name == _TRIAL:
        raise RuntimeError(f"sweep() was called while a trial loads its script; {_GUARD}")
    try:
        ForkingPickler.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"{_described(function)} cannot be sent to other processes: {error}; {_GUARD}") from error
    wanted = _combinations(grid)
    devices = contexts_of(contexts)
    if not 1 <= contexts_per_trial <= len(devices):
        raise ValueError(f"contexts_per_trial is {contexts_per_trial}; expected 1 to {len(devices)}")
    if mode not in ("max", "min"):
        raise ValueError(f"mode is {mode!r}; expected 'max' or 'min'")
    size = contexts_per_trial
    groups = [tuple(devices[first : first + size]) for first in range(0, len(devices) - size + 1, size)]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "trials.jsonl") as file:
        results = [TrialResult(number, parameters) for number, parameters in enumerate(wanted)]
        running = _Sweep(function, results, groups, folder, file, maximize=mode == "max", stops=early_stopping)
        running.read(retry_failed=retry_failed)
        ended = sum(trial.state is not None for trial in results)
        places = ", ".join(place.contexts for place in running.places)
        before = f", {ended} of them had ended before" if ended else ""
        _log.info("%d trials on %s, results in %s%s", len(wanted), places, folder, before)
        running.run()
    return SweepResult(tuple(results), mode == "max")


@dataclass
class _Sweep:
    """A sweep that runs."""

    function: Function
    results: list[TrialResult]
    groups: Sequence[tuple[Context, ...]]
    folder: Path
    file: IO[str]
    maximize: bool
    stops: bool
    processes: dict[connection.Connection, tuple[int, TrialResult, Any]] = field(default_factory=dict)
    """Place, trial and process by the connection to it."""
    begun: set[int] = field(default_factory=set)
    """Numbers of the trials whose function was called."""
    page_written: float = 0.0

    def __post_init__(self) -> None:
        self.places = [Place(", ".join(map(str, group))) for group in self.groups]
        on_host = sum(any(context.device_type == "cpu" for context in group) for group in self.groups)
        self.threads = max((os.cpu_count() or 1) // max(on_host, 1), 1)

    def read(self, *, retry_failed: bool) -> None:
        """Take over the trials that an earlier run has ended."""
        self.file.seek(0)
        lines = self.file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            self.file.write("\n")  # ends the line that was cut off
        name, ended = _described(self.function), {}
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # a line that was cut off by the end of its process
                found = json.loads(line)
                if (earlier := found.pop("function", None)) != name:
                    raise ValueError(
                        f"{self.folder} holds trials of {earlier!r}, not of {name!r}; expected another folder"
                    )
                ended[_key(found["parameters"])] = found
        for number, trial in enumerate(self.results):
            found = ended.get(_key(trial.parameters))
            if found is not None and not (retry_failed and found["state"] == State.FAILED):
                curve = [(int(step), float(value)) for step, value in found["curve"]]
                known = {**found, "number": number, "state": State(found["state"]), "curve": curve}
                self.results[number] = TrialResult(**known)

    def run(self) -> None:
        """Run the trials that have not ended, until all have."""
        waiting = [trial for trial in self.results if trial.state is None]
        try:
            while waiting or self.processes:
                now = time.monotonic()
                for index, place in enumerate(self.places):
                    others = [other for other in self.places if other is not place]
                    if waiting and place.busy_since is None and takes_next(place, others, len(waiting), now):
                        self._start(index, waiting.pop(0))
                for ready in connection.wait(list(self.processes), timeout=_PAGE_SECONDS):
                    assert isinstance(ready, connection.Connection)
                    self._receive(ready)
                if time.monotonic() - self.page_written > _PAGE_SECONDS:
                    self._write_page()
        finally:
            for own, (_, _, process) in self.processes.items():
                own.close()
                process.kill()  # it could wait for others; an interrupted trial begins again
                process.join()
            self._write_page()
            self._write_table()

    def _start(self, index: int, trial: TrialResult) -> None:
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        own, theirs = context.Pipe()
        folder = self.folder / _folder_name(trial.parameters)
        folder.mkdir(exist_ok=True)
        given = Trial(trial.number, dict(trial.parameters), tuple(self.groups[index]), folder)
        process = context.Process(
            name=_TRIAL, target=run_trial, args=(theirs, os.getpid(), self.function, given, self.threads)
        )
        process.start()
        theirs.close()
        trial.contexts = self.places[index].contexts
        self.places[index].busy_since = time.monotonic()
        self.processes[own] = index, trial, process

    def _receive(self, own: connection.Connection) -> None:
        """Handle a message of a trial, or its end without one."""
        index, trial, process = self.processes[own]
        try:
            kind, content = own.recv()
        except (EOFError, OSError):
            process.join()
            kind, content = "failed", f"its process ended with exit code {process.exitcode}"
            if trial.number not in self.begun:
                raise RuntimeError(f"trial {trial.number} cannot begin: {content}; {_GUARD}") from None
        if kind == "begun":
            self.begun.add(trial.number)
        elif kind == "report":
            trial.curve.append(content)
            others = [other for other in self.results if other is not trial]
            with contextlib.suppress(OSError):  # its end follows
                own.send(self.stops and is_worse_than_median(trial, others, maximize=self.maximize))
        else:
            self._end(self.places[index], trial, State(kind), content)
            del self.processes[own]
            own.close()
            process.join(_END_SECONDS)
            process.kill()

    def _end(self, place: Place, trial: TrialResult, state: State, content: Any) -> None:
        """Record the end of a trial: its metric, or its error."""
        assert place.busy_since is not None
        trial.state, trial.seconds = state, time.monotonic() - place.busy_since
        place.busy_since = None
        if state is State.FAILED:
            trial.error = content
            _log.warning("trial %d %s failed: %s", trial.number, dict(trial.parameters), content.splitlines()[-1])
        else:
            if state is State.DONE:
                place.durations.append(trial.seconds)
            values = [value for _, value in trial.curve]
            best = (max if self.maximize else min)(values) if values else None
            trial.value = content if content is not None else best
            _log.info("trial %d %s: %s %s", trial.number, dict(trial.parameters), state, trial.value)
        self.file.write(json.dumps({**asdict(trial), "function": _described(self.function)}) + "\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self._write_table()

    def _write_table(self) -> None:
        """Write sweep.csv."""
        text = io.StringIO()
        csv.writer(text).writerows(_rows(self.results))
        _replace(self.folder / "sweep.csv", text.getvalue())

    def _write_page(self) -> None:
        """Write sweep.html, which reloads itself until the sweep is over."""
        self.page_written = time.monotonic()
        lines = [Line(str(trial.number), trial.curve) for trial in self.results if trial.curve]
        heads, *rows = _texts(self.results)
        errors = [trial.error.strip().rpartition("\n")[2] for trial in self.results]
        cells = [[*row, error] for row, error in zip(rows, errors, strict=True)]
        counts = Counter(trial.state for trial in self.results if trial.state)
        ended = ", ".join(f"{counts[state]} {state}" for state in State if counts[state])
        text = page(
            "gangline sweep",
            f"{counts.total()} of {len(rows)} trials have ended{f': {ended}' if ended else ''}",
            [line_chart(lines, "step", "metric"), table([*heads, "error"], cells)],
            reload_seconds=None if counts.total() == len(rows) else _RELOAD_SECONDS,
        )
        _replace(self.folder / "sweep.html", text)


def _rows(trials: Sequence[TrialResult]) -> Iterator[list[Any]]:
    """Yield the head of the table of trials, and its rows."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.parameters))
    yield ["trial", *names, "state", "metric", "seconds", "contexts"]
    for trial in trials:
        values = [trial.parameters.get(name, "") for name in names]
        state = trial.state or ("runs" if trial.contexts else "waits")
        metric = "" if trial.value is None else trial.value
        yield [trial.number, *values, state, metric, round(trial.seconds, 1), trial.contexts]


def _texts(trials: Sequence[TrialResult]) -> list[list[str]]:
    """Return the rows of the table of trials for readers."""
    return [[f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in row] for row in _rows(trials)]


def _replace(path: Path, text: str) -> None:
    """Write a file in place of an earlier one."""
    aside = path.with_name(path.name + ".tmp")
    write_text(aside, text, newline="")
    aside.replace(path)


def _combinations(grid: Grid) -> list[Parameters]:
    """Return the parameters of all trials.

    Raises:
        ValueError: if there are none, some are equal, or they are not plain data.
    """
    if isinstance(grid, Mapping):
        for name, values in grid.items():
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise TypeError(f"grid[{name!r}] is {values!r}; expected a list of values")
        wanted: list[Parameters] = [
            dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
        ]
    else:
        wanted = [dict(parameters) for parameters in grid]
    if not grid or not wanted:
        raise ValueError(f"grid is {grid!r}; expected one value or more of each parameter")
    keys = [_key(parameters) for parameters in wanted]
    if len(set(keys)) < len(keys):
        raise ValueError(f"grid has {wanted[next(i for i, key in enumerate(keys) if key in keys[:i])]} twice")
    return wanted


def _described(function: Function) -> str:
    """Return a name of a function that is the same in every run of a program."""
    name, module = getattr(function, "__qualname__", None), getattr(function, "__module__", "")
    if name is None:
        return repr(function)
    script = getattr(sys.modules.get(module), "__file__", None) if module == "__main__" else None
    return f"{name} of {module if script is None else Path(script).name}"


def _folder_name(parameters: Parameters) -> str:
    """Return a name for the folder of a trial, which a sweep with another grid finds again."""
    words = ",".join(f"{name}={value}" for name, value in sorted(parameters.items()))
    plain = re.sub(r"[^\w.,=+-]", "_", words)[:_LONGEST_NAME]
    return plain if plain == words else f"{plain}-{zlib.crc32(_key(parameters).encode()):08x}"


def _key(parameters: Parameters) -> str:
    """Return a text that is the same for equal parameters."""
    try:
        return json.dumps(parameters, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"parameters {dict(parameters)} are not plain data: {error}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """Open a file for reading and appending, and lock it."""
    with open(path, "a+", opener=opener) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(f"another sweep runs in {path.parent}; expected a folder of its own") from error
        yield file
