"""`spawn`: a function in several processes of this machine, one a rank, joined by a communicator."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.spawn import get_preparation_data
from types import TracebackType
from typing import Any

from gangline.collectives.bootstrap.rendezvous import time_limit
from gangline.collectives.communicator import open_communicator
from gangline.collectives.errors import DeadNodeError, StallError, name_ranks
from gangline.collectives.processes import rank_main
from gangline.collectives.processes.process_pool import ProcessPool
from gangline.collectives.processes.rank_main import RankReport, RankTask

_GRACE = 2.0
"""Seconds in which it comes out how a rank ended that another one has missed."""


def spawn(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    transport: str | None = None,
    timeout: float | None = None,
    threads: int | None = None,
) -> list[Any]:
    """Call ``fn(comm, *args)`` in ``nprocs`` new processes and give what each returned, in rank order.

    The first call of a program starts a fork server and waits seconds for it to import torch; later calls take
    milliseconds. The ranks have this program's environment, working directory and output as they are at the call. They
    end when ``spawn`` returns or raises, and when this program ends, however it ends.

    ``fn`` and ``args`` are pickled: ``fn`` is found in the ranks by its module and name, so it must stand at the top
    level of a module. Each rank imports the program's own script again, under the name ``__mp_main__``: what the first
    process alone shall do, such as this call, belongs under ``if __name__ == "__main__":``.

    Args:
        fn: what to run; gets the rank's `Communicator`, which is closed after it.
        nprocs: how many ranks.
        args: further arguments; each rank gets a copy of its own, of tensors too.
        transport: as in `connect`; None for the best.
        timeout: seconds that a rank waits for another one in a collective; None for the default.
        threads: torch's threads in each rank; None to share out the cores.

    Returns:
        The ranks' results, copied into this process.

    Raises:
        DeadNodeError: a rank was killed, or left without a result; the message names it and the signal or exit code.
        StallError: a rank did not come to a collective in time.
        ValueError: the ranks cannot find ``fn``, or an argument cannot be pickled.
        Exception: what ``fn`` raised, with the rank and its traceback as a note. If several ranks failed, the cause:
            the error that came first, not the `DeadNodeError` of those who lost that rank. The class is the same if it
            is Python's or gangline's, else its nearest base class that is.
    """
    with Ranks(fn, nprocs, args, transport=transport, timeout=timeout, threads=threads) as ranks:
        return ranks.results()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rank ended: with a value, or with an error."""

    value: Any = None
    error: Exception | None = None
    report: RankReport | None = None
    """What the rank itself said of the error; None if it could not say anything any more."""


