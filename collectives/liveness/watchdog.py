"""Deadlines for waits, and the errors that end them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from gangline.collectives import hooks
from gangline.collectives.call_signature import CallSignature
from gangline.collectives.compiled_core import CALLS_PER_POLL
from gangline.collectives.errors import DeadNodeError, GanglineError, MismatchError, StallError, name_ranks
from gangline.collectives.limits import CLOSE_GRACE_SECONDS, MISMATCH_REPORT_SECONDS
from gangline.collectives.liveness.membership import PROPOSALS, Membership, has_closed
from gangline.collectives.liveness.status_socket import Wait

_log = logging.getLogger("gangline")

_WAITING_SECONDS = 0.5
"""Maximum time between two checks of a waiting thread."""


class Watchdog:
    """`WaitPolicy` of one transport of a communicator: ends waits on failure, mismatch or timeout.

    It reports failures to the membership. After ``stall_warn`` seconds in one call a warning names the late ranks.
    """

    def __init__(self, membership: Membership, timeout: float, stall_warn: float) -> None:
        self._membership = membership
        self.timeout = timeout
        """Waiting time in one call, in seconds, after which it raises `StallError`."""
        self._stall_warn = stall_warn
        self._sequence = 0
        self.begin(0, 0)

    def another(self) -> Watchdog:
        """Return a watchdog with the same limits, for the waits of another thread."""
        return Watchdog(self._membership, self.timeout, self._stall_warn)

    def begin(self, sequence: int, code: int) -> None:
        """Start the clock of a call, unless it has been started; ``sequence`` is 0 for a point-to-point message."""
        if sequence and sequence == self._sequence:
            return
        if sequence and not sequence % CALLS_PER_POLL:
            self._membership.announce_and_read(0, code)
        self._sequence = sequence
        self.code = code
        self._since = 0.0  # time at which the call first had to wait; 0: not yet
        self._checked_at = 0.0

    def check(self, missing: Iterable[int]) -> None:
        """Raise if waiting for the ranks ``missing`` cannot succeed; to be called every 10 ms of a wait.

        Raises:
            DeadNodeError: if any rank is dead, or one of ``missing`` has closed its communicator.
            MismatchError: if another rank is in a different call of the same number, or has refused its own.
            StallError: if the call has waited for longer than the timeout.
            GanglineError: the error that another rank has reported.
        """
        now = time.monotonic()
        needed = set(missing)
        self._checked_at, self._missing = now, needed
        if not self._since:
            self._since = now
            self._warned = False
            self._mismatch_since = 0.0
            self._closed_since = 0.0
        membership = self._membership
        # During a point-to-point message, the collective that this rank's other watchdog may wait in stays announced.
        own = (self._sequence, self.code) if self._sequence else membership.at.get(membership.rank, (0, self.code))
        membership.announce_and_read(*own, needed)
        if membership.failure is not None:
            raise type(membership.failure)(*membership.failure.args)
        if membership.refusals and self._sequence:
            self._check_refusals()
        if membership.gone:
            self._check_gone(needed, now)
        if self._sequence:
            self._check_calls(now)
        self._check_clock(needed, now)

    def waits(self) -> list[Wait]:
        """Return the call that a thread waits in, its duration and missing ranks; nothing if it does not wait."""
        now = time.monotonic()
        if not self._since or now - self._checked_at > _WAITING_SECONDS:
            return []
        late = self._late_ranks() if self._sequence else set()
        return [
            Wait(
                what=_text(self.code),
                seconds=now - self._since,
                missing=self._membership.names(sorted(late or self._missing)),
                waiting=self._membership.names([self._membership.rank]),
            )
        ]

    def _check_refusals(self) -> None:
        refusals = list(self._membership.refusals.items())
        texts = [
            f"rank {rank} refused call {number}, {why}" for (rank, number), why in refusals if number == self._sequence
        ]
        if texts:
            self._raise(MismatchError("; ".join(sorted(texts))))

    def _check_gone(self, missing: set[int], now: float) -> None:
        closed = [rank for rank in sorted(missing) if has_closed(self._membership.gone.get(rank))]
        if not closed:
            self._closed_since = 0.0
        else:
            self._closed_since = self._closed_since or now
        needed = closed if closed and now - self._closed_since >= CLOSE_GRACE_SECONDS else []
        dead = {
            rank: why for rank, why in sorted(self._membership.gone.items()) if not has_closed(why) or rank in needed
        }
        if dead:
            reasons = {why: [rank for rank in dead if dead[rank] == why] for why in dead.values()}
            text = "; ".join(f"{name_ranks(ranks)} {why}" for why, ranks in reasons.items())
            self._raise(DeadNodeError(f"{text} (rank {self._membership.rank} waited in {_text(self.code)})"))

    def _check_calls(self, now: float) -> None:
        at = self._membership.at
        same_number = {rank: (number, code) for rank, (number, code) in list(at.items()) if number == self._sequence}
        if all(code == self.code for _, code in same_number.values()):
            return
        self._mismatch_since = self._mismatch_since or now
        in_other_calls = len(at) - len(same_number) + len(self._membership.gone.keys() - at.keys())
        all_known = len(same_number) + in_other_calls >= self._membership.size
        if all_known or now - self._mismatch_since >= MISMATCH_REPORT_SECONDS:
            self._raise(mismatch({**same_number, self._membership.rank: (self._sequence, self.code)}))

    def _check_clock(self, missing: set[int], now: float) -> None:
        waited = now - self._since
        if waited >= self.timeout:
            self._raise(StallError(f"{self._stall_text(missing, waited)}; the timeout is {self.timeout:g} s"))
        if waited >= self._stall_warn and not self._warned:
            self._warned = True
            _log.warning("%s", self._stall_text(missing, waited))

    def _stall_text(self, missing: set[int], waited: float) -> str:
        call = _text(self.code)
        if not self._sequence:
            peers = f" for {name_ranks(missing)}{self._locations(missing)}" if missing else ""
            return f"{call} on rank {self._membership.rank} has waited {waited:.3g} s{peers}"
        late = self._late_ranks()
        arrived = set(range(self._membership.size)) - late
        ranks = (
            f"{name_ranks(arrived)} arrived, {name_ranks(late)} did not{self._locations(late)}"
            if late
            else "all ranks arrived"
        )
        return f"{call}, call {self._sequence}, has waited {waited:.3g} s: {ranks}"

    def _locations(self, ranks: Iterable[int]) -> str:
        """Return the positions of the main threads of ranks on this host."""
        here = [self._membership.process_here(rank) for rank in ranks]
        processes = {process for process in here if process is not None}
        return hooks.places(processes=processes) if processes else ""

    def _late_ranks(self) -> set[int]:
        """Return the ranks that have announced neither this call nor a later one."""
        numbers = {rank: number for rank, (number, _) in list(self._membership.at.items())}
        arrived = {rank for rank, n in numbers.items() if n % PROPOSALS >= self._sequence + (n >= PROPOSALS)}
        return set(range(self._membership.size)) - arrived - {self._membership.rank}

    def _raise(self, error: GanglineError) -> None:
        self._membership.fail(error)
        raise error


def mismatch(calls: Mapping[int, tuple[int, int]]) -> MismatchError:
    """Return the error for ranks in different calls, rank -> (sequence, code)."""
    numbered = len({sequence for sequence, _ in calls.values()}) > 1
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, call in sorted(calls.items()):
        groups.setdefault(call, []).append(rank)
    texts = [
        f"{name_ranks(ranks)}: {_text(code)}{f' as call {sequence}' if numbered else ''}"
        for (sequence, code), ranks in groups.items()
    ]
    return MismatchError(f"ranks are at different calls: {'; '.join(texts)}{hooks.explain_mismatch()}")


def _text(code: int) -> str:
    try:
        return str(CallSignature.from_code(code))
    except ValueError:
        return f"an unknown call ({code})"
