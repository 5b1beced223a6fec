"""Persistent threads for host work that synchronises once, at its end.

torch's own threads synchronise at a barrier after every operation. If other work competes for the cores, each barrier
may cost a scheduler time slice, and the data that one operation leaves in a core's cache is evicted before the next one
reads it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch


class ProcessLock:
    """Lock of a module, a new one in a forked process: threads of its parent may have held it."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self.locked = self._lock.locked

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_lock = ProcessLock()


def run(calls: Sequence[Callable[[], None]]) -> None:
    """Run the calls concurrently, each in a thread without nested torch threads; a single call runs in the caller's.

    Raises:
        Exception: the first one that a call raised, after all have ended.
    """
    if len(calls) == 1:
        calls[0]()
        return
    pool = _pool(len(calls))
    futures = [pool.submit(call) for call in calls]
    errors = [future.exception() for future in futures]  # waits for all
    for error in errors:
        if error is not None:
            raise error


def share(call: Callable[[], None], threads: int) -> None:
    """Run a call in ``threads`` threads at once, this one included; the call itself divides its work.

    Raises:
        Exception: the first one that it raised.
    """
    futures = [_pool(threads).submit(call) for _ in range(threads - 1)]
    call()
    for future in futures:
        if not future.cancel():  # has begun
            future.result()


def _pool(threads: int) -> ThreadPoolExecutor:
    """Return the pool of this process; threads do not survive a fork."""
    with _lock:
        key = (os.getpid(), threads)
        if key not in _pools:
            callers = torch.get_num_threads()
            pool = _pools[key] = ThreadPoolExecutor(threads, "gangline-host", _limit_torch_threads)
            begun = threading.Barrier(threads)
            for future in [pool.submit(begun.wait) for _ in range(threads)]:
                future.result()
            torch.set_num_threads(callers)  # the pool's threads changed torch's default for new threads
        return _pools[key]


def _limit_torch_threads() -> None:
    """Run torch's operations of this thread in it alone.

    torch applies the count when it is next read, so it is read here.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()
