"""Findings of checks, and the runner that makes each check in a child process under a deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import import_module
from typing import IO, Any, NamedTuple

from gangline.collectives.processes.parent_death import die_with_parent


class Status(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    """A job runs here, but some jobs would not."""
    SLOW = "slow"
    """A job runs, slower than this machine allows."""
    BROKEN = "broken"
    """A job could not run."""
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """Line of the report."""

    status: Status
    name: str
    measured: str
    remedy: str = ""
    """Remedy; empty if nothing is to be done."""
    host: str = ""
    """Host to which it applies; empty for the only one, or for all."""


class Check(NamedTuple):
    """A check: a function of a module of this folder that returns findings, or JSON values."""

    name: str
    module: str
    function: str
    remedy: str = ""
    """Remedy if it does not end within the deadline."""


class Outcome(NamedTuple):
    """Value that a check's function returned, or why there is none."""

    value: Any
    problem: str
    is_late: bool = False


def run(
    checks: Iterable[Check],
    seconds: float,
    arguments: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Run checks side by side, each in a child process, and return their outcomes in order.

    The process group of a check is killed when its deadline passes. ``arguments`` are keyword arguments of the
    functions, as JSON values; ``environment`` is added to this process's.
    """
    with ExitStack() as stack:
        children = [stack.enter_context(_child(check, arguments or {}, environment or {})) for check in checks]
        until = time.monotonic() + seconds
        return [_outcome(*child, until, seconds) for child in children]


def findings_of(check: Check, outcome: Outcome) -> list[Finding]:
    """Return the findings of a check; one that says why if its process hung or died."""
    if not outcome.problem:
        return [finding_of(one) for one in outcome.value]
    remedy = (
        check.remedy if outcome.is_late and check.remedy else f"run it alone: gangline -v check --only {check.name}"
    )
    return [Finding(Status.BROKEN, check.name, outcome.problem, remedy)]


def finding_of(fields: Mapping[str, Any]) -> Finding:
    """Return a finding from its fields, as `dataclasses.asdict` gives them."""
    return Finding(**{**fields, "status": Status(fields["status"])})


@contextmanager
def _child(
    check: Check, arguments: Mapping[str, Any], environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[str], IO[str]]]:
    """Start the process of a check. Its output goes to files, which cannot fill up as pipes do."""
    call = f"run_in_child({check.module!r}, {check.function!r}, {json.dumps(arguments)!r}, {os.getpid()})"
    key = os.environ.get("GANGLINE_JOB_KEY_FD", "")  # the descriptor by which a launcher hands over the job's key
    with (
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", f"from {__name__} import run_in_child; {call}"],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if os.environ.get("GANGLINE_LOG") == "debug" else errors,
            start_new_session=True,
            pass_fds=[int(key)] if key.isdecimal() else [],
        ) as process,
    ):
        try:
            yield process, output, errors
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what the check has started


def _outcome(
    process: subprocess.Popen[bytes], output: IO[str], errors: IO[str], until: float, seconds: float
) -> Outcome:
    try:
        code = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Outcome(None, f"did not end within {seconds:g} s", is_late=True)
    output.seek(0)
    errors.seek(0)
    if code == 0:
        return Outcome(json.load(output), "")
    end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return Outcome(None, ": ".join([end, *errors.read().strip().splitlines()[-1:]]))


def run_in_child(module: str, function: str, arguments: str, parent: int) -> None:
    """Call the function of a module of this folder and print what it returns as JSON."""
    die_with_parent(parent)
    output = os.dup(1)
    os.dup2(2, 1)  # libraries print to stdout, such as NCCL with NCCL_DEBUG
    value = getattr(import_module(f"{__package__}.{module}"), function)(**json.loads(arguments))
    with os.fdopen(output, "w") as file:
        json.dump(value, file, default=asdict)
