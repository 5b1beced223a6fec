"""Handle of a small collective that has begun in the caller's thread, and that no other thread runs."""

from __future__ import annotations

import time

from gangline.collectives.compiled_core import BEGUN
from gangline.collectives.eager import run_eagerly
from gangline.collectives.engine.engine import Engine
from gangline.collectives.errors import GanglineError
from gangline.collectives.timeline import recorder
from gangline.collectives.work import Work

_POLL_SECONDS = 0.0001


@run_eagerly
class BegunWork(Work):
    """Handle of a collective that is published: `wait`, `is_completed` or the communicator's next call ends it."""

    _join = _error = _earlier = queued = wake = None
    _is_over = False

    def __init__(self, name: str, engine: Engine, number: int, forks: int, result: object = None) -> None:
        # without those of `Work`, and its lock, which would take a tenth of a small call
        self.result, self._name, self._engine, self._number, self._forks = result, name, engine, number, forks

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the collective; see `Work.wait`."""
        if timeout is None and not self._is_over:
            try:
                self._is_over = end_at_once(self._engine, self._number, self._forks)
            except BaseException as error:
                self.end(error)
                raise
        if not self._is_over or self._error is not None or self._earlier is not None:
            super().wait(timeout)

    def end(self, error: BaseException) -> None:
        """Take the error of the collective, unless it goes on."""
        if self._engine.error is not None:  # else it was a nested call
            self._error, self._is_over = error, True

    def _wait_until_over(self, timeout: float | None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        while not self._is_ended(waits=until is None):
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(f"{self._name} is still running after {timeout} s")
            time.sleep(_POLL_SECONDS)

    def is_completed(self) -> bool:
        """Return whether the operation is over, with or without an error; end it if no rank is late."""
        return self._is_over or self._is_ended(waits=False)

    def _is_ended(self, *, waits: bool) -> bool:
        engine = self._engine
        if waits and engine.shared[BEGUN] == self._number:
            engine.check_outermost()
        try:
            self._is_over = engine.end_begun(self._number, waits=waits)
        except BaseException as error:
            self.end(error)
            if not self._is_over or (not isinstance(error, GanglineError) and not waits):  # an interrupt
                raise
        return self._is_over


def end_at_once(engine: Engine, number: int, forks: int) -> bool:
    """End a collective without further checks, if none is needed; return whether it is over.

    ``forks`` is the `Work.forks` when it began.
    """
    is_plain = engine.error is None and recorder.current is None and forks == Work.forks
    return is_plain and not engine.end_core(number, True)
