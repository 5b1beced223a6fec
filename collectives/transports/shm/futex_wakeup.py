"""Waiting for another rank of the same host: spin, then yield, then sleep in a futex.

A lost wake-up delays a rank by at most one sleep, because a sleeping rank checks its condition every few milliseconds.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import time
from collections.abc import Callable, Collection

from gangline.collectives.limits import FUTEX_SLEEP_SECONDS, FUTEX_SLEEP_SENDING_SECONDS
from gangline.collectives.transports.base import WaitPolicy, wait_until
from gangline.collectives.transports.shm.host_group import HostGroup
from gangline.collectives.work import is_in_background

_SPINS = 300  # before the first yield, if there is a core for every rank: about 30 us
_COMPILED_SPINS = 1_500  # the same in `gangline._core`
_COMPILED_YIELDS = 1_000
_YIELDS = 5_000  # before the first sleep, at most: a virtual CPU that sleeps is slow to wake up
_YIELDS_BETWEEN_CHECKS = 20  # of the clock
_FEW_YIELDS = 20  # the same if other threads of this host's ranks need the core
_YIELD_SECONDS = 0.005  # after which it sleeps at any rate: on a busy core a yield may take milliseconds
_FUTEX = 202 if platform.machine() == "x86_64" else 98  # system call number
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_CACHE_LINE = 64  # bytes

_FUTEX_WAITV = 449  # system call number; Linux 5.16
_FUTEX_32_BITS = 2
_MOST_FUTEXES = 128  # that the call accepts

_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the GIL


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def of(cls, seconds: float) -> _TimeSpec:
        return cls(int(seconds), int(seconds % 1 * 1e9))


class _FutexWait(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class FutexWakeup:
    """Blocking wait and notification between the ranks of one host.

    Each rank owns a futex word, and one flag per rank that says whether it sleeps until that rank notifies it.
    Collective: all ranks must create it.
    """

    def __init__(self, group: HostGroup, wait_policy: WaitPolicy) -> None:
        rank, size = group.rank, group.size
        self._rank = rank
        self._members = group.members
        self._wait_policy = wait_policy
        self._spins = _SPINS if group.has_cores else 0
        self._yields = _YIELDS if group.has_cores else _FEW_YIELDS
        segments = group.take(self.nbytes(size))  # the futex word has a separate cache line
        self._futexes = [segment.words(0, 1) for segment in segments]
        self._addresses = [segment.address for segment in segments]
        self._own_asleep = segments[rank].words(_CACHE_LINE, size)
        self._asleep = [segment.words(_CACHE_LINE, size) for segment in segments]
        self.compiled_group = (_COMPILED_SPINS if group.has_cores else 0, _COMPILED_YIELDS, self._addresses[rank])
        """For `gangline._core`: spins before the first yield, yields, and the address of this rank's futex."""
        self.compiled_peers = [segment.address + _CACHE_LINE + 8 * rank for segment in segments]
        """For each rank, the address of the flag that says whether it sleeps until this rank wakes it."""

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of shared memory that each of ``size`` ranks needs."""
        return _CACHE_LINE + 8 * size

    def notify(self, rank: int) -> None:
        """Wake a rank that sleeps in `wait` for this rank; call it after writing the condition."""
        if self._asleep[rank][self._rank]:
            self.wake()

    def wait(self, rank: int, ready: Callable[[], bool], progress: Callable[[], bool] | None = None) -> None:
        """Block until ``ready()``, a cheap check of shared memory, which a rank makes true before it calls `notify`.

        ``progress`` advances other work, and returns whether work is left, which shortens the sleeps.
        """
        for _ in range(self._spins):
            if ready():
                return
        self._yield_and_sleep(rank, ready, progress)

    def _yield_and_sleep(self, rank: int, ready: Callable[[], bool], progress: Callable[[], bool] | None) -> None:
        yields = _FEW_YIELDS if is_in_background() else self._yields

        def pause(waited: float) -> None:
            nonlocal yields
            is_sending = progress is not None and progress()
            if yields > 0 and waited < _YIELD_SECONDS:
                for _ in range(1 if is_sending else _YIELDS_BETWEEN_CHECKS):
                    _libc.sched_yield()
                    yields -= 1
                    if ready():
                        return
            else:
                self._sleep(rank, ready, FUTEX_SLEEP_SENDING_SECONDS if is_sending else FUTEX_SLEEP_SECONDS)

        wait_until(ready, pause, lambda: self._wait_policy.check([self._members[rank]]))

    def waiter(self, ranks: Collection[int]) -> Callable[[float], None]:
        """Return a function that sleeps until one of the ranks notifies this rank; see `Transport.waiter`."""
        watched = [self._rank, *ranks][:_MOST_FUTEXES]
        for rank in ranks:
            self._own_asleep[rank] = 1
        futexes = (_FutexWait * len(watched))(
            *(_FutexWait(self._futexes[rank][0], self._addresses[rank], _FUTEX_32_BITS, 0) for rank in watched)
        )

        def wait(seconds: float) -> None:
            _sleep_on(futexes, seconds if len(watched) > len(ranks) else min(seconds, FUTEX_SLEEP_SECONDS))
            for rank in ranks:
                self._own_asleep[rank] = 0

        return wait

    def wake(self) -> None:
        """Wake all sleepers on this rank's futex, including its `waiter`; not concurrently with `notify`."""
        futex = self._futexes[self._rank]
        futex[0] = (futex[0] + 1) & 0x7FFFFFFF
        _libc.syscall(_FUTEX, ctypes.c_void_p(self._addresses[self._rank]), _FUTEX_WAKE, 1 << 30, None, None, 0)

    def _sleep(self, rank: int, ready: Callable[[], bool], seconds: float) -> None:
        self._own_asleep[rank] = 1
        try:
            seen = self._futexes[rank][0]
            if not ready():
                address, limit = ctypes.c_void_p(self._addresses[rank]), _TimeSpec.of(seconds)
                _libc.syscall(_FUTEX, address, _FUTEX_WAIT, seen, ctypes.byref(limit), None, 0)
        finally:
            self._own_asleep[rank] = 0


def _sleep_on(futexes: ctypes.Array[_FutexWait], seconds: float) -> None:
    """Sleep until one of the futexes is woken or no longer has its value; for 2 ms on kernels before Linux 5.16."""
    until = _TimeSpec.of(time.clock_gettime(time.CLOCK_MONOTONIC) + seconds)
    result = _libc.syscall(
        _FUTEX_WAITV, ctypes.byref(futexes), len(futexes), 0, ctypes.byref(until), time.CLOCK_MONOTONIC
    )
    if result < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
        time.sleep(min(seconds, FUTEX_SLEEP_SECONDS))
