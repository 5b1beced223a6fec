"""Handles of asynchronous operations, and the queue that runs them in a background thread."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gangline.collectives.compiled_core import core
from gangline.collectives.eager import run_eagerly
from gangline.collectives.errors import nested_call
from gangline.collectives.timeline import recorder

_log = logging.getLogger("gangline")
_POLL_SECONDS, _POLLING_SECONDS = 0.0005, 0.02  # polling interval of a queue's thread; duration after a call
_BACKGROUND_YIELDS = 20  # in a wait of `gangline._core`: other threads of the process may compute
_thread = threading.local()


class NoThreadError(RuntimeError):
    """This process cannot start another thread; nothing has begun."""


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread.

    Raises:
        NoThreadError: if the process is at its limit of threads.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThreadError(
            f"process {os.getpid()} cannot start the thread {name}: {error}; expected room for it within the limits of "
            "threads: `ulimit -u`, and pids.max of the cgroup"
        ) from None
    return thread


class GuardedLock:
    """Lock that raises NestedCallError in the thread that holds it: a signal handler there would wait for ever."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler may run after it is acquired and before the next line
        self._owner = 0

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise nested_call("a call")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._owner = 0
        self._lock.release()


@run_eagerly
class Work:
    """Handle of an asynchronous operation. The operation's tensors must not be used before `wait` has returned."""

    forks = 0
    """Number of forks between the first process and this one."""

    def __init__(self, name: str, join: Callable[[], None] | None = None, result: Any = None) -> None:
        """Create the handle of a running operation; ``join`` orders the waiter's GPU streams after it, if any."""
        self.result = result
        """Result of the operation, valid after `wait`; None if it has none."""
        self._name = name
        self._join = join
        self._error: BaseException | None = None
        self._earlier: Work | None = None
        self._is_over = False
        self.queued: Callable[[], None] | None = None
        """Runs the operation in this thread, if no other one has begun it; None: that is not allowed."""
        self.wake: Callable[[], None] | None = None
        """Makes the queue's thread run the operation now, if nobody may call `queued` soon; None: it is awake."""
        self._forks = Work.forks
        self._running = threading.Lock()  # held until the operation is over
        self._running.acquire()

    @classmethod
    def finished(cls, name: str) -> Work:
        """Return the handle of an operation that has succeeded."""
        work = cls(name)
        work.complete()
        return work

    def fail_with(self, earlier: Work) -> Work:
        """Make this handle fail with the error of an earlier operation if that one fails; return this handle."""
        self._earlier = earlier
        return self

    def wait(self, timeout: float | None = None) -> None:
        """Return when the operation is over; on GPUs, when the current streams are ordered after it.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            TimeoutError: if the operation is still running after ``timeout``; it continues.
            RuntimeError: if called in a process that was forked while the operation ran.
            Exception: the error that the operation raised.
        """
        if not self._is_over:
            if self._forks != Work.forks:
                raise RuntimeError(
                    f"{self._name} was running when this process was forked from {os.getppid()}, where it ends: wait "
                    "for it there, or start the child with multiprocessing's 'spawn' or 'forkserver' method"
                )
            waiting = recorder.current.span(f"wait for {self._name}") if recorder.current is not None else nullcontext()
            with waiting:
                self._wait_until_over(timeout)
        if self._join is not None:
            self._join()
        error = self.exception()
        if error is not None:
            raise error

    def _wait_until_over(self, timeout: float | None) -> None:
        if not self._running.acquire(timeout=-1 if timeout is None else max(timeout, 0)):
            raise TimeoutError(f"{self._name} is still running after {timeout} s")
        self._running.release()

    def is_completed(self) -> bool:
        """Return whether the operation is over, with or without an error."""
        return self._is_over

    def exception(self) -> BaseException | None:
        """Return the error that the operation raised, or None if it is running or has succeeded."""
        return (self._earlier and self._earlier.exception()) or self._error

    def complete(self, error: BaseException | None = None) -> None:
        """Mark the operation as over, with or without an error; for operations that no queue runs."""
        self._error = error
        self._is_over = True
        self._running.release()

    def __repr__(self) -> str:
        state = "running" if not self._is_over else "failed" if self._error else "done"
        return f"<Work {self._name}: {state}>"


