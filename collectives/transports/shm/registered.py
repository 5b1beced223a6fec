"""Registry of memory that all ranks of a host have mapped: messages from it are read in place, without a copy."""

from __future__ import annotations

from bisect import bisect_right

from torch import Tensor

from gangline.collectives.errors import ProtocolError
from gangline.collectives.transports.shm.segments import Segment


class RegisteredMemory:
    """Registrations made by `SharedMemoryTransport.empty`: one segment per rank each, numbered alike on all ranks."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ranges: list[tuple[int, int, int]] = []  # begin, end, number; in the order of _begins
        self._segments: list[list[Segment]] = []

    def add(self, segments: list[Segment], rank: int, nbytes: int) -> Tensor:
        """Register one segment per rank; return this rank's own as a uint8 tensor of ``nbytes``."""
        own = segments[rank]
        index = bisect_right(self._begins, own.address)
        self._begins.insert(index, own.address)
        self._ranges.insert(index, (own.address, own.address + nbytes, len(self._segments)))
        self._segments.append(segments)
        return own.tensor(0, nbytes)

    def find(self, data: Tensor) -> tuple[int, int] | None:
        """Return (registration number, byte offset) of a tensor's memory; None if it is not registered."""
        address = data.data_ptr()
        index = bisect_right(self._begins, address) - 1
        if index < 0:
            return None
        begin, end, number = self._ranges[index]
        return (number, address - begin) if address + data.numel() <= end else None

    def view(self, number: int, rank: int, offset: int, nbytes: int) -> Tensor:
        """Return bytes of a rank's registered memory as a uint8 tensor.

        Raises:
            ProtocolError: if there are no such bytes.
        """
        if not 0 <= number < len(self._segments) or not 0 <= offset <= self._segments[number][rank].nbytes - nbytes:
            raise ProtocolError(
                f"rank {rank} refers to bytes {offset} to {offset + nbytes} of registered memory {number}: there are "
                "none"
            )
        return self._segments[number][rank].tensor(offset, nbytes)
