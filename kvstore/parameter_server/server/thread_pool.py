"""Threads of a server that sum and update shards while its main thread talks to workers."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from gangline.kvstore.group.remote_errors import text_with_traceback
from gangline.kvstore.placement import place

_log = logging.getLogger("gangline")
_INLINE = 1 << 18
"""Bytes up to which work runs in the main thread, since handing it over would take longer."""


class ThreadPool:
    """Threads, one per core, each with its own queue: work of the same thread runs in order and never concurrently."""

    def __init__(self) -> None:
        self.size = len(os.sched_getaffinity(0))
        """Number of threads."""
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when work has completed or `notify` was called."""
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._threads: list[threading.Thread] = []
        self._completed: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running = [0] * self.size
        self._scratch = [torch.empty(0, dtype=torch.uint8, device="cpu")] * self.size
        self.loads = [0] * self.size
        """Bytes of the shards of each thread."""

    def assign(self, nbytes: int) -> int:
        """Assign a new shard of this many bytes to the thread with the fewest, which is returned."""
        return place([nbytes], [1] * self.size, self.loads)[0]

    def scratch(self, thread: int, nbytes: int) -> Tensor:
        """Return uint8 memory that work of a thread may use; the same each time, so it is likely in the CPU caches."""
        if self._scratch[thread].nbytes < nbytes:
            self._scratch[thread] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return self._scratch[thread][:nbytes]

    def run(self, thread: int, nbytes: int, work: Callable[[], None], then: Callable[[str], None]) -> None:
        """Run work in a thread, then call ``then`` in the main thread with the error text ("": success).

        Work that touches few bytes runs immediately in the main thread; else `run_callbacks` calls ``then``.
        """
        if nbytes <= _INLINE and not self._running[thread]:
            then(_problem_of(work))
            return
        self._start()
        self._running[thread] += 1

        def job() -> None:
            problem = _problem_of(work)

            def callback() -> None:
                self._running[thread] -= 1
                then(problem)

            self._completed.put(callback)
            self.notify()

        self._queues[thread].put(job)

    def run_callbacks(self) -> None:
        """Call the callbacks of completed work and reset the eventfd; never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event_fd)
        while True:
            try:
                callback = self._completed.get_nowait()
            except queue.Empty:
                return
            callback()

    def drain(self) -> None:
        """Wait until all work has completed and its callbacks have run."""
        while any(self._running):
            self._completed.get()()

    def notify(self) -> None:
        """Make the eventfd readable; any thread may call it."""
        if self.event_fd >= 0:
            os.eventfd_write(self.event_fd, 1)

    def close(self) -> None:
        """End the threads."""
        for one in self._queues:
            one.put(None)
        for thread in self._threads:
            thread.join()
        event_fd, self.event_fd = self.event_fd, -1
        os.close(event_fd)

    def _start(self) -> None:
        for index in range(self.size if not self._threads else 0):
            self._queues.append(queue.SimpleQueue())
            thread = threading.Thread(target=self._work, args=(index,), name=f"gangline-shards-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self, index: int) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)  # per thread
        while (job := self._queues[index].get()) is not None:
            job()
            del job


def _problem_of(work: Callable[[], None]) -> str:
    try:
        work()
    except Exception as error:  # noqa: BLE001  sent to the workers of the round
        _log.warning("work on a shard failed", exc_info=error)
        return text_with_traceback(f"{type(error).__name__}: {error}", error)
    return ""
