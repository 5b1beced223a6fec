"""Calls shared out over threads that are kept: for work on the host that meets once, at its end.

torch's own threads meet at a barrier after every operation. Where other work wants the cores too, each barrier may cost
a turn of the scheduler, and what one operation leaves in a core's cache is gone before the next one reads it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_lock = threading.Lock()


def run(calls: Sequence[Callable[[], None]]) -> None:
    """Run the calls at once, the first in the caller's thread; returns when all have ended.

    Raises:
        Exception: the first that a call raised.
    """
    first, *rest = calls
    if not rest:
        first()
        return
    futures = [_pool(len(rest)).submit(call) for call in rest]
    try:
        first()
    finally:
        errors = [future.exception() for future in futures]  # waits for all of them
    for error in errors:
        if error is not None:
            raise error


def _pool(threads: int) -> ThreadPoolExecutor:
    """The threads of this process; a fork's child has none of its parent's."""
    with _lock:
        key = (os.getpid(), threads)
        if key not in _pools:
            _pools[key] = ThreadPoolExecutor(threads, "gangline-host")
        return _pools[key]
