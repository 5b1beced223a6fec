"""gangline's errors: failures between processes. Wrong arguments raise Python's own exceptions."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


class GanglineError(RuntimeError):
    """Communication between processes failed; the message names the ranks and the call."""


class DeadNodeError(GanglineError):
    """A required process was killed, left, or gave no sign of life within the time limit."""


class StallError(GanglineError):
    """A process is alive but did not join a call within the timeout."""


class ProtocolError(GanglineError):
    """A process sent data that does not follow gangline's protocol."""


class MismatchError(GanglineError, ValueError):
    """Processes disagree on something that must be equal: a collective, a size, a dtype, an operation."""


class NestedCallError(RuntimeError):
    """A call was made inside another call of the same thread, for whose end it would wait. The other call goes on."""


class DiskFullError(OSError):
    """A file does not fit on its disk; the file of that name is unchanged."""


class UsageError(ValueError):
    """Wrong value of a command-line option: the command prints one line and ends with exit code 2."""


def nested_call(call: str) -> NestedCallError:
    """Return the error of a call inside another call of the same thread."""
    return NestedCallError(
        f"{call} was called inside another call of the same thread, as by a signal handler or a finalizer; expected a "
        "call after that one has returned: let the handler set a flag, and read it between calls"
    )


def did_you_mean(word: str, known: Collection[str]) -> str:
    """Return " did you mean 'lenet'?" for a misspelt word, or "" if no known word is like it."""
    near = get_close_matches(word, known, n=1, cutoff=0.7)
    return f" did you mean {near[0]!r}?" if near else ""


def name_ranks(ranks: Collection[int]) -> str:
    """Return text that names the ranks: "rank 1" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
