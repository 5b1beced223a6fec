"""Restart of a whole job: after a failure all processes are stopped and started again.

The supervisor restarts single processes while the others keep running.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

CHECKPOINTED = 75
"""Exit code of a program that a signal stopped after it wrote a checkpoint: EX_TEMPFAIL of sysexits.h."""
DIVERGED = 3
"""Exit code of a program whose loss or weights were not finite; a restart from its checkpoint would diverge again."""
FINAL = {
    2: "wrong usage",
    DIVERGED: "training diverged",
    CHECKPOINTED: "stopped by a signal, with a checkpoint written",
    126: "the command cannot be run",
    127: "the command was not found",
    128 + signal.SIGPIPE: "nobody reads the output",
}
"""Exit codes after which a restart is useless or unwanted."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a job."""

    code: int
    """Exit code."""
    is_stopped: bool = False
    """True if a signal to the launcher ended it."""


def run_with_restarts(attempt: Callable[[int], Outcome], max_restarts: int) -> int:
    """Run a job and restart it after failures; return the exit code of the last attempt.

    A job is not restarted if a signal to the launcher stopped it, or its exit code is in `FINAL`.
    """
    restart = 0
    try:
        while True:
            outcome = attempt(restart)
            if not outcome.code or outcome.is_stopped or not max_restarts:
                return outcome.code
            if outcome.code in FINAL:
                _report(f"the job is not started again: code {outcome.code} means {FINAL[outcome.code]}")
                return outcome.code
            if restart == max_restarts:
                _report(f"the job is not started again: all {max_restarts} restarts are used up")
                return outcome.code
            restart += 1
            _report(f"restart {restart} of {max_restarts}: all processes of the job start again")
    except KeyboardInterrupt:  # between two attempts
        return 128 + signal.SIGINT


def _report(text: str) -> None:
    with suppress(OSError):  # the reader may be gone, or the disk full
        print(f"gangline: {text}", file=sys.stderr, flush=True)
