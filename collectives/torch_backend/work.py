"""torch's `Work` around gangline's, returned by the calls on a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any
from weakref import ref

from torch import Tensor
from torch.distributed import Work as TorchWork
from torch.futures import Future, collect_all

from gangline.collectives.call_signature import COLLECTIVES
from gangline.collectives.eager import has_modes, run_eagerly
from gangline.collectives.engine import begun_work
from gangline.collectives.engine.engine import Engine
from gangline.collectives.errors import GanglineError, StallError
from gangline.collectives.torch_backend.c10d import end_range
from gangline.collectives.work import NoThreadError, Work, WorkQueue, nesting

_ABORT_SECONDS = 5.0  # for an aborted call to end; takes about 10 ms
_NO_LIMIT = timedelta(0)  # torch's value for "no timeout"


def tensors_in(value: object) -> Iterator[Tensor]:
    """Return the tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)


@run_eagerly
class GroupWork(TorchWork):
    """Handle of one call on a process group.

    Args:
        work: gangline's handle of the call.
        tensors: tensors that the call writes, in nested lists.
        limit: default timeout of `wait` in seconds; None: no timeout.
        give_up: function that ends the call on all ranks when ``limit``, given with the call, passes in a `wait`; None:
            the call continues.
    """

    def __init__(
        self,
        work: Work,
        tensors: Any,
        limit: float | None = None,
        give_up: Callable[[GanglineError], None] | None = None,
    ) -> None:
        super().__init__()
        self._work = work
        self._tensors = tensors
        self._limit = limit
        self._range: object = None  # of the profiler
        self._give_up = give_up
        self._lock = threading.Lock()
        self._is_over = False
        self._runner = 0  # id of the thread that runs the operation and the callbacks
        self._error: BaseException | None = None
        self._over: Future[None] | None = None  # created by `get_future`
        self._future: Future[list[Tensor]] | None = None

    def run(self, operation: Callable[[], object], refuse: Callable[[BaseException], None] | None = None) -> None:
        """Run the call's operation, then the callbacks of its future, in this thread; raise the operation's error.

        ``refuse`` is called with an error that is unknown to the other ranks.
        """
        self._runner = threading.get_ident()
        try:
            operation()
        except BaseException as error:
            if refuse is not None and not isinstance(error, GanglineError):
                refuse(error)
            self._end(error)
            raise
        finally:
            if self._range is not None:
                end_range(self._range)
        self._end(None)

    def profile(self, range_: object) -> None:
        """End a range of the profiler with the call."""
        self._range = range_

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait for the call and return True.

        Args:
            timeout: time limit; 0: the limit given with the call, if any.

        Raises:
            StallError: if the call is still running after the limit. It continues, unless the limit was given with the
                call: then all ranks get this error, and the group becomes unusable.
            Exception: if the call raised it.
        """
        if self._is_over and self._runner == threading.get_ident():  # in a callback, which runs after the operation
            if self._error is not None:
                raise self._error
            return True
        is_callers = timeout > _NO_LIMIT
        limit = timeout.total_seconds() if is_callers else self._limit
        queued = self._work.queued  # read once: the queue's thread sets it to None when it takes the call
        if limit is None and queued is not None and not has_modes():
            queued()
        try:
            self._work.wait(limit)
        except TimeoutError as error:
            if self._work.exception() is error:
                raise
            late = StallError(str(error))
            if self._give_up is not None and not is_callers:
                self._give_up(late)
                with suppress(Exception):
                    self._work.wait(_ABORT_SECONDS)  # until no rank reads the call's tensors
            raise late from None
        return True

    def synchronize(self) -> None:
        """Wait for the call."""
        self.wait()

    block_current_stream = synchronize  # CPU tensors have no stream

    def is_completed(self) -> bool:
        """Return whether the call is done, with or without an error."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return whether the call is done, without an error."""
        return self._work.is_completed() and self._work.exception() is None

    def exception(self) -> BaseException | None:
        """Return the call's exception; None while it runs or if it succeeded."""
        return self._work.exception()

    def result(self) -> list[Tensor]:
        """Return the tensors that the call writes."""
        return list(tensors_in(self._tensors))

    def source_rank(self) -> int:
        """Return the source rank of a finished receive; -1 for other calls."""
        return getattr(self._work, "source", -1)

    _source_rank = source_rank

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the tensors that the call writes.

        Callbacks chained with ``then`` run in the thread that ran the call, before any `wait` returns. The future's
        error is a RuntimeError with the class and text of the call's error.
        """
        with self._lock:
            if self._future is None:
                self._over = Future()
                # Future.set_exception stores the exception as a value that only the same Future object raises; chained
                # callbacks and DDP's reducer would treat it as a result. An exception raised in a callback is
                # propagated.
                self._future = self._over.then(self._outcome)
            is_over = self._is_over
        if is_over:
            self._complete_future()
        elif self._work.wake is not None:
            self._work.wake()
        return self._future

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._is_over = True
            self._error = error
            is_wanted = self._over is not None
        if is_wanted:
            self._complete_future()

    def _complete_future(self) -> None:
        with self._lock:
            over, self._over = self._over, None
        if over is not None:
            with nesting():
                over.set_result(None)

    def _outcome(self, _: Future[None]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self.result()


@run_eagerly
class MessageWork(GroupWork):
    """Handle of one send or receive, which needs a waiting thread only for its future."""

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of the tensor that is sent or received."""
        future = super().get_future()
        with self._lock:
            is_first, self._is_awaited = not self._is_awaited, True
        if is_first:
            self._begin_waiting()
        return future

    _is_awaited = False

    def _begin_waiting(self) -> None:
        threading.Thread(target=self._finish, name="gangline-future", daemon=True).start()

    def _finish(self) -> None:
        with suppress(Exception):  # the future holds it
            self.run(self._work.wait)


