"""gangline's errors: failures between processes. Wrong arguments raise Python's own exceptions."""

from __future__ import annotations

from collections.abc import Collection


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


def nested_call(call: str) -> NestedCallError:
    """Return the error of a call inside another call of the same thread."""
    return NestedCallError(
        f"{call} was called inside another call of the same thread, as by a signal handler or a finalizer; expected a "
        "call after that one has returned: let the handler set a flag, and read it between calls"
    )


def name_ranks(ranks: Collection[int]) -> str:
    """Return text that names the ranks: "rank 1" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
