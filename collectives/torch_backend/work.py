"""What a call on a torch process group returns: torch's `Work` around gangline's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch import Tensor
from torch.distributed import Work as TorchWork
from torch.futures import Future, collect_all

from gangline.collectives.errors import GanglineError, StallError
from gangline.collectives.work import Work

_NO_LIMIT = timedelta(0)  # torch's word for it


class GroupWork(TorchWork):
    """One call on a process group, over or not.

    Args:
        work: gangline's handle of it.
        tensors: those that it writes.
        limit: seconds that `wait` waits if its caller names none; None: as long as the call takes.
        source: the rank that a receive receives from.
        give_up: what ends the call on all ranks when ``limit``, which was said with the call, has passed in a `wait`;
            None: it goes on.
    """

    def __init__(
        self,
        work: Work,
        tensors: Sequence[Tensor],
        limit: float | None = None,
        source: int = -1,
        give_up: Callable[[GanglineError], None] | None = None,
    ) -> None:
        super().__init__()
        self._work = work
        self._tensors = tensors
        self._limit = limit
        self._source = source
        self._give_up = give_up
        self._lock = threading.Lock()
        self._is_over = False
        self._error: BaseException | None = None
        self._over: Future[None] | None = None  # one that somebody asked for
        self._future: Future[list[Tensor]] | None = None

    def run(self, operation: Callable[[], object]) -> None:
        """Run what the call does, then whatever was chained to its future, in this thread.

        Raises:
            Exception: whatever the operation raised.
        """
        try:
            operation()
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return True when the call is over.

        Args:
            timeout: how long to wait; 0: as long as was said with the call, if anything was.

        Raises:
            StallError: the call is still running after that. It goes on, unless the time was said with the call:
                then all ranks get this error, and the group can be used no more.
            Exception: whatever the call raised.
        """
        is_callers = timeout > _NO_LIMIT
        limit = timeout.total_seconds() if is_callers else self._limit
        try:
            self._work.wait(limit)
        except TimeoutError as error:
            if self._work.is_completed():
                raise
            late = StallError(str(error))
            if self._give_up is not None and not is_callers:
                self._give_up(late)
            raise late from None
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `wait`: what is on the host has no stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call is over, well or not."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether the call is over, and went well."""
        return self._work.is_completed() and self._work.exception() is None

    def exception(self) -> BaseException | None:
        """What the call raised, or None while it runs and after it went well."""
        return self._work.exception()

    def result(self) -> list[Tensor]:
        """The tensors that the call writes."""
        return list(self._tensors)

    def source_rank(self) -> int:
        """Of a receive: from which rank of the group; else -1."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[list[Tensor]]:
        """The tensors that the call writes, when it is over.

        What is chained to it with ``then`` runs in the thread that ran the call, before anybody's `wait` returns. Its
        error is a RuntimeError whose text holds the class and text of the call's own.
        """
        with self._lock:
            if self._future is None:
                self._over = Future()
                # torch's set_exception makes a value of an exception, which only the very same object raises again:
                # what is chained to it, and DDP's reducer, would take it for a result. What a callback raises is one.
                self._future = self._over.then(self._outcome)
            is_over = self._is_over
        if is_over:
            self._announce()
        return self._future

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._is_over = True
            self._error = error
            is_wanted = self._over is not None
        if is_wanted:
            self._announce()

    def _announce(self) -> None:
        with self._lock:
            over, self._over = self._over, None
        if over is not None:
            over.set_result(None)

    def _outcome(self, _: Future[None]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self.result()


class MessageWork(GroupWork):
    """One send or receive: it moves by itself, and only who asks for its future has a thread wait for it."""

    def get_future(self) -> Future[list[Tensor]]:
        """The tensor that was sent or received, when it is."""
        future = super().get_future()
        with self._lock:
            is_first, self._is_awaited = not self._is_awaited, True
        if is_first:
            threading.Thread(target=self._finish, name="gangline-future", daemon=True).start()
        return future

    _is_awaited = False

    def _finish(self) -> None:
        with suppress(Exception):  # it is the future's
            self.run(self._work.wait)


class CoalescedWork(GroupWork):
    """Several calls as one, over when all are."""

    def __init__(self, works: Sequence[GroupWork]) -> None:
        super().__init__(Work("coalesced calls"), [tensor for work in works for tensor in work.result()])
        self._works = works

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return True when all are over.

        Raises:
            StallError: one is still running after ``timeout``.
            Exception: whatever one raised.
        """
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all went well."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """What the first one raised that failed."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> Future[list[Tensor]]:
        """All their tensors, when all are over."""

        def gathered(futures: Future[list[Future[list[Tensor]]]]) -> list[Tensor]:
            return [tensor for future in futures.value() for tensor in future.value()]

        return collect_all([work.get_future() for work in self._works]).then(gathered)
