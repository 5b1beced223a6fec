"""Hooks: what collectives need of folders above them, as imports go down only; these or `gangline` set them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

_log = logging.getLogger("gangline")


def _nothing(*_: object) -> str:
    return ""


watch_torch: Callable[[], object] = _nothing
"""Record what torch does on each device, if a timeline is recorded."""
find_places: Callable[[Collection[int], Collection[int]], str] = _nothing
"""Return positions of workers and of processes."""

explain_mismatch: Callable[[], str] = _nothing
"""Return why this process's calls may be others than those of other ranks, after "; "."""


def places(*, workers: Collection[int] = (), processes: Collection[int] = ()) -> str:
    """Return positions of this job's workers and of processes on this host, for an error; "" if unknown."""
    try:
        return find_places(workers, processes)
    except Exception as error:  # noqa: BLE001  a text must not end the wait that it explains
        _log.info("the places of late processes are unknown: %r", error)
        return ""
