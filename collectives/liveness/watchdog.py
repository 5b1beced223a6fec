"""How long to wait for other ranks, and with what words to stop: the patience of a communicator."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from gangline.collectives.call_signature import CallSignature
from gangline.collectives.errors import DeadNodeError, GanglineError, MismatchError, StallError, name_ranks
from gangline.collectives.liveness.membership import CLOSED, Membership

_log = logging.getLogger("gangline")

_GATHER = 0.5
"""Seconds from the first sight of another call in which the other ranks may still say where they are."""

_FAREWELL = 1.0
"""Seconds in which what a rank sent before its goodbye may still arrive."""


class Watchdog:
    """The `Patience` of one lane of a communicator: what it asks its roster while it waits.

    Args:
        timeout: seconds in one call after which the wait is a `StallError`.
        stall_warn: seconds in one call after which a warning says who is late.
    """

    def __init__(self, membership: Membership, timeout: float, stall_warn: float) -> None:
        self._membership = membership
        self._timeout = timeout
        self._stall_warn = stall_warn
        self.begin(0, 0)

    def begin(self, sequence: int, code: int) -> None:
        """Start timing a call.

        Args:
            sequence: number of the call on the communicator, from 1; 0 for a message between two ranks.
            code: `CallSignature.code`.
        """
        self._sequence = sequence
        self._code = code
        self._since = 0.0  # when the call first had to wait; 0: not yet

    def check(self, missing: Iterable[int]) -> None:
        """To be called about every 10 ms of a wait for the ranks ``missing``.

        Raises:
            DeadNodeError: a rank is dead, needed by this one now or not; or one of ``missing`` closed its communicator.
            MismatchError: others are at another call of the same number.
            StallError: the call has waited for longer than the timeout.
            GanglineError: what another rank raised.
        """
        now = time.monotonic()
        needed = set(missing)
        if not self._since:
            self._since = now
            self._warned = False
            self._odd_since = 0.0
            self._closed_since = 0.0
        membership = self._membership
        message_only = (0, self._code)  # says nothing of the collective that another lane may wait in
        membership.look(
            *(self._sequence, self._code) if self._sequence else membership.at.get(membership.rank, message_only)
        )
        if membership.failure is not None:
            raise type(membership.failure)(*membership.failure.args)
        if membership.gone:
            self._check_gone(needed, now)
        if self._sequence:
            self._check_calls(now)
        self._check_clock(needed, now)

    def _check_gone(self, missing: set[int], now: float) -> None:
        closed = [rank for rank in sorted(missing) if self._membership.gone.get(rank) == CLOSED]
        if not closed:
            self._closed_since = 0.0
        else:
            self._closed_since = self._closed_since or now
        needed = closed if closed and now - self._closed_since >= _FAREWELL else []
        dead = {rank: why for rank, why in sorted(self._membership.gone.items()) if why != CLOSED or rank in needed}
        if dead:
            reasons = {why: [rank for rank in dead if dead[rank] == why] for why in dead.values()}
            text = "; ".join(f"{name_ranks(ranks)} {why}" for why, ranks in reasons.items())
            self._raise(DeadNodeError(f"{text} (rank {self._membership.rank} waited in {self._call()})"))

    def _check_calls(self, now: float) -> None:
        at = self._membership.at
        here = {rank: (number, code) for rank, (number, code) in list(at.items()) if number == self._sequence}
        if all(code == self._code for _, code in here.values()):
            return
        self._odd_since = self._odd_since or now
        elsewhere = len(at) - len(here) + len(self._membership.gone.keys() - at.keys())
        if len(here) + elsewhere >= self._membership.size or now - self._odd_since >= _GATHER:
            self._raise(mismatch({**here, self._membership.rank: (self._sequence, self._code)}))

    def _check_clock(self, missing: set[int], now: float) -> None:
        waited = now - self._since
        if waited >= self._timeout:
            self._raise(StallError(self._lateness(missing, waited)))
        if waited >= self._stall_warn and not self._warned:
            self._warned = True
            _log.warning("%s", self._lateness(missing, waited))

    def _lateness(self, missing: set[int], waited: float) -> str:
        if not self._sequence:
            whom = f" for {name_ranks(missing)}" if missing else ""
            return f"{self._call()} on rank {self._membership.rank} has waited {waited:.3g} s{whom}"
        came = {rank for rank, (number, _) in list(self._membership.at.items()) if number >= self._sequence}
        came.add(self._membership.rank)
        late = set(range(self._membership.size)) - came
        who = f"{name_ranks(came)} came, {name_ranks(late)} did not" if late else "all ranks came"
        return f"{self._call()}, call {self._sequence}, has waited {waited:.3g} s: {who}"

    def _call(self) -> str:
        return _text(self._code)

    def _raise(self, error: GanglineError) -> None:
        self._membership.fail(error)
        raise error


def mismatch(calls: Mapping[int, tuple[int, int]]) -> MismatchError:
    """The error of ranks that are at different calls; its text is the same whoever makes it.

    Args:
        calls: rank -> (sequence, code).
    """
    numbered = len({sequence for sequence, _ in calls.values()}) > 1
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, call in sorted(calls.items()):
        groups.setdefault(call, []).append(rank)
    texts = [
        f"{name_ranks(ranks)}: {_text(code)}{f' as call {sequence}' if numbered else ''}"
        for (sequence, code), ranks in groups.items()
    ]
    return MismatchError(f"ranks are at different calls: {'; '.join(texts)}")


def _text(code: int) -> str:
    try:
        return str(CallSignature.from_code(code))
    except ValueError:
        return f"an unknown call ({code})"
