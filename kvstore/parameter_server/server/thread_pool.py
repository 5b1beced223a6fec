"""The threads of a server that add and update, while its own thread talks with workers."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable

import torch
from torch import Tensor

_log = logging.getLogger("gangline")
_INLINE = 1 << 18
"""Bytes up to which a thread costs more than it brings."""


class ThreadPool:
    """A thread a core, each a lane of its own: what belongs to a lane runs in order, and never at the same time."""

    def __init__(self) -> None:
        self.lanes = len(os.sched_getaffinity(0))
        """How many there are."""
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """A descriptor that can be read when something is done, or somebody rang."""
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._under_way = [0] * self.lanes
        self._outstanding = 0
        self._scratch = [torch.empty(0, dtype=torch.uint8)] * self.lanes

    def lane_of(self, number: int) -> int:
        """The lane of a part."""
        return number % self.lanes

    def scratch(self, lane: int, nbytes: int) -> Tensor:
        """Memory for work of a lane, until its next work: the same again, which the caches still hold."""
        if self._scratch[lane].nbytes < nbytes:
            self._scratch[lane] = torch.empty(nbytes, dtype=torch.uint8)
        return self._scratch[lane][:nbytes]

    def run(self, lane: int, nbytes: int, work: Callable[[], None], then: Callable[[str], None]) -> None:
        """Do some work, and call ``then`` in the owner's thread with what went wrong ("": nothing).

        Args:
            lane: in which.
            nbytes: how much it touches.
            work: called in the lane's thread, or here and now where it is small.
            then: called by `finish`, or here and now.
        """
        if nbytes <= _INLINE and not self._under_way[lane]:
            then(_problem_of(work))
            return
        self._start()
        self._under_way[lane] += 1
        self._outstanding += 1

        def job() -> None:
            problem = _problem_of(work)

            def follow() -> None:
                self._under_way[lane] -= 1
                self._outstanding -= 1
                then(problem)

            self._done.put(follow)
            self.ring()

        self._queues[lane].put(job)

    def finish(self) -> None:
        """Call what follows work that is done, when the bell has rung; never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        while True:
            try:
                then = self._done.get_nowait()
            except queue.Empty:
                return
            then()

    def drain(self) -> None:
        """Return when all work is done and what follows it is called."""
        while self._outstanding:
            self._done.get()()

    def ring(self) -> None:
        """Have the owner's poll return; any thread may call it."""
        if self.bell >= 0:
            os.eventfd_write(self.bell, 1)

    def close(self) -> None:
        """End the threads."""
        for one in self._queues:
            one.put(None)
        for thread in self._threads:
            thread.join()
        bell, self.bell = self.bell, -1
        os.close(bell)

    def _start(self) -> None:
        for lane in range(self.lanes if not self._threads else 0):
            self._queues.append(queue.SimpleQueue())
            thread = threading.Thread(target=self._work, args=(lane,), name=f"gangline-lane-{lane}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self, lane: int) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)  # of this thread
        while (job := self._queues[lane].get()) is not None:
            job()
            del job


def _problem_of(work: Callable[[], None]) -> str:
    try:
        work()
    except Exception as error:  # noqa: BLE001  the round's workers are told, the server lives on
        _log.debug("work failed", exc_info=error)
        return f"{type(error).__name__}: {error}"
    return ""
