"""Record of a scheduler: what it has told other processes, from which a restarted one continues."""

from __future__ import annotations

from typing import Any

from msgspec.msgpack import decode, encode

from gangline.kvstore.parameter_server.kept_state import KeptLog
from gangline.kvstore.parameter_server.scheduler.job_state import JobState

_LEAST_GROWTH = 1 << 20


class Record:
    """Record of a job, `JobState.kept`, and its outcomes, in memory that outlives the scheduler.

    An entry is what has changed since the one before, in msgpack; an outcome of None is forgotten. Outcomes never
    change, so each is written once. All entries are replaced by one, without what was forgotten, at the first `write`
    of a process, and when their bytes would become more than twice those after the last time, and 1 MiB.
    """

    def __init__(self, descriptor: int) -> None:
        self._log = KeptLog(descriptor)
        self._most = -1  # bytes of the entries
        self._kept: object = None
        self._numbers: set[int] = set()  # of outcomes

    def read(self) -> tuple[Any, dict[int, Any]]:
        """Return what was kept, None before the first `write`, and outcomes. OSError if the memory is damaged."""
        kept: Any = None
        outcomes: dict[int, Any] = {}
        for entry in self._log.read():
            newer, changed = decode(entry)
            kept = newer or kept
            outcomes |= changed
        return kept, {number: outcome for number, outcome in outcomes.items() if outcome}

    def write(self, state: JobState) -> None:
        """Record what has changed since the last call."""
        kept, outcomes = state.kept(), state.outcomes
        changed = {number: outcomes.get(number) for number in outcomes.keys() ^ self._numbers}
        if not changed and kept == self._kept:
            return
        entry = encode((None if kept == self._kept else kept, changed))
        if self._log.nbytes + len(entry) <= self._most:
            self._log.append(entry)
        else:
            self._log.replace([encode((kept, outcomes))])
            self._log.trim()
            self._most = 2 * self._log.nbytes + _LEAST_GROWTH
        self._kept, self._numbers = kept, set(outcomes)
