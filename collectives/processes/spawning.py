"""`spawn`: run a function in several processes of this machine, one per rank, connected by a communicator."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gangline.collectives.bootstrap.rendezvous import time_limit
from gangline.collectives.bootstrap.unix_store import LocalStore
from gangline.collectives.communicator import open_communicator
from gangline.collectives.errors import DeadNodeError
from gangline.collectives.limits import SPAWN_CAUSE_SECONDS
from gangline.collectives.liveness.process_state import identity_of
from gangline.collectives.processes import rank_main
from gangline.collectives.processes.function_call import (
    ErrorReport,
    check_count,
    check_not_importing,
    pack_call,
    preparation,
    program_is_file,
    unpack,
)
from gangline.collectives.processes.process_pool import ProcessPool
from gangline.collectives.processes.rank_main import RankTask

_REFUSAL = "the ranks cannot import {fn}; spawn needs a function defined by `def` at the top level of a module: {why}"


def spawn(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    transport: str | None = None,
    timeout: float | None = None,
    threads: int | None = None,
) -> list[Any]:
    """Call ``fn(comm, *args)`` in ``nprocs`` new processes and return the results in rank order.

    The first call of a program starts a fork server, which takes seconds to import torch; later calls take
    milliseconds. The ranks have this program's environment, working directory and output as of the call. They end when
    ``spawn`` returns or raises, and when this program ends for any reason; they ignore SIGINT, so that only this
    program handles Ctrl-C.

    ``fn`` and ``args`` are pickled: ``fn`` must be defined at the top level of a module. Each rank imports the
    program's script under the name ``__mp_main__``, so code that must run only in the parent, such as this call,
    belongs under ``if __name__ == "__main__":``.

    Args:
        fn: function to run; its first argument is the rank's `Communicator`, which is closed afterwards.
        nprocs: number of ranks.
        args: further arguments of ``fn``; each rank gets its own copy, also of tensors.
        transport: as in `connect`; None for the best.
        timeout: seconds that a rank waits for another one in a collective; None for the default.
        threads: number of torch threads in each rank; None to divide the cores between the ranks.

    Returns:
        The ranks' results, copied into this process.

    Raises:
        DeadNodeError: if a rank was killed or exited without a result; the text names it and the signal or exit code.
        StallError: if a rank did not reach a collective within the timeout.
        ValueError: if the ranks cannot import ``fn``, or an argument cannot be pickled.
        Exception: if ``fn`` raised; the same exception, with the rank and its traceback as a note. If several ranks
            failed, the cause: the first error, not the `DeadNodeError` of ranks that lost another one. Classes that are
            neither built in nor gangline's are replaced by their nearest base class that is.
    """
    with Ranks(fn, nprocs, args, transport=transport, timeout=timeout, threads=threads) as ranks:
        return ranks.results()


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one rank: a value or an error."""

    value: Any = None
    error: Exception | None = None
    report: ErrorReport | None = None
    """The rank's own report of the error; None if the rank ended without one."""


