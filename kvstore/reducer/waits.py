"""Waits for other ranks, which the timers of this rank's own work leave out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet


class PausedByWaits(Protocol):
    """A timer of this rank's work."""

    def pause(self) -> bool:
        """Stop counting time until `resume`; return False if the timer was not running."""

    def resume(self) -> None:
        """Count time again."""


timers: WeakSet[PausedByWaits] = WeakSet()
"""The timers of this process."""


@contextmanager
def waiting_for_ranks() -> Iterator[None]:
    """Exclude the time inside this context, in which the rank may wait for others, from its work."""
    running = [timer for timer in timers if timer.pause()]
    try:
        yield
    finally:
        for timer in running:
            timer.resume()