class Ranks:
    """The ranks of one `spawn`, for who wants to see each of them end; closing it ends them."""

    def __init__(
        self,
        fn: Callable[..., Any],
        nprocs: int,
        args: Sequence[Any] = (),
        *,
        transport: str | None = None,
        timeout: float | None = None,
        threads: int | None = None,
        opener: Callable[..., Any] = open_communicator,
    ) -> None:
        """Start the ranks; arguments and errors are those of `spawn`, ``opener`` stands in for `open_communicator`."""
        _check_count("nprocs", nprocs)
        threads = max(1, len(os.sched_getaffinity(0)) // nprocs) if threads is None else threads
        _check_count("threads", threads)
        if rank_main.importing_script:
            raise RuntimeError(
                f"spawn was called while a rank imports the script {sys.argv[0]!r}; call it under "
                '`if __name__ == "__main__":`, for every rank imports the script'
            )
        packed = _pack(opener, fn, tuple(args))
        options = {"transport": transport or "auto", "timeout": timeout}
        preparation = _preparation()
        self._size = nprocs
        self._outcomes: dict[int, Outcome] = {}
        self._ended: set[int] = set()
        self._hub = _Hub(nprocs, time_limit(timeout))
        self._pool = ProcessPool(rank_main.run, nprocs)
        try:
            for rank, connection in enumerate(self._pool.connections):
                with suppress(BrokenPipeError, ConnectionResetError):  # killed already: its exit code says so
                    connection.send(RankTask(rank, nprocs, threads, options, preparation))
                    connection.send_bytes(packed)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks' process ids."""
        return self._pool.pids

    def results(self) -> list[Any]:
        """What each rank returned, in rank order, when all have ended; raises as soon as one has failed, as `spawn`."""
        while len(self._ended) < self._size and not self._failed():
            self._listen()
        if self._failed():
            raise self._cause()
        return [self._outcomes[rank].value for rank in range(self._size)]

    def outcomes(self) -> list[Outcome]:
        """How each rank ended, in rank order, when all have: none is ended because another one failed."""
        while len(self._ended) < self._size:
            self._listen()
        return [self._outcomes[rank] for rank in range(self._size)]

    def close(self) -> None:
        """End the ranks that still run, and return when none is left."""
        self._pool.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _listen(self, limit: float | None = None) -> bool:
        """Hear what ranks say and see them end; False if nothing came within ``limit`` seconds."""
        waits = [seconds for seconds in (limit, self._hub.seconds_left()) if seconds is not None]
        speaking, ended = self._pool.wait(min(waits, default=None))
        for rank in speaking:
            self._hear(rank)
        self._ended |= ended.keys()
        for rank, code in ended.items():
            while self._hear(rank):  # its last words, sent before it ended
                pass
            if rank not in self._outcomes:
                self._outcomes[rank] = Outcome(error=DeadNodeError(f"rank {rank} of {self._size} {_how(code)}"))
        causes = {rank for rank, outcome in self._outcomes.items() if not _may_follow(outcome)}
        for rank, answer in self._hub.answers(self._outcomes.keys(), causes):
            with suppress(BrokenPipeError, ConnectionResetError):
                self._pool.connections[rank].send(answer)
        return bool(speaking or ended)

    def _hear(self, rank: int) -> bool:
        """Take one message of a rank; False if there is none, or no more."""
        connection = self._pool.connections[rank]
        try:
            if connection.closed or not connection.poll():
                return False
            word, what = connection.recv()
        except (EOFError, OSError):
            connection.close()
            return False
        if word == "exchange":
            self._hub.bring(rank, what)
        elif word == "returned":
            self._outcomes[rank] = Outcome(value=rank_main.unpack(what))
        elif rank not in self._outcomes:  # the first word counts
            error = what.error()
            error.add_note(f"raised by rank {rank} of {self._size}:\n{what.trace}")
            self._outcomes[rank] = Outcome(error=error, report=what)
        return True

    def _failed(self) -> dict[int, Outcome]:
        return {rank: outcome for rank, outcome in self._outcomes.items() if outcome.error is not None}

    def _cause(self) -> Exception:
        """The failure that the others come from, with these as notes."""
        until = time.monotonic() + _GRACE
        while self._listen(0.0):  # what ranks have said before is in their pipes already
            pass
        while all(_may_follow(outcome) for outcome in self._failed().values()) and len(self._ended) < self._size:
            left = until - time.monotonic()
            if left <= 0:
                break
            self._listen(left)
        first, *others = sorted(self._failed(), key=lambda rank: _precedence(self._outcomes[rank]))
        cause = self._outcomes[first].error
        assert cause is not None
        for rank in others:
            error = self._outcomes[rank].error
            cause.add_note(f"rank {rank} failed too: {type(error).__name__}: {error}")
        return cause


class _Hub:
    """`Exchange` for the ranks of a `spawn`: they bring their bytes here, and all get all of them."""

    def __init__(self, size: int, timeout: float) -> None:
        self._size = size
        self._timeout = timeout
        self._ends: float | None = None
        self._brought: dict[int, bytes] = {}

    def bring(self, rank: int, blob: bytes) -> None:
        self._brought[rank] = blob
        if self._ends is None:
            self._ends = time.monotonic() + self._timeout

    def seconds_left(self) -> float | None:
        """Until the round is given up; None between rounds."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    def answers(self, ended: Set[int], causes: Set[int]) -> list[tuple[int, tuple[RankReport | None, list[bytes]]]]:
        """What to tell whom: nothing while ranks are missing that may still come; ``causes`` ended by themselves."""
        if self._ends is None:
            return []
        missing = set(range(self._size)) - self._brought.keys()
        lost = missing & ended
        trouble: RankReport | None = None
        if lost:
            text = f"{name_ranks(lost & causes or lost)} of {self._size} ended before all had met"
            trouble = RankReport.of(DeadNodeError(text))
        elif missing and self.seconds_left() == 0.0:
            text = f"{name_ranks(missing)} of {self._size} did not come within {self._timeout:g} s to where all meet"
            trouble = RankReport.of(StallError(text))
        elif missing:
            return []
        blobs = [self._brought[rank] for rank in range(self._size)] if trouble is None else []
        answers = [(rank, (trouble, blobs)) for rank in self._brought]
        self._brought, self._ends = {}, None
        return answers


def _may_follow(outcome: Outcome) -> bool:
    """Whether the failure may come from another rank's."""
    return isinstance(outcome.error, DeadNodeError) and outcome.report is not None


def _precedence(outcome: Outcome) -> tuple[bool, float]:
    """Orders failures from cause to consequence: the dead, then by time, those who miss others last."""
    return _may_follow(outcome), 0.0 if outcome.report is None else outcome.report.when


def _how(code: int | None) -> str:
    if code is None:
        return "was killed together with the fork server"
    if code >= 0:
        return f"left with exit code {code} and without a result"
    known = -code in set(signal.Signals)
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected an int")
    if value < 1:
        raise ValueError(f"{name} is {value}; expected at least 1")


def _pack(opener: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if not callable(fn):
        raise TypeError(f"spawn got {fn!r}; expected a function that takes a communicator")
    if getattr(fn, "__module__", None) == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(f"the ranks cannot find {fn!r}: this program is no file; define it in a module")
    try:
        return rank_main.pack((opener, fn, args))
    except Exception as error:
        for index, value in enumerate((fn, *args)):
            _check_picklable(index, value)
        raise ValueError(f"what spawn got cannot be pickled: {error}") from error


def _check_picklable(index: int, value: Any) -> None:
    try:
        rank_main.pack(value)
    except Exception as error:
        if index == 0:
            raise ValueError(
                f"the ranks cannot find {value!r}; spawn needs a function defined by `def` at the top level of a "
                f"module ({error})"
            ) from error
        raise ValueError(
            f"argument {index} of spawn, of type {type(value).__name__}, cannot be pickled: {error}"
        ) from error


def _preparation() -> dict[str, Any]:
    preparation = get_preparation_data("rank")
    preparation["authkey"] = bytes(preparation["authkey"])  # by itself it refuses to be pickled
    return {**preparation, "dir": os.getcwd()}
