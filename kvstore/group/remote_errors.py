"""Errors that a process reports to others: names of classes, and texts for different or refused calls."""

from __future__ import annotations

import traceback
from collections.abc import Mapping

from gangline.collectives.errors import DeadNodeError, GanglineError, MismatchError, ProtocolError, StallError
from gangline.kvstore.errors import DiskFullError

ERRORS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        *(DeadNodeError, MismatchError, ProtocolError, StallError, GanglineError),
        *(ValueError, KeyError, TypeError, RuntimeError, MemoryError, EOFError),
        *(OSError, FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError, IsADirectoryError),
        DiskFullError,
    )
}
"""Exception classes that messages may name."""

_TRACE = "\nTraceback of the server (most recent call last):\n"

_SHOWN = 300  # maximum characters of a call in an error message

_WRITES = "save_checkpoint"  # name of the call that users tend to make on rank 0 alone


def error_name(error: BaseException) -> str:
    """Return the name in `ERRORS` of an exception's class or of its nearest listed base class."""
    return next((cls.__name__ for cls in type(error).__mro__ if cls.__name__ in ERRORS), RuntimeError.__name__)


def error_text(error: BaseException) -> str:
    """Return an exception's text, without the quotes that ``str`` adds for a KeyError."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error) or type(error).__name__


def text_with_traceback(text: str, error: BaseException) -> str:
    """Return the text and the traceback of an unexpected error of a server, for `make_error`."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    return f"{text}{_TRACE}{frames}{type(error).__name__}: {error}"[: 1 << 16]


def make_error(name: str, text: str) -> Exception:
    """Return the exception that a message names, with the traceback of `text_with_traceback` as a note.

    It is a GanglineError if the name is not in `ERRORS`.
    """
    reason, _, trace = text.partition(_TRACE)
    error = ERRORS.get(name, GanglineError)(reason)
    if trace:
        error.add_note(f"{_TRACE[1:]}{trace}")
    return error


def refusal(call: str, error: BaseException) -> str:
    """Return the text of a rank that refuses a call, for the other ranks."""
    return f"{call} was refused: {error_text(error)}"


def refused(calls: Mapping[int, str], rank: int, size: int) -> str:
    """Return the error of all ranks if a rank, of ``size``, refuses a call.

    ``calls`` are those that ranks have made so far, by rank; of ranks that refuse theirs, the `refusal`.
    """
    others = [f"; rank {other} called {_short(calls[other])}" for other in calls if calls[other] != calls[rank]]
    return f"rank {rank} of {size}: {_short(calls[rank])}{''.join(others[:1])}; no tensor has changed"


def why_gone(why: str, error: str = "") -> str:
    """Return why a process is gone, for errors: ``why`` it has died, or the error because of which it has left."""
    return why or (f"ended with an error: {error}" if error else "has left the job")


def hint(*calls: str) -> str:
    """Return advice if one of the calls is often made on rank 0 alone; else ""."""
    found = any(_WRITES in call for call in calls)
    return f"; call {_WRITES} on every worker, not only on rank 0: it writes on rank 0 alone" if found else ""


def differing(calls: Mapping[int, str], size: int) -> str:
    """Return the error of all ranks if they make different calls; arguments as for `refused`."""
    first = min(calls)
    other = next(rank for rank in sorted(calls) if calls[rank] != calls[first])
    return (
        f"the workers' calls differ: rank {first} called {_short(calls[first])}, rank {other} called "
        f"{_short(calls[other])}; expected the same calls in the same order on all {size}"
        f"{hint(*calls.values())}; no tensor has changed"
    )


def _short(call: str) -> str:
    return call if len(call) <= _SHOWN else call[:_SHOWN] + " ..."
