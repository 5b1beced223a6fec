"""Slot exchange for small messages on one host: write your slot, synchronise ONCE, read the slots you need.

Two sets of slots alternate. Before a rank rewrites a slot, it has seen all ranks publish the other set, so all ranks
have finished reading the slot: no second synchronisation is needed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gangline.collectives.compiled_core import core
from gangline.collectives.transports.base import SLOT_BYTES, WaitPolicy
from gangline.collectives.transports.shm.futex_wakeup import FutexWakeup
from gangline.collectives.transports.shm.host_group import HostGroup, padded
from gangline.collectives.transports.shm.segments import Words

_CACHE_LINE = 64  # bytes
_SEGMENT_BYTES = 2 * (_CACHE_LINE + SLOT_BYTES)  # pages that are never touched take no memory


class SlotExchange:
    """One slot for each process of a host, readable by all of them. Collective: all ranks must create it."""

    def __init__(self, group: HostGroup, wait_policy: WaitPolicy) -> None:
        assert core is not None
        self._wakeup = FutexWakeup(group, wait_policy)
        # a segment: marks (count, sequence, code) of both parities, then the slots of both
        self._segments = group.take(_SEGMENT_BYTES)
        marks = [[segment.words(_CACHE_LINE * parity, 3) for segment in self._segments] for parity in (0, 1)]
        self._others = [[(r, m) for r, m in enumerate(of_parity) if r != group.rank] for of_parity in marks]
        words = [group.size, group.rank, SLOT_BYTES, *self._wakeup.compiled_group]
        for segment, asleep in zip(self._segments, self._wakeup.compiled_peers, strict=True):
            slots = segment.address + 2 * _CACHE_LINE
            words += [segment.address, segment.address + _CACHE_LINE, slots, slots + SLOT_BYTES, asleep]
        self._core = core
        self._handle = core.open_slots(struct.pack(f"{len(words)}q", *words))

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of shared memory that each of ``size`` ranks needs."""
        return padded(FutexWakeup.nbytes(size)) + padded(_SEGMENT_BYTES)

    @torch.inference_mode(mode=False)  # callers keep them
    def slots(self, nbytes: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """Return the slots as ``[parity][rank]`` 1-D tensors of ``dtype`` with ``nbytes`` bytes; callers may keep them.

        Other ranks' slots are read-only.
        """
        offsets = [2 * _CACHE_LINE, 2 * _CACHE_LINE + SLOT_BYTES]
        return [[segment.tensor(offset, nbytes).view(dtype) for segment in self._segments] for offset in offsets]

    @property
    def parity(self) -> int:
        """Set of slots that the next exchange uses: write this rank's slot of it before `publish_and_wait`."""
        count: int = self._core.state(self._handle)[0]
        return (count + 1) & 1

    @property
    def last_call(self) -> tuple[int, int]:
        """Number and code of the last collective that was begun."""
        _, sequence, code, _ = self._core.state(self._handle)
        return sequence, code

    @property
    def arrived(self) -> int:
        """Time at which all ranks had begun the last collective, by `time.monotonic_ns`."""
        arrived: int = self._core.state(self._handle)[3]
        return arrived

    def publish_and_wait(self, sequence: int, code: int) -> tuple[int, dict[int, tuple[int, int]]]:
        """Publish this rank's slot in a call of this number and code, and wait until all ranks have published theirs.

        Returns:
            The parity of the slots to read, and rank -> (sequence, code) of ranks in another call.

        Raises:
            GanglineError: if `WaitPolicy.check` raises it.
        """
        status = self._core.exchange(self._handle, sequence, code)
        return (self.parity + 1) & 1, self.wait() if status else {}

    def caller(
        self, wait: Callable[[], None], failed: Callable[[BaseException], BaseException], shared: bytearray
    ) -> tuple[Callable[..., int], ...]:
        """Return three functions that run, begin and end a collective of plain tensors, contiguous and on the CPU.

        The first two take the collective's number; a tensor, or None where it has none; a tensor for the result, or
        None to work in place; and the operation, the root, or (root, operation) of a reduce. A caller that holds the
        lock and has counted the call also gives the maximum bytes of a tensor, -1 for the table's. They return, without
        effect, `compiled_core.DECLINED` for other calls or HELD if the call must take the lock; else DONE, or the
        number of a call that has begun. The third one takes that number, and whether to wait for late ranks.

        Args:
            wait: waits once for late ranks.
            failed: takes an error inside a collective, and returns the one that the functions raise.
            shared: the engine's integers, as `compiled_core` numbers them.
        """
        functions: tuple[Callable[..., int], ...] = self._core.caller((self._handle, wait, failed, shared))
        return functions

    def wait(self) -> dict[int, tuple[int, int]]:
        """Wait for the exchange that was begun; return rank -> (sequence, code) of ranks in another call."""
        count, sequence, code, _ = self._core.state(self._handle)
        mismatched: dict[int, tuple[int, int]] = {}
        for rank, marks in self._others[count & 1]:
            if marks[0] != count:
                self._wakeup.wait(rank, partial(_has_count, marks, count))
            if marks[2] != code or marks[1] != sequence:
                mismatched[rank] = (marks[1], marks[2])
        return mismatched


def _has_count(marks: Words, count: int) -> bool:
    return marks[0] == count
