"""Small messages on one host: everybody copies in, ONE synchronisation, everybody reads what it needs.

Two sets of slots are used in turn. Who writes into a slot again has seen everybody's mark of the exchange between,
so everybody has read the slot: no second synchronisation is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial

import torch
from torch import Tensor

from gangline.collectives.transports.base import SLOT_BYTES, WaitPolicy
from gangline.collectives.transports.shm.futex_wakeup import FutexWakeup
from gangline.collectives.transports.shm.host_group import HostGroup, padded

LIMIT = SLOT_BYTES
"""Bytes that a rank may put on the board; pages that nobody touches cost nothing."""

_LINE = 64  # bytes of a cache line
_SEGMENT_BYTES = 2 * (_LINE + LIMIT)


class SlotExchange(ABC):
    """Where the ranks of one process or host lay open small messages; one thread at a time may use it."""

    rank: int
    size: int

    @abstractmethod
    def slots(self, nbytes: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """The slots for messages of so many bytes: ``[parity][rank]`` is a tensor of ``dtype``, there to be kept."""

    @property
    @abstractmethod
    def parity(self) -> int:
        """Which set of slots the next exchange uses: fill one's own slot of it before `meet`."""

    @abstractmethod
    def meet(self, sequence: int, code: int) -> tuple[int, dict[int, tuple[int, int]]]:
        """Lay open what lies in the own slot, and wait until every rank has.

        Returns:
            The parity of the slots to read, and where ranks are that came for another call; empty if all is well.

        Raises:
            GanglineError: what `WaitPolicy.check` raises.
        """


class SharedSlotExchange(SlotExchange):
    """The board of the processes of one host."""

    def __init__(self, group: HostGroup, wait_policy: WaitPolicy) -> None:
        rank = self.rank = group.rank
        self.size = group.size
        self._count = 0
        self._wakeup = FutexWakeup(group, wait_policy)
        self._segments = group.take(_SEGMENT_BYTES)  # marks (count, call, code) of both parities; slots
        marks = [[segment.words(_LINE * parity, 3) for segment in self._segments] for parity in (0, 1)]
        self._own = [of_parity[rank] for of_parity in marks]
        self._others = [[(r, m) for r, m in enumerate(of_parity) if r != rank] for of_parity in marks]

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of shared memory that each of ``size`` ranks needs."""
        return padded(FutexWakeup.nbytes(size)) + padded(_SEGMENT_BYTES)

    def slots(self, nbytes: int, dtype: torch.dtype) -> list[list[Tensor]]:  # noqa: D102  as said above
        offsets = [2 * _LINE, 2 * _LINE + LIMIT]
        return [[segment.tensor(offset, nbytes).view(dtype) for segment in self._segments] for offset in offsets]

    @property
    def parity(self) -> int:  # noqa: D102
        return (self._count + 1) & 1

    def meet(self, sequence: int, code: int) -> tuple[int, dict[int, tuple[int, int]]]:  # noqa: D102
        count = self._count = self._count + 1
        parity = count & 1
        own = self._own[parity]
        own[1] = sequence
        own[2] = code
        own[0] = count  # last: who sees it sees what was written before
        others = self._others[parity]
        for rank, _ in others:
            self._wakeup.ring(rank)
        elsewhere: dict[int, tuple[int, int]] = {}
        for rank, marks in others:
            if marks[0] != count:
                self._wakeup.wait(rank, partial(_is, marks, count))
            if marks[2] != code or marks[1] != sequence:
                elsewhere[rank] = (marks[1], marks[2])
        return parity, elsewhere


def _is(marks: memoryview, count: int) -> bool:
    return marks[0] == count
