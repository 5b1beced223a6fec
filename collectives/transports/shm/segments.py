"""Memory that the ranks of one host share: nameless, sealed, each piece written by the one rank that made it.

A segment is a memfd. Others open it as /proc/<pid>/fd/<fd>, which the kernel grants to the same user only; it has no
name that could stay behind, and is freed when the last process that maps it is gone, however that came about.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import struct

import torch
from torch import Tensor

from gangline.collectives.transports.base import BootstrapAllGather

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034  # Python 3.11's fcntl has no names for them
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4
_TOKEN_BYTES = 16
_CARD = struct.Struct(f"<qqq{_TOKEN_BYTES}s")  # process, descriptor, bytes, token

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _Mapping:
    """Mapped memory, until nothing refers to it; Python's own mmap would keep a descriptor open for each."""

    def __init__(self, descriptor: int, nbytes: int, protection: int) -> None:
        address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"mapping {nbytes} bytes of shared memory: {os.strerror(number)}")
        self.address = int(address)
        self._nbytes = nbytes
        self._unmap = _libc.munmap  # for the end of the program, when this module may be gone first

    def __del__(self) -> None:
        if hasattr(self, "_unmap"):
            self._unmap(self.address, self._nbytes)


class Segment:
    """A mapped piece of shared memory; it lives as long as something refers to it or to a view of it."""

    def __init__(self, mapping: _Mapping, nbytes: int, offset: int = 0) -> None:
        self.nbytes = nbytes
        self.address = mapping.address + offset
        self._mapping, self._offset = mapping, offset
        # numpy and torch warn of read-only memory; what is made from an address does not know that it is
        self._bytes = (ctypes.c_uint8 * nbytes).from_address(self.address)
        self._bytes.mapping = mapping  # type: ignore[attr-defined]  # views keep the ctypes array, and it the mapping
        self._view = memoryview(self._bytes).cast("B")
        self._tensor = torch.frombuffer(self._bytes, dtype=torch.uint8)

    def region(self, offset: int, nbytes: int) -> Segment:
        """Return a part of the segment, which keeps the whole mapping alive."""
        return Segment(self._mapping, nbytes, self._offset + offset)

    def words(self, offset: int, count: int) -> memoryview:
        """64-bit integers from byte ``offset``; storing or loading one is a single instruction."""
        return self._view[offset : offset + 8 * count].cast("q")

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """Bytes as a uint8 tensor; of another rank's segment it must not be written."""
        return self._tensor[offset : offset + nbytes]


def share(rank: int, nbytes: int, exchange: BootstrapAllGather) -> list[Segment]:
    """Give every rank a segment of its own, and every rank all of them, in rank order; a collective.

    Args:
        rank: whose own segment is made writable.
        nbytes: of this rank's segment, above 0; other ranks' may be of other sizes.
        exchange: called twice.

    Raises:
        OSError: on all ranks alike, when one could not open another's memory.
    """
    offer = Offer(nbytes)
    try:
        cards = exchange(offer.card)
        segments: list[Segment] = []
        problem = ""
        try:
            for other, card in enumerate(cards):
                segments.append(offer.segment if other == rank else open_offered(card))
        except OSError as error:
            problem = f"rank {rank} cannot open the memory of rank {len(segments)}: {error}"
        problems = [said.decode() for said in exchange(problem.encode()) if said]
        if problems:
            raise OSError(problems[0])
        return segments
    finally:
        offer.close()


class Offer:
    """A new segment of this process, and the card by which others of this host open it until `close`.

    Memory that nobody touches is not taken: a segment may be larger than what is used of it.

    Raises:
        OSError: the system gives no such memory.
    """

    def __init__(self, nbytes: int) -> None:
        self._descriptor, self.segment, token = _create(nbytes)
        self.card = _CARD.pack(os.getpid(), self._descriptor, nbytes, token)

    def close(self) -> None:
        """Let nobody else open the segment; who has, keeps it. Again: nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_offered(card: bytes) -> Segment:
    """Map a segment that another process of this host offers, to be read only.

    Raises:
        OSError: it is no card, it cannot be opened, can still shrink (its maker's truncation would kill us), or is not
            the one meant.
    """
    try:
        process, number, nbytes, token = _CARD.unpack(card)
    except struct.error as error:
        raise OSError(f"{card[:80]!r} is no card of shared memory") from error
    return _attach(process, number, nbytes, token)


def _create(nbytes: int) -> tuple[int, Segment, bytes]:
    token = secrets.token_bytes(_TOKEN_BYTES)
    descriptor = os.memfd_create("gangline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes + _TOKEN_BYTES)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW)
        mapping = _Mapping(descriptor, nbytes + _TOKEN_BYTES, mmap.PROT_READ | mmap.PROT_WRITE)
        ctypes.memmove(mapping.address + nbytes, token, _TOKEN_BYTES)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, Segment(mapping, nbytes), token


def _attach(process: int, number: int, nbytes: int, token: bytes) -> Segment:
    path = f"/proc/{process}/fd/{number}"
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would have us wait
    try:
        if not fcntl.fcntl(descriptor, _F_GET_SEALS) & _F_SEAL_SHRINK:
            raise OSError(f"{path} can still shrink")
        if os.fstat(descriptor).st_size != nbytes + _TOKEN_BYTES:
            raise OSError(f"{path} holds {os.fstat(descriptor).st_size} bytes, expected {nbytes + _TOKEN_BYTES}")
        mapping = _Mapping(descriptor, nbytes + _TOKEN_BYTES, mmap.PROT_READ)
        if ctypes.string_at(mapping.address + nbytes, _TOKEN_BYTES) != token:
            raise OSError(f"{path} is another job's memory")
    finally:
        os.close(descriptor)
    return Segment(mapping, nbytes)