class _QuickWork(MessageWork):
    """Handle that is made without a Python function, which would take a tenth of a small call."""

    __init__ = TorchWork.__init__
    _work = Work.finished("call")
    _tensors: Any = ()
    _limit = _range = _give_up = _error = _over = _future = None
    _runner = 0
    _is_over = False
    _lock = threading.Lock()  # of futures that are created


@run_eagerly
class FinishedWork(_QuickWork):
    """Handle of a call that is over; a group keeps one, which refers weakly to the tensor of its last call."""

    _is_over = True

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:  # noqa: ARG002
        """Return True."""
        return True

    def result(self) -> list[Tensor]:
        """Return the tensors that the call has written."""
        tensors = self._tensors
        return list(tensors_in(tensors() if isinstance(tensors, ref) else tensors))

    get_future = GroupWork.get_future


@run_eagerly
class BegunWork(_QuickWork):
    """Handle of a collective that `Communicator.begin_number` has begun; only its future needs the queue's thread."""

    collective: int
    begun: tuple[Engine, int, int]
    """Arguments of `end_at_once`."""
    _queue: WorkQueue

    @cached_property
    def _work(self) -> Any:  # type: ignore[override]  # a call that is only awaited needs none
        return begun_work.BegunWork(COLLECTIVES[self.collective], *self.begun)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait for the call; see `GroupWork.wait`."""
        if self._is_awaited or (timeout is not _NO_LIMIT and timeout > _NO_LIMIT):
            return super().wait(timeout)
        try:
            is_over = begun_work.end_at_once(*self.begun)
        except BaseException as error:
            self._work.end(error)
            raise
        if not is_over:
            self._work.wait()
        return True

    def _begin_waiting(self) -> None:
        begun = self._work
        if not begun.is_completed():
            self._work = Work(begun._name)
            with suppress(NoThreadError):
                self._queue.submit(partial(self.run, begun.wait), self._work, keys=(), priority=0)
                return
        self._work = begun
        self._finish()


@run_eagerly
class CoalescedWork(GroupWork):
    """Handle of several calls, done when all calls are done."""

    def __init__(self, works: Sequence[GroupWork]) -> None:
        super().__init__(Work("coalesced calls"), [tensor for work in works for tensor in work.result()])
        self._works = works

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait for all calls and return True.

        Raises:
            StallError: if a call is still running after ``timeout``.
            Exception: if a call raised it.
        """
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether all calls are done."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Return whether all calls are done, without an error."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the exception of the first call that failed."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future of all their tensors."""

        def gathered(futures: Future[list[Future[list[Tensor]]]]) -> list[Tensor]:
            return [tensor for future in futures.value() for tensor in future.value()]

        return collect_all([work.get_future() for work in self._works]).then(gathered)
