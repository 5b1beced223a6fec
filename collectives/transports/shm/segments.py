"""Shared memory segments between processes of one host, each written only by the process that created it.

A segment is a sealed memfd. Other processes open it as /proc/<pid>/fd/<fd>, which the kernel allows to the same user
only. It has no file name to clean up: the kernel frees it when the last process that maps it ends, even if killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import secrets
import struct
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from gangline.collectives.compiled_core import core, has_collectives, problem

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034  # Python 3.11's fcntl has no names for them
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4
_TOKEN_BYTES = 16
_HANDLE = struct.Struct(f"<qqq{_TOKEN_BYTES}s")  # process id, file descriptor, bytes, token

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value
NO_TENSORS = "torch does not describe its tensors to C"
_KEEPS_ORDER = platform.machine() == "x86_64"


class Words(Protocol):
    """64-bit integers that one process stores and others load; what was written before a store is seen after the load.

    On x86-64 plain loads and stores have this order, but for a load after a store of another word. Other processors,
    such as aarch64, need atomic operations, which only `gangline._core` has.
    """

    def __iter__(self) -> Iterator[int]: ...
    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Words: ...
    def __setitem__(self, at: int, value: int) -> None: ...


def processor_problem() -> str:
    """Return why processes cannot share memory here; "" if they can."""
    if has_collectives:
        return ""
    return f"gangline._core, which shared memory needs, is not used: {problem or NO_TENSORS}"


class _AtomicWords:
    """Words at these addresses, by atomic operations of `gangline._core`; ``memory`` is kept."""

    def __init__(self, addresses: range, memory: object) -> None:
        assert core is not None
        self._word, self._addresses, self._memory = core.word, addresses, memory

    def __iter__(self) -> Iterator[int]:
        return map(self._word, self._addresses)

    def __getitem__(self, at: int | slice) -> Any:
        selected = self._addresses[at]
        return self._word(selected) if isinstance(selected, int) else _AtomicWords(selected, self._memory)

    def __setitem__(self, at: int, value: int) -> None:
        self._word(self._addresses[at], value)


class _Mapping:
    """Memory mapping, unmapped when nothing refers to it. Python's own mmap would hold a file descriptor open."""

    def __init__(self, descriptor: int, nbytes: int, protection: int) -> None:
        address = _libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"mapping {nbytes} bytes of shared memory: {os.strerror(number)}")
        self.address = int(address)
        self._nbytes = nbytes
        self._unmap = _libc.munmap  # at interpreter exit, this module may be cleared first

    def __del__(self) -> None:
        if hasattr(self, "_unmap"):
            self._unmap(self.address, self._nbytes)


class Segment:
    """Mapped shared memory; the mapping lives as long as the segment or any view of it."""

    def __init__(self, mapping: _Mapping, nbytes: int, offset: int = 0) -> None:
        self.nbytes = nbytes
        self.address = mapping.address + offset
        self._mapping, self._offset = mapping, offset
        # from_address hides that the memory may be read-only, of which numpy and torch would warn
        self._bytes = (ctypes.c_uint8 * nbytes).from_address(self.address)
        self._bytes.mapping = mapping  # type: ignore[attr-defined]  # views hold the ctypes array, which holds the mapping
        self._view = memoryview(self._bytes).cast("B")

    @cached_property
    @torch.inference_mode(mode=False)  # it is kept, and must be writable outside of that mode
    def _tensor(self) -> Tensor:
        return torch.frombuffer(self._bytes, dtype=torch.uint8)

    def region(self, offset: int, nbytes: int) -> Segment:
        """Return a part of the segment, which keeps the whole mapping alive."""
        return Segment(self._mapping, nbytes, self._offset + offset)

    def bytes(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes as a view."""
        return self._view[offset : offset + nbytes]

    def words(self, offset: int, count: int) -> Words:
        """Return ``count`` 64-bit integers from byte ``offset``; a load or store of one is a single instruction."""
        view = self._view[offset : offset + 8 * count].cast("q")
        if _KEEPS_ORDER:
            return view
        begin = self.address + offset
        return _AtomicWords(range(begin, begin + view.nbytes, 8), self._mapping)

    def tensor(self, offset: int, nbytes: int) -> Tensor:
        """Return bytes as a uint8 tensor; writing to another process's segment crashes this process."""
        return self._tensor[offset : offset + nbytes]


class Offer:
    """New segment of this process that other processes of this host can open by its ``handle`` until `close`.

    Untouched pages take no memory: a segment may be larger than the part that is used. A descriptor is the memfd of a
    process that outlives this one, empty or filled by a predecessor of this process; it is closed with the offer.

    Raises:
        OSError: if the system provides no such memory.
    """

    def __init__(self, nbytes: int, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("gangline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._descriptor = descriptor
        try:
            os.set_inheritable(descriptor, False)
            if not os.fstat(descriptor).st_size:
                os.ftruncate(descriptor, nbytes + _TOKEN_BYTES)
            nbytes = os.fstat(descriptor).st_size - _TOKEN_BYTES
            if not fcntl.fcntl(descriptor, _F_GET_SEALS):
                fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW)
            mapping = _Mapping(descriptor, nbytes + _TOKEN_BYTES, mmap.PROT_READ | mmap.PROT_WRITE)
            token = ctypes.string_at(mapping.address + nbytes, _TOKEN_BYTES)
            if not any(token):
                token = secrets.token_bytes(_TOKEN_BYTES)
                ctypes.memmove(mapping.address + nbytes, token, _TOKEN_BYTES)
        except BaseException:
            self.close()
            raise
        self.segment = Segment(mapping, nbytes)
        self.handle = _HANDLE.pack(os.getpid(), self._descriptor, nbytes, token)

    def close(self) -> None:
        """Stop others from opening the segment; existing mappings stay. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_offered(handle: bytes) -> Segment:
    """Map a segment that another process of this host offers, read-only.

    Raises:
        OSError: if the handle is malformed, or the memory cannot be opened, can still shrink (truncation by its owner
            would crash this process), or is not the offered segment.
    """
    try:
        process, number, nbytes, token = _HANDLE.unpack(handle)
    except struct.error as error:
        raise OSError(f"{handle[:80]!r} is not a handle of shared memory") from error
    path = f"/proc/{process}/fd/{number}"
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # O_NONBLOCK: opening a pipe would block
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
