"""Calls shared out over threads that are kept: for work on the host that meets once, at its end.

torch's own threads meet at a barrier after every operation. Where other work wants the cores too, each barrier may cost
a turn of the scheduler, and what one operation leaves in a core's cache is gone before the next one reads it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_lock = threading.Lock()


def run(calls: Sequence[Callable[[], None]]) -> None:
    """Run the calls at once, each in a thread that torch's operations do not leave; a single one in the caller's.

    Raises:
        Exception: the first that a call raised, once all have ended.
    """
    if len(calls) == 1:
        calls[0]()
        return
    pool = _pool(len(calls))
    futures = [pool.submit(call) for call in calls]
    errors = [future.exception() for future in futures]  # waits for all of them
    for error in errors:
        if error is not None:
            raise error


def _pool(threads: int) -> ThreadPoolExecutor:
    """The threads of this process; a fork's child has none of its parent's."""
    with _lock:
        key = (os.getpid(), threads)
        if key not in _pools:
            callers = torch.get_num_threads()
            pool = _pools[key] = ThreadPoolExecutor(threads, "gangline-host", _work_alone)
            begun = threading.Barrier(threads)
            for future in [pool.submit(begun.wait) for _ in range(threads)]:
                future.result()
            torch.set_num_threads(callers)  # torch's count for threads that begin later had changed with the pool's
        return _pools[key]


def _work_alone() -> None:
    """Have torch run this thread's operations in it alone; asked for at once, the count is settled."""
    torch.set_num_threads(1)
    torch.get_num_threads()
