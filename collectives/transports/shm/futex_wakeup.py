"""How a rank waits for another one on the same host: it looks, then yields, then sleeps in the kernel.

Nothing is ever lost by a wake-up that comes too early or not at all: a sleeper looks again every few milliseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from gangline.collectives.transports.base import WaitPolicy
from gangline.collectives.transports.shm.host_group import HostGroup

_LOOKS = 300  # before the first yield, when there is a core for every rank: some 30 us
_YIELDS = 5_000  # before the first sleep, some milliseconds: a virtual processor that sleeps is slow to wake
_CHECK_NANOSECONDS = 10_000_000  # of sleep between two looks at who is alive
_FUTEX = 202  # the system call's number on x86-64, the only processors that `open_host_group` accepts
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1

_libc = ctypes.CDLL(None, use_errno=True)  # its calls let other threads run


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NAP = _TimeSpec(0, 2_000_000)
_SHORT_NAP = _TimeSpec(0, 100_000)


class FutexWakeup:
    """A bell a rank, which it rings for those who sleep while they wait for it."""

    def __init__(self, group: HostGroup, wait_policy: WaitPolicy) -> None:
        rank, size = group.rank, group.size
        self._rank = rank
        self._wait_policy = wait_policy
        self._looks = _LOOKS if size <= len(group.cores) else 0
        segments = group.take(self.nbytes(size))  # a bell on a cache line of its own, a word a rank: asleep for it
        self._bell = segments[rank].words(0, 1)
        self._wakeup = [segment.words(0, 1) for segment in segments]
        self._addresses = [segment.address for segment in segments]
        self._asleep = segments[rank].words(64, size)
        self._sleepers = [segment.words(64, size) for segment in segments]
        self._keep = segments

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of shared memory that each of ``size`` ranks needs."""
        return 64 + 8 * size

    def ring(self, rank: int) -> None:
        """Wake a rank that sleeps for this one; call it after what it waits for was written."""
        if self._sleepers[rank][self._rank]:
            self._bell[0] = (self._bell[0] + 1) & 0x7FFFFFFF
            _libc.syscall(_FUTEX, ctypes.c_void_p(self._addresses[self._rank]), _FUTEX_WAKE, 1 << 30, None, None, 0)

    def wait(self, rank: int, is_there: Callable[[], bool], meanwhile: Callable[[], bool] | None = None) -> None:
        """Return when ``is_there()``; what it looks at is written by ``rank``, which rings after it.

        Args:
            rank: who is waited for.
            is_there: a quick look at shared memory.
            meanwhile: what else to move on; gives whether there is more of it, which forbids deep sleep.

        Raises:
            GanglineError: what `WaitPolicy.check` raises.
        """
        for _ in range(self._looks):
            if is_there():
                return
        busy = meanwhile is not None and meanwhile()
        for _ in range(_YIELDS):
            if is_there():
                return
            _libc.sched_yield()
            if busy:
                busy = meanwhile is not None and meanwhile()
        since_check = 0.0
        while not is_there():
            nap = _SHORT_NAP if busy else _NAP  # who makes room for more of it does not ring for this
            self._nap(rank, is_there, nap)
            busy = meanwhile is not None and meanwhile()
            since_check += nap.nanoseconds
            if since_check >= _CHECK_NANOSECONDS:
                since_check = 0.0
                self._wait_policy.check([rank])

    def _nap(self, rank: int, is_there: Callable[[], bool], nap: _TimeSpec) -> None:
        self._asleep[rank] = 1
        try:
            bell = self._wakeup[rank][0]
            if not is_there():
                _libc.syscall(
                    _FUTEX, ctypes.c_void_p(self._addresses[rank]), _FUTEX_WAIT, bell, ctypes.byref(nap), None, 0
                )
        finally:
            self._asleep[rank] = 0
