"""State of a process that outlives it, in memory that the launcher owns."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

_HEAD = struct.Struct("<5Q")
"""Version of the log; then begin and end of the log of even, and of odd versions."""
_ENTRY = struct.Struct("<2Q")  # length and checksum of an entry; 0: it is not checked
_BEGIN = mmap.PAGESIZE


class KeptLog:
    """Entries, bytes each, in memory that outlives a process, which may be killed between any two instructions.

    Only processes of this user's job have the memory, a memfd. An entry counts once the end of the log, a word in the
    first page, is behind it: a part that a killed process has written of an entry is dropped. A log that replaces
    another one counts once the version, another word there, says so.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        ends: list[int]
        self._version, *ends = _HEAD.unpack(os.pread(descriptor, _HEAD.size, 0).ljust(_HEAD.size, b"\0"))
        begin, end = ends[2 * (self._version % 2) :][:2]
        self._begin, self._end = (begin, end) if end else (_BEGIN, _BEGIN)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries in the memory."""
        return self._end - self._begin

    def read(self) -> list[bytearray]:
        """Return the entries; OSError if one is damaged."""
        entries, at, end = [], self._begin, min(self._end, os.fstat(self._descriptor).st_size)
        while at < self._end:
            length, checksum = _ENTRY.unpack(os.pread(self._descriptor, _ENTRY.size, at).ljust(_ENTRY.size, b"\xff"))
            at += _ENTRY.size
            entry = bytearray(length if length <= end - at else 0)
            self._move(os.preadv, entry, at)
            if len(entry) != length or (checksum and zlib.crc32(entry) != checksum):
                raise OSError(f"the kept log of version {self._version} has a damaged entry at byte {at}")
            entries.append(entry)
            at += length
        return entries

    def append(self, entry: bytes) -> None:
        """Add an entry."""
        end = self._write([entry], self._end)
        self._set_ends(self._begin, end)

    def replace(self, entries: Sequence[bytes | memoryview]) -> None:
        """Replace all entries. The bytes of memoryviews, which may be large tensors, are not checked."""
        nbytes = sum(_ENTRY.size + len(one) for one in entries)
        begin = _BEGIN if _BEGIN + nbytes <= self._begin else self._end
        end = self._write(entries, begin)
        self._version += 1
        self._set_ends(begin, end)
        os.pwrite(self._descriptor, struct.pack("<Q", self._version), 0)

    def trim(self) -> None:
        """Return memory outside of the log to the system."""
        os.ftruncate(self._descriptor, self._end)
        before = self._begin // mmap.PAGESIZE * mmap.PAGESIZE - _BEGIN
        with suppress(OSError):  # a system that cannot keeps it in use
            if before > 0:
                with mmap.mmap(self._descriptor, before, offset=_BEGIN) as unused:
                    unused.madvise(mmap.MADV_REMOVE)

    def _set_ends(self, begin: int, end: int) -> None:
        os.pwrite(self._descriptor, struct.pack("<2Q", begin, end), 8 + 16 * (self._version % 2))
        self._begin, self._end = begin, end

    def _write(self, entries: Sequence[bytes | memoryview], at: int) -> int:
        """Write entries behind each other from an offset on; return their end."""
        for entry in entries:
            checksum = zlib.crc32(entry) if isinstance(entry, bytes) else 0
            self._move(os.pwritev, _ENTRY.pack(len(entry), checksum), at)
            self._move(os.pwritev, entry, at + _ENTRY.size)
            at += _ENTRY.size + len(entry)
        return at

    def _move(self, call: Any, content: bytes | bytearray | memoryview, offset: int) -> None:
        """Read or write all of a buffer: one call moves less than 2 GiB."""
        rest = memoryview(content)
        while rest:
            moved = call(self._descriptor, [rest], offset)
            rest, offset = rest[moved:], offset + moved


class KeptState:
    """An object that is replaced as a whole. Large buffers are not copied; pickle is safe, as nobody else writes it."""

    def __init__(self, descriptor: int) -> None:
        self._log = KeptLog(descriptor)

    def read(self) -> Any:
        """Return the object; None if there is none yet. OSError if it is damaged."""
        entries = self._log.read()
        return pickle.loads(entries[0], buffers=entries[1:]) if entries else None  # noqa: S301  the launcher's memory

    def write(self, state: object) -> None:
        """Replace the object."""
        buffers: list[memoryview] = []
        pickled = io.BytesIO()
        _Pickler(pickled, 5, buffer_callback=lambda one: buffers.append(one.raw())).dump(state)
        self._log.replace([pickled.getvalue(), *buffers])


class _Pickler(pickle.Pickler):
    """Pickler of tensors as their own bytes: torch's would write all memory that a view is part of."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")  # a process may not import it
        if torch is None or type(value) is not torch.Tensor or value.layout != torch.strided or not value.numel():
            return NotImplemented
        octets = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(octets.data), str(value.dtype), tuple(value.shape))


def _tensor(octets: bytearray, dtype: str, shape: tuple[int, ...]) -> Any:
    torch = import_module("torch")
    return torch.frombuffer(octets, dtype=torch.uint8).view(getattr(torch, dtype.removeprefix("torch."))).view(shape)