class Ranks:
    """Running ranks of one `spawn`, with access to each rank's outcome. Closing it kills them.

    Args and errors as for `spawn`; ``opener`` replaces `open_communicator`.
    """

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
        check_count("nprocs", nprocs)
        threads = max(1, len(os.sched_getaffinity(0)) // nprocs) if threads is None else threads
        check_count("threads", threads)
        check_not_importing("spawn was called while a rank imports the script", "as every rank imports the script")
        if not callable(fn):
            raise TypeError(f"spawn got {fn!r}; expected a function that takes a communicator")
        if getattr(fn, "__module__", None) == "__main__" and not program_is_file():
            raise ValueError(f"the ranks cannot import {fn!r}: this program is not a file; define it in a module")
        packed = pack_call("spawn", (opener,), fn, tuple(args), _REFUSAL, by_value=False)
        options = {"transport": transport or "auto", "timeout": timeout}
        limit = time_limit(timeout)
        self._size = nprocs
        self._outcomes: dict[int, Outcome] = {}
        self._ended: set[int] = set()
        self._store = LocalStore()
        """By which the ranks gather bytes before they are connected."""
        self._pool = ProcessPool(rank_main.run, nprocs)
        try:
            processes = [identity_of(pid) for pid in self._pool.pids]
            for rank, connection in enumerate(self._pool.connections):
                with suppress(BrokenPipeError, ConnectionResetError):  # was killed; its exit code is read later
                    connection.send(RankTask(rank, nprocs, threads, processes, limit, options, preparation()))
                    connection.send_bytes(packed)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in rank order."""
        return self._pool.pids

    def results(self) -> list[Any]:
        """Wait for all ranks and return their results in rank order; raise as soon as one fails, as `spawn`."""
        while len(self._ended) < self._size and not self._failed():
            self._process_events()
        if self._failed():
            raise self._cause()
        return [self._outcomes[rank].value for rank in range(self._size)]

    def outcomes(self) -> list[Outcome]:
        """Wait for all ranks and return their outcomes in rank order; a failure does not end the other ranks."""
        while len(self._ended) < self._size:
            self._process_events()
        return [self._outcomes[rank] for rank in range(self._size)]

    def close(self) -> None:
        """Kill all running ranks and wait for their exit."""
        self._pool.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _process_events(self, limit: float | None = None) -> bool:
        """Wait for messages and ends of ranks and process them; return False if there was none in ``limit`` seconds."""
        readable, ended = self._pool.wait(limit)
        for rank in readable:
            self._receive(rank)
        self._ended |= ended.keys()
        for rank, code in ended.items():
            while self._receive(rank):  # messages from before its exit
                pass
            if rank not in self._outcomes:
                self._outcomes[rank] = Outcome(error=DeadNodeError(f"rank {rank} of {self._size} {_exit_text(code)}"))
        return bool(readable or ended)

    def _receive(self, rank: int) -> bool:
        """Process one message from a rank; return False if there is none."""
        connection = self._pool.connections[rank]
        try:
            if connection.closed or not connection.poll():
                return False
            kind, value = connection.recv()
        except (EOFError, OSError):
            connection.close()
            return False
        if kind == "ask":
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.send(self._store.answer(value))
        elif kind == "returned":
            self._outcomes[rank] = Outcome(value=unpack(value))
        elif rank not in self._outcomes:  # the first error counts
            self._outcomes[rank] = Outcome(error=value.error(f"rank {rank} of {self._size}"), report=value)
        return True

    def _failed(self) -> dict[int, Outcome]:
        return {rank: outcome for rank, outcome in self._outcomes.items() if outcome.error is not None}

    def _cause(self) -> Exception:
        """Return the failure that caused the others, with the others as notes."""
        until = time.monotonic() + SPAWN_CAUSE_SECONDS
        while self._process_events(0.0):  # messages that are in the pipes already
            pass
        while all(_may_follow(outcome) for outcome in self._failed().values()) and len(self._ended) < self._size:
            left = until - time.monotonic()
            if left <= 0:
                break
            self._process_events(left)
        first, *others = sorted(self._failed(), key=lambda rank: _precedence(self._outcomes[rank]))
        cause = self._outcomes[first].error
        assert cause is not None
        for rank in others:
            error = self._outcomes[rank].error
            cause.add_note(f"rank {rank} failed too: {type(error).__name__}: {error}")
        return cause


def _may_follow(outcome: Outcome) -> bool:
    """Return whether another rank's failure may be the cause of this one."""
    return isinstance(outcome.error, DeadNodeError) and outcome.report is not None


def _precedence(outcome: Outcome) -> tuple[bool, float]:
    """Return the sort key of a failure, causes first: dead ranks, then by time, ranks that lost others last."""
    return _may_follow(outcome), 0.0 if outcome.report is None else outcome.report.when


def _exit_text(code: int | None) -> str:
    if code is None:
        return "was killed together with the fork server"
    if code >= 0:
        return f"exited with code {code} and without a result"
    known = -code in set(signal.Signals)
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"
