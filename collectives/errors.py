"""gangline's own errors: what can go wrong between processes. Wrong arguments raise Python's own classes."""

from __future__ import annotations

from collections.abc import Collection


class GanglineError(RuntimeError):
    """Something between processes went wrong; the message names the ranks and the call."""


class DeadNodeError(GanglineError):
    """A process that is needed was killed, left, or gave no sign of life for longer than the limit."""


class StallError(GanglineError):
    """A process lives, but did not come within the timeout."""


class ProtocolError(GanglineError):
    """What arrived is not what gangline sends."""


class MismatchError(GanglineError, ValueError):
    """Processes that must agree do not: on a collective, a size, a dtype, an operation."""


def name_ranks(ranks: Collection[int]) -> str:
    """Ranks in words: "rank 1" or "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
