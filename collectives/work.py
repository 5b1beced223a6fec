"""Work that goes on while its caller does something else: the handle, and the queue that runs it."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

_log = logging.getLogger("gangline")


class Work:
    """A running or finished operation; its tensors belong to it until `wait` returns."""

    def __init__(self, name: str, join: Callable[[], None] = lambda: None, result: Any = None) -> None:
        """Name the operation; ``join`` orders the waiter's GPU streams behind it."""
        self.result = result
        """Where the operation puts what it gives, to be read after `wait`; None for one that gives nothing."""
        self._name = name
        self._join = join
        self._error: BaseException | None = None
        self._is_over = False
        self._running = threading.Lock()  # held until it is over: who waits waits for that
        self._running.acquire()

    @classmethod
    def finished(cls, name: str) -> Work:
        """The handle of an operation that is over."""
        work = cls(name)
        work.complete()
        return work

    def wait(self, timeout: float | None = None) -> None:
        """Return when the operation is done; on GPUs, when the current streams are ordered behind it.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            TimeoutError: still running after ``timeout``; the operation goes on.
            Exception: whatever the operation raised.
        """
        if not self._is_over:
            if not self._running.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
                raise TimeoutError(f"{self._name} is still running after {timeout} s")
            self._running.release()
        self._join()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether the operation is over, well or not."""
        return self._is_over

    def exception(self) -> BaseException | None:
        """What the operation raised, or None while it runs and after it went well."""
        return self._error

    def complete(self, error: BaseException | None = None) -> None:
        """End an operation that no queue runs: well, or by an error."""
        self._error = error
        self._is_over = True
        self._running.release()

    def _run(self, operation: Callable[[], None]) -> None:
        try:
            operation()
        except BaseException as error:  # noqa: BLE001  whatever it is, it belongs to the waiter
            self.complete(error)
        else:
            self.complete()

    def __repr__(self) -> str:
        state = "running" if not self._is_over else "failed" if self._error else "done"
        return f"<Work {self._name}: {state}>"


@dataclass(eq=False)
class _QueuedCall:
    operation: Callable[[], None]
    work: Work
    keys: tuple[Hashable, ...]
    order: tuple[int, int]  # (-priority, sequence): the smallest goes first
    blockers: int = 0
    followers: list[_QueuedCall] = field(default_factory=list)

    def __lt__(self, other: _QueuedCall) -> bool:
        return self.order < other.order


class WorkQueue:
    """Runs operations one at a time.

    Operations that share a key run in the order they were given; among the others the larger priority
    goes first. A thread is started by the first operation that is not waited for.
    """

    def __init__(self) -> None:
        self._running = threading.Lock()  # held while an operation runs, by whichever thread runs it
        self._runner = 0  # that thread
        self._changed = threading.Condition()
        self._ready: list[_QueuedCall] = []
        self._last: dict[Hashable, _QueuedCall] = {}
        self._unfinished = 0
        self._sequence = itertools.count()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, operation: Callable[[], None], work: Work, keys: Iterable[Hashable], priority: int) -> None:
        """Run the operation and return when it is done, behind all that was submitted for its keys.

        Raises:
            Exception: whatever the operation raised.
            RuntimeError: the queue is closed.
        """
        if self._unfinished and not self._is_inside():
            self.submit(operation, work, keys, priority)
        else:
            self._execute(operation, work, refuse_closed=True)
        work.wait()

    def submit(self, operation: Callable[[], None], work: Work, keys: Iterable[Hashable], priority: int) -> None:
        """Have the operation run in the queue's thread; inside another operation, at once.

        Raises:
            RuntimeError: the queue is closed.
        """
        if self._is_inside():
            self._execute(operation, work)
            return
        with self._changed:
            self._check_open(work)
            job = _QueuedCall(operation, work, tuple(dict.fromkeys(keys)), (-priority, next(self._sequence)))
            before = {id(last): last for key in job.keys if (last := self._last.get(key)) is not None}
            for one in before.values():
                one.followers.append(job)
                job.blockers += 1
            self._last.update(dict.fromkeys(job.keys, job))
            self._unfinished += 1
            if not job.blockers:
                heapq.heappush(self._ready, job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="gangline-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def is_idle(self) -> bool:
        """Whether all that was submitted is done."""
        return not self._unfinished

    def _is_inside(self) -> bool:
        """Whether this thread runs an operation now: an updater, say, that calls its store."""
        return self._runner == threading.get_ident()

    def _check_open(self, work: Work) -> None:
        if self._closed:
            raise RuntimeError(f"{work._name} came after close(); what does it is closed")

    def _execute(self, operation: Callable[[], None], work: Work, *, refuse_closed: bool = False) -> None:
        if self._is_inside():
            work._run(operation)
            return
        with self._running:
            if refuse_closed:
                self._check_open(work)
            self._runner = threading.get_ident()
            try:
                work._run(operation)
            finally:
                self._runner = 0

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._is_inside():
            return
        if self._thread is not None:
            self._thread.join()
        with self._running:  # what another thread runs inline
            pass

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._ready:
                    if self._closed and not self._unfinished:
                        return
                    self._changed.wait()
                job = heapq.heappop(self._ready)
            self._execute(job.operation, job.work)
            if job.work.exception() is not None:  # nobody may ever wait for it
                _log.error("%r", job.work, exc_info=job.work.exception())
            self._finish(job)
            del job  # or this thread would hold the last operation's tensors while it waits

    def _finish(self, job: _QueuedCall) -> None:
        with self._changed:
            self._unfinished -= 1
            for key in job.keys:
                if self._last.get(key) is job:
                    del self._last[key]
            for follower in job.followers:
                follower.blockers -= 1
                if not follower.blockers:
                    heapq.heappush(self._ready, follower)
