"""Log of refused messages and connections: a line each, but at most one a second once they are many."""

from __future__ import annotations

import logging
import time

_log = logging.getLogger("gangline")
_BURST = 20
"""Lines that may follow each other without a limit."""


class RefusalLog:
    """Warnings that whoever sends messages can cause, so that they do not fill a disk."""

    def __init__(self) -> None:
        self._allowed = float(_BURST)
        self._at = time.monotonic()
        self._dropped = 0

    def warn(self, text: str, *values: object, exc_info: bool | BaseException | None = None) -> None:
        """Log a warning as `logging.Logger.warning` does, or count it; the next line names how many were dropped."""
        now = time.monotonic()
        self._allowed = min(_BURST, self._allowed + now - self._at)
        self._at = now
        if self._allowed < 1:
            self._dropped += 1
            return
        self._allowed -= 1
        if self._dropped:
            _log.warning("%d more were refused", self._dropped)
            self._dropped = 0
        _log.warning(text, *values, exc_info=exc_info)
