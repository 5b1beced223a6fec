"""One trial of a sweep: what the user's function gets, and the process that runs it."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex

import torch

from gangline.collectives.context import Context
from gangline.models.data.reader import exit_with

Parameters = Mapping[str, Any]
"""Values of a trial's parameters by name; plain data."""


class TrialStopped(Exception):  # noqa: N818  it is no error
    """Raised by `Trial.report` in a trial that early stopping ends; let it pass."""


def _goes_on(step: int, value: float) -> bool:  # noqa: ARG001
    return False


@dataclass(frozen=True)
class Trial:
    """What the function of a sweep gets."""

    number: int
    parameters: Parameters
    contexts: tuple[Context, ...]
    """Contexts to train on, for `Module`."""
    folder: Path
    """Folder of this trial, for its checkpoints; it remains if the sweep is killed, and the next try finds it."""
    send: Callable[[int, float], bool] = field(default=_goes_on, repr=False)
    """Passes a value on; returns whether the trial is to stop."""

    def report(self, step: int, value: float) -> None:
        """Report the metric after a step, such as the validation accuracy after an epoch.

        Args:
            step: number of the step; it rises from report to report.
            value: the metric.

        Raises:
            TrialStopped: if early stopping ends this trial.
        """
        if self.send(int(step), float(value)):
            raise TrialStopped(f"trial {self.number} is stopped after step {step} with {value:g}")


Function = Callable[[Trial], float | None]
"""Function of a sweep: trains, and returns the metric; None: the best that it reported."""


class State(StrEnum):
    """How a trial ended."""

    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass
class TrialResult:
    """A trial that has ended, or runs."""

    number: int
    parameters: Parameters
    state: State | None = None
    """None: it runs."""
    value: float | None = None
    """The metric that the function returned, or the best that it reported."""
    seconds: float = 0.0
    contexts: str = ""
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, value) of its reports."""
    error: str = ""
    """Traceback of a failed trial."""


def run_trial(connection: Connection, parent: int, function: Function, trial: Trial, num_threads: int) -> None:
    """Run a function in this process, which ends when its parent does.

    Sends ("begun", None); then ("report", (step, value)), and receives whether to stop; at the end ("done", value),
    ("stopped", None) or ("failed", traceback).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sweep ends its trials
    exit_with(parent)
    torch.set_num_threads(num_threads)
    reported = False

    def send(step: int, value: float) -> bool:
        nonlocal reported
        reported = True
        connection.send(("report", (step, value)))
        return bool(connection.recv())

    try:
        connection.send(("begun", None))
        try:
            found = function(replace(trial, send=send))
            if found is None and not reported:
                raise ValueError("the function returned None and reported nothing; expected the metric")
            if found is not None and not isinstance(found, (SupportsFloat, SupportsIndex)):
                raise TypeError(f"the function returned {found!r}; expected the metric, a number")
            connection.send(("done", float(found) if found is not None else None))
        except TrialStopped:
            connection.send(("stopped", None))
        except BaseException:  # noqa: BLE001  reported to the sweep
            connection.send(("failed", traceback.format_exc()))
            os._exit(1)  # threads of a trial that failed may still run
    except (BrokenPipeError, ConnectionResetError, EOFError):  # the sweep has ended
        os._exit(1)
