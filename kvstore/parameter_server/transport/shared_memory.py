"""Allocator for shared memory that other processes of the host read: gradients of a worker, values of a server."""

from __future__ import annotations

import bisect
import os
import threading

import torch
from torch import Tensor

from gangline.collectives.transports.shm.segments import Offer, Segment

ALIGNMENT = 64
"""Bytes: alignment of every allocation, so that it can be viewed as any dtype."""


class SharedMemoryPool:
    """First-fit allocator over one segment as large as the machine's memory; only touched pages are committed.

    Allocations take the lowest free offset, so that committed pages are reused first.

    Raises:
        OSError: if the system cannot create the segment.
    """

    def __init__(self) -> None:
        self._nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._offer = Offer(self._nbytes)
        self._free: list[tuple[int, int]] = [(0, self._nbytes)]  # (begin, end), ascending
        self._allocated: dict[int, int] = {}
        self._lock = threading.Lock()  # allocate and free run in different threads

    @property
    def handle(self) -> bytes:
        """Handle by which processes of the same host and user map the segment."""
        return self._offer.handle

    @property
    def in_use(self) -> int:
        """Allocated bytes."""
        with self._lock:
            return sum(end - begin for begin, end in self._allocated.items())

    def allocate(self, nbytes: int) -> int:
        """Allocate memory and return its offset.

        Raises:
            MemoryError: if no free range is large enough.
        """
        needed = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            for index, (begin, end) in enumerate(self._free):
                if end - begin >= needed:
                    self._free[index : index + 1] = [(begin + needed, end)] if end - begin > needed else []
                    self._allocated[begin] = begin + needed
                    return begin
        raise MemoryError(f"{nbytes} bytes do not fit in {self._nbytes} bytes of shared memory")

    def free(self, offset: int) -> None:
        """Free the allocation at an offset; KeyError if there is none."""
        with self._lock:
            begin, end = offset, self._allocated.pop(offset)
            index = bisect.bisect(self._free, (begin, end))
            if index < len(self._free) and self._free[index][0] == end:
                end = self._free.pop(index)[1]
            if index and self._free[index - 1][1] == begin:
                begin = self._free.pop(index - 1)[0]
                index -= 1
            self._free.insert(index, (begin, end))

    def tensor_at(self, offset: int, nbytes: int) -> Tensor:
        """Return a uint8 view of a range."""
        return self._offer.segment.tensor(offset, nbytes)

    def close(self) -> None:
        """Prevent further processes from mapping the segment; existing mappings stay valid. Idempotent."""
        self._offer.close()


def region_of(segment: Segment, offset: int, nbytes: int) -> Tensor:
    """Return a read-only uint8 view of a range of another process's segment.

    Raises:
        ValueError: if the offset is not aligned or the range exceeds the segment.
    """
    if offset % ALIGNMENT or offset + nbytes > segment.nbytes:
        raise ValueError(
            f"bytes {offset} to {offset + nbytes} are not an aligned range of {segment.nbytes} bytes of shared memory"
        )
    return segment.tensor(offset, nbytes)


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View uint8 data as elements of a dtype; copy them first if they are not aligned for it."""
    if data.data_ptr() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
