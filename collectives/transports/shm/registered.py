"""Registry of memory that all ranks of a host have mapped: messages from it are read in place, without a copy."""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable

from torch import Tensor

from gangline.collectives.errors import ProtocolError
from gangline.collectives.transports.shm.segments import Segment


class RegisteredMemory:
    """Registrations of `SharedMemoryTransport.empty`: one segment per rank, with the same numbers on all ranks.

    A rank's segment is released once no tensor of that rank refers to it and all other ranks have called `forget`.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, int]] = []  # sorted: begin, end, number
        self._own: dict[int, Segment] = {}  # this rank's, until `take_released` returns its number
        self._others: dict[tuple[int, int], Segment] = {}  # by number and rank
        self._count = 0
        self._dead: deque[int] = deque()  # numbers without a tensor; a finalizer appends, in any thread

    def add(self, segments: list[Segment], rank: int, nbytes: int) -> Tensor:
        """Register one segment per rank; return this rank's own as a uint8 tensor of ``nbytes``."""
        number = self._count
        self._count += 1
        own = self._own[number] = segments[rank]
        self._others.update({(number, other): one for other, one in enumerate(segments) if other != rank})
        insort(self._ranges, (own.address, own.address + nbytes, number))
        return own.exported(nbytes, self._dead, number)

    def take_released(self) -> list[int]:
        """Return the numbers of tensors on this rank freed since the last call, and drop their memory."""
        released = [self._dead.popleft() for _ in range(len(self._dead))]
        for number in released:
            del self._own[number]
        self._ranges = [one for one in self._ranges if one[2] in self._own]
        return released

    def forget(self, rank: int, numbers: Iterable[int]) -> None:
        """Unmap memory that another rank has released."""
        for number in numbers:
            self._others.pop((number, rank), None)

    def find(self, data: Tensor) -> tuple[int, int] | None:
        """Return (registration number, byte offset) of a tensor's memory; None if it is not registered."""
        address = data.data_ptr()
        index = bisect_right(self._ranges, (address, sys.maxsize, 0)) - 1
        if index < 0:
            return None
        begin, end, number = self._ranges[index]
        return (number, address - begin) if address + data.numel() <= end else None

    def view(self, number: int, rank: int, offset: int, nbytes: int) -> Tensor:
        """Return bytes of another rank's registered memory as a uint8 tensor.

        Raises:
            ProtocolError: if there are no such bytes.
        """
        segment = self._others.get((number, rank))
        if segment is None or not 0 <= offset <= segment.nbytes - nbytes:
            raise ProtocolError(
                f"rank {rank} refers to bytes {offset} to {offset + nbytes} of registered memory {number}: there are "
                "none"
            )
        return segment.tensor(offset, nbytes)