@dataclass(eq=False)
class _QueuedCall:
    operation: Callable[[], None]
    work: Work
    keys: tuple[Hashable, ...]
    order: tuple[int, int]  # (-priority, sequence): the smallest runs first
    blockers: int = 0
    followers: list[_QueuedCall] = field(default_factory=list)

    def __lt__(self, other: _QueuedCall) -> bool:
        return self.order < other.order


class WorkQueue:
    """Queue that runs operations one at a time.

    Operations with a common key run in the order of submission. Among the others, those of larger priority run first.
    The first `submit` starts a background thread. A call from inside an operation runs at once if the operation is in
    `nesting`; else it is by a signal handler or a finalizer, and raises NestedCallError.
    """

    def __init__(self, *, in_order: bool = False, counter: memoryview | None = None) -> None:
        """Create a queue.

        Args:
            in_order: all operations run in the order of submission, whatever their keys.
            counter: memory of one int64 for the number of unfinished operations.
        """
        self._in_order = in_order
        self.counter = memoryview(bytearray(8)).cast("q") if counter is None else counter
        self._closed = False
        self._set_up()
        _queues.add(self)

    def _set_up(self) -> None:
        self._running = threading.RLock()  # held by the thread that runs an operation
        self.runner = 0  # id of that thread
        self._waiters: set[int] = set()  # ids of threads in `run`
        self._changed = threading.Condition()
        self._ready: list[_QueuedCall] = []
        self._last: dict[Hashable, _QueuedCall] = {}
        self.counter[0] = 0
        self._sequence = itertools.count()
        self._thread: threading.Thread | None = None
        self._polls = False  # whether the thread polls for calls
        self._polls_until = 0.0

    @property
    def unfinished(self) -> int:
        """Number of submitted operations that are not over."""
        return self.counter[0]

    def run(self, operation: Callable[[], None], work: Work, keys: Iterable[Hashable], priority: int) -> None:
        """Run an operation after all earlier operations with one of its keys, and return when it is over.

        Raises:
            Exception: the error that the operation raised.
            RuntimeError: if the queue is closed.
        """
        if self._is_inside(work._name) or not self.unfinished:
            self._execute(operation, work, refuse_closed=True)
            work.wait()
            return
        self.submit(operation, work, keys, priority)
        thread = threading.get_ident()
        self._waiters.add(thread)
        try:
            work.wait()
        finally:
            self._waiters.discard(thread)

    def run_now(self, operation: Callable[[], object], name: str) -> bool:
        """Run an operation if no submitted one is unfinished, or inside another operation; return False otherwise.

        Raises:
            Exception: the error that the operation raised.
            RuntimeError: if the queue is closed.
        """
        thread = threading.get_ident()
        if self.runner == thread:
            self.check_outermost(name)
            with nesting(False):
                operation()
            return True
        if self.counter[0]:
            return False
        with self._running:
            if self._closed:
                self._check_open(name)
            self.runner = thread
            try:
                operation()
            finally:
                self.runner = 0
        return True

    def submit(
        self,
        operation: Callable[[], None],
        work: Work,
        keys: Iterable[Hashable],
        priority: int,
        *,
        by_waiter: bool = False,
    ) -> None:
        """Run an operation in the queue's thread; if called from inside another operation, run it at once.

        With ``by_waiter``, `Work.queued` runs it in the thread that calls it, if it is ready and has not begun. Waking
        the queue's thread costs more than a small collective, so after such a call the thread polls for the next one.

        Raises:
            RuntimeError: if the queue is closed.
        """
        if self._is_inside(work._name):
            self._execute(operation, work)
            return
        if recorder.current is not None:
            operation = _recorded(operation, work)
        if self._in_order:
            keys, priority = (self,), 0
        with self._changed:
            self._check_open(work._name)
            if self._thread is None:
                gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
                self._thread = start_thread(partial(self._serve, gpu), "gangline-work")
            call = _QueuedCall(operation, work, tuple(dict.fromkeys(keys)), (-priority, next(self._sequence)))
            before = {id(last): last for key in call.keys if (last := self._last.get(key)) is not None}
            for one in before.values():
                one.followers.append(call)
                call.blockers += 1
            self._last.update(dict.fromkeys(call.keys, call))
            self.counter[0] += 1
            if not call.blockers:
                heapq.heappush(self._ready, call)
            if by_waiter:
                work.queued, work.wake = partial(self._run_by_waiter, call), self._wake
                self._polls_until = time.monotonic() + _POLLING_SECONDS
            if not (by_waiter and self._polls):
                self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def is_running_here(self) -> bool:
        """Return whether this thread runs an operation now."""
        return self.runner == threading.get_ident()

    def check_outermost(self, name: str) -> None:
        """Raise NestedCallError if this thread runs an operation that is not in `nesting`, or waits in `run`."""
        if not (self.runner or self._waiters):
            return
        thread = threading.get_ident()
        is_inside = self.runner == thread and not getattr(_thread, "may_nest", False)
        if is_inside or thread in self._waiters:
            raise nested_call(name)

    def _is_inside(self, name: str) -> bool:
        """Return whether this thread runs an operation now, such as an updater that calls its store."""
        self.check_outermost(name)
        return self.runner == threading.get_ident()

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise RuntimeError(f"{name} was called after close(): its store or communicator is closed")

    def _execute(self, operation: Callable[[], None], work: Work, *, refuse_closed: bool = False) -> None:
        is_outermost = not self.is_running_here()
        with self._running if is_outermost else nesting(False):
            if is_outermost:
                if refuse_closed:
                    self._check_open(work._name)
                self.runner = threading.get_ident()
            try:
                operation()
            except BaseException as error:  # noqa: BLE001  `wait` raises it
                work.complete(error)
            else:
                work.complete()
            finally:
                if is_outermost:
                    self.runner = 0

    def close(self) -> None:
        """Finish all submitted operations and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self.is_running_here() or self._thread is threading.current_thread():  # in the latter by garbage collection
            return
        if self._thread is not None:
            self._thread.join()
        with self._running:  # wait for an operation that another thread runs inline
            pass

    def _run_by_waiter(self, call: _QueuedCall) -> None:
        self.check_outermost(call.work._name)
        call.work.queued = None
        with self._changed:
            if call not in self._ready or self.is_running_here():
                return
            self._ready.remove(call)
            heapq.heapify(self._ready)
        self._execute(call.operation, call.work)
        self._finish(call)

    def _serve(self, gpu: int | None) -> None:
        _thread.is_background = True
        if core is not None:
            core.yield_at_most(_BACKGROUND_YIELDS)
        if gpu is not None:  # a thread begins on GPU 0, where leaving another GPU's stream would take memory
            torch.cuda.set_device(gpu)
        while True:
            with self._changed:
                while not self._ready:
                    if self._closed and not self.unfinished:
                        return
                    self._polls = time.monotonic() < self._polls_until
                    self._changed.wait(_POLL_SECONDS if self._polls else None)
                call = heapq.heappop(self._ready)
            call.work.queued = None
            self._execute(call.operation, call.work)
            if call.work.exception() is not None:  # logged, because `wait` may never be called
                _log.error("%r", call.work, exc_info=call.work.exception())
            self._finish(call)
            del call  # a waiting thread must not hold the last operation's tensors

    def _finish(self, call: _QueuedCall) -> None:
        with self._changed:
            self.counter[0] -= 1
            for key in call.keys:
                if self._last.get(key) is call:
                    del self._last[key]
            for follower in call.followers:
                follower.blockers -= 1
                if not follower.blockers:
                    heapq.heappush(self._ready, follower)
            if self._ready or self._closed:
                self._changed.notify_all()


@contextmanager
def nesting(may_nest: bool = True) -> Iterator[None]:
    """Allow the code in this context, which an operation calls, to call the operation's queue."""
    before = getattr(_thread, "may_nest", False)
    _thread.may_nest = may_nest
    try:
        yield
    finally:
        _thread.may_nest = before


def _recorded(operation: Callable[[], None], work: Work) -> Callable[[], None]:
    """Return an operation that records how long it was queued."""
    timeline, submitted = recorder.current, time.monotonic_ns()
    assert timeline is not None

    def recorded() -> None:
        timeline.add_overlapping(f"queue {work._name}", submitted)
        operation()

    return recorded


def _start_in_child() -> None:
    """Empty the queues of a forked process, which has none of their threads."""
    Work.forks += 1
    for queue in list(_queues):
        queue._set_up()


_queues: weakref.WeakSet[WorkQueue] = weakref.WeakSet()
os.register_at_fork(after_in_child=_start_in_child)


def is_in_background() -> bool:
    """Return whether this is the thread of a `WorkQueue`; other threads of the process may then compute."""
    return getattr(_thread, "is_background", False)
