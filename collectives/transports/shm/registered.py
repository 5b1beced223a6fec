"""Memory that every rank of a host has mapped, found again by address: what is sent from it is read where it lies."""

from __future__ import annotations

from bisect import bisect_right

from torch import Tensor

from gangline.collectives.errors import ProtocolError
from gangline.collectives.transports.shm.segments import Segment


class RegisteredMemory:
    """Memory from `SharedMemory.empty`: by address, and of every rank."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._places: list[tuple[int, int, int]] = []  # begin, end, number; in the order of _begins
        self._segments: list[list[Segment]] = []

    def add(self, segments: list[Segment], rank: int, nbytes: int) -> Tensor:
        """Keep a new piece of memory; gives this rank's own bytes."""
        own = segments[rank]
        at = bisect_right(self._begins, own.address)
        self._begins.insert(at, own.address)
        self._places.insert(at, (own.address, own.address + nbytes, len(self._segments)))
        self._segments.append(segments)
        return own.tensor(0, nbytes)

    def find(self, data: Tensor) -> tuple[int, int] | None:
        """Which piece of memory a tensor lies in, and at which offset; None for memory of another kind."""
        address = data.data_ptr()
        at = bisect_right(self._begins, address) - 1
        if at < 0:
            return None
        begin, end, number = self._places[at]
        return (number, address - begin) if address + data.numel() <= end else None

    def view(self, number: int, rank: int, offset: int, nbytes: int) -> Tensor:
        """Bytes of a rank's memory."""
        if not 0 <= number < len(self._segments) or not 0 <= offset <= self._segments[number][rank].nbytes - nbytes:
            raise ProtocolError(
                f"rank {rank} names bytes {offset} to {offset + nbytes} of memory {number}: there are none"
            )
        return self._segments[number][rank].tensor(offset, nbytes)
