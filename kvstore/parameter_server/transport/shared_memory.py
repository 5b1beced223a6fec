"""Shared memory that one process deals out and others of its host read: gradients of a worker, values of a server."""

from __future__ import annotations

import bisect
import os
import threading

import torch
from torch import Tensor

from gangline.collectives.transports.shm.segments import Offer, Segment

ALIGNMENT = 64
"""Bytes: every piece begins at a multiple, so that it can be seen as any dtype."""


class SharedMemoryPool:
    """A segment as large as the machine's memory, of which only what is touched is taken.

    The lowest free place is given out first, so that what was touched once is used again.

    Raises:
        OSError: the system gives no such memory.
    """

    def __init__(self) -> None:
        self._nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._offer = Offer(self._nbytes)
        self._free: list[tuple[int, int]] = [(0, self._nbytes)]  # begin and end, ascending
        self._taken: dict[int, int] = {}
        self._lock = threading.Lock()  # one thread takes, another gives back

    @property
    def card(self) -> bytes:
        """By which others of this host and user open it."""
        return self._offer.handle

    @property
    def in_use(self) -> int:
        """Bytes that are given out."""
        with self._lock:
            return sum(end - begin for begin, end in self._taken.items())

    def allocate(self, nbytes: int) -> int:
        """The offset of so many bytes.

        Raises:
            MemoryError: there is no room.
        """
        needed = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            for index, (begin, end) in enumerate(self._free):
                if end - begin >= needed:
                    self._free[index : index + 1] = [(begin + needed, end)] if end - begin > needed else []
                    self._taken[begin] = begin + needed
                    return begin
        raise MemoryError(f"{nbytes} bytes do not fit in {self._nbytes} bytes of shared memory")

    def free(self, offset: int) -> None:
        """Take back what `allocate` gave."""
        with self._lock:
            begin, end = offset, self._taken.pop(offset)
            index = bisect.bisect(self._free, (begin, end))
            if index < len(self._free) and self._free[index][0] == end:
                end = self._free.pop(index)[1]
            if index and self._free[index - 1][1] == begin:
                begin = self._free.pop(index - 1)[0]
                index -= 1
            self._free.insert(index, (begin, end))

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        """A piece, as uint8."""
        return self._offer.segment.tensor(offset, nbytes)

    def close(self) -> None:
        """Let nobody else open it; it lives on where it is used. Again: nothing."""
        self._offer.close()


def piece(segment: Segment, offset: int, nbytes: int) -> Tensor:
    """A piece of another process's segment, as uint8, to be read only.

    Raises:
        ValueError: the segment does not reach so far.
    """
    if offset % ALIGNMENT or offset + nbytes > segment.nbytes:
        raise ValueError(f"bytes {offset} to {offset + nbytes} are named of shared memory of {segment.nbytes} bytes")
    return segment.tensor(offset, nbytes)


def aligned(nbytes: int) -> int:
    """The room that so many bytes take where pieces lie one behind another."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as elements; copied where they do not lie as the dtype wants."""
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
