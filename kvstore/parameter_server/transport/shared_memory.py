"""Allocator for shared memory that other processes of the host read: gradients of a worker, values of a server."""

from __future__ import annotations

import bisect
import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Iterable

from torch import Tensor

from gangline.collectives.transports.shm.segments import Offer, Segment

_log = logging.getLogger("gangline")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PERIOD = 1024  # frees between two looks at which pages were needed meanwhile
_KEPT_BYTES = 64 << 20
"""Bytes of unused pages that are kept, because returning and faulting in pages takes time."""

ALIGNMENT = 64
"""Bytes: alignment of every allocation, so that it can be viewed as any dtype."""


class SharedMemoryPool(Offer):
    """First-fit allocator over one segment as large as the machine's memory; only touched pages are committed.

    Allocations take the lowest free offset, so that committed pages are reused first. Pages that were not needed for a
    while are returned to the system. The segment is the memfd ``descriptor``, or a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        super().__init__(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), descriptor)
        self._nbytes = self.segment.nbytes
        self._free: list[tuple[int, int]] = [(0, self._nbytes)]  # (begin, end), ascending
        self._allocated: dict[int, int] = {}
        self._lock = threading.Lock()  # allocate and free run in different threads
        self._frees = 0
        self._committed = 0  # end of the pages that may be committed
        self._needed = 0  # highest end of an allocation in this period

    @property
    def in_use(self) -> int:
        """Allocated bytes."""
        with self._lock:
            return sum(end - begin for begin, end in self._allocated.items())

    def allocate(self, nbytes: int) -> int:
        """Allocate memory and return its offset; MemoryError if no free range is large enough."""
        needed = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            for index, (begin, end) in enumerate(self._free):
                if end - begin >= needed:
                    self._free[index : index + 1] = [(begin + needed, end)] if end - begin > needed else []
                    self._allocated[begin] = begin + needed
                    self._needed = max(self._needed, begin + needed)
                    self._committed = max(self._committed, begin + needed)
                    return begin
        raise MemoryError(f"{nbytes} bytes do not fit in {self._nbytes} bytes of shared memory")

    def reserve(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Make ranges, (offset, bytes) each, the only allocations, and return all other pages to the system."""
        with self._lock:
            self._allocated = {begin: begin + aligned(max(1, nbytes)) for begin, nbytes in ranges}
            ends = [0, *(self._allocated[begin] for begin in sorted(self._allocated))]
            begins = [*sorted(self._allocated), self._nbytes]
            self._free = [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]
            self._committed = self._nbytes
            self._return_pages(0)
            self._committed = ends[-1]

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
            self._frees += 1
            if self._frees % _PERIOD == 0:
                self._return_pages(self._needed + _KEPT_BYTES)
                self._needed = max(self._allocated.values(), default=0)

    def return_pages(self) -> None:
        """Return all unused pages to the system."""
        with self._lock:
            self._return_pages(0)

    def _return_pages(self, least: int) -> None:
        """Return the pages of free ranges from offset ``least`` on."""
        page = mmap.PAGESIZE
        for first, last in self._free:
            begin = -(-max(first, least) // page) * page
            nbytes = min(last, self._committed) // page * page - begin
            if nbytes > 0 and _libc.madvise(self.segment.address + begin, nbytes, mmap.MADV_REMOVE):
                _log.debug("unused shared memory stays in use: %s", os.strerror(ctypes.get_errno()))

    def clear(self, offset: int, nbytes: int) -> None:
        """Fill a range with zeros; whole pages of it are returned to the system."""
        begin, end = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE, (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin >= end or _libc.madvise(self.segment.address + begin, end - begin, mmap.MADV_REMOVE):
            begin = end = offset + nbytes
        self.tensor_at(offset, begin - offset).zero_()
        self.tensor_at(end, offset + nbytes - end).zero_()

    def tensor_at(self, offset: int, nbytes: int) -> Tensor:
        """Return a uint8 view of a range."""
        return self.segment.tensor(offset, nbytes)


def region_of(segment: Segment, offset: int, nbytes: int) -> Tensor:
    """Return a read-only uint8 view of a range of another process's segment; ValueError if it is not aligned."""
    if offset % ALIGNMENT or offset + nbytes > segment.nbytes:
        raise ValueError(
            f"bytes {offset} to {offset + nbytes} are not an aligned range of {segment.nbytes} bytes of shared memory"
        )
    return segment.tensor(offset, nbytes)


def aligned(nbytes: int) -> int:
    """Round a number of bytes up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
