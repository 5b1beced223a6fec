"""State of a process that outlives it, in memory that the launcher owns."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zlib
from importlib import import_module
from typing import Any

_VERSION = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQQQ")
"""Offset, length of the pickle, its checksum, and length of the buffers behind it."""
_ENTRIES = 8
"""Offset of the entries of even and of odd versions."""
_BEGIN = 4096


class _Pickler(pickle.Pickler):
    """Pickler of tensors as their own bytes: torch's would write all memory that a view is part of."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")  # a scheduler does not import it
        if torch is None or type(value) is not torch.Tensor or value.layout != torch.strided or not value.numel():
            return NotImplemented
        octets = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(octets.data), str(value.dtype), tuple(value.shape))


def _tensor(octets: bytearray, dtype: str, shape: tuple[int, ...]) -> Any:
    torch = import_module("torch")
    return torch.frombuffer(octets, dtype=torch.uint8).view(getattr(torch, dtype.removeprefix("torch."))).view(shape)


class KeptState:
    """An object that is replaced as a whole; a process may be killed between any two instructions.

    Only processes of this user's job have the memory, a memfd, so the object is pickled. The memory begins with the
    version of the object. Two entries, for even and for odd versions, say where it is. Large buffers are not copied.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        words = os.pread(descriptor, _VERSION.size, 0)
        self._version = _VERSION.unpack(words)[0] if words else 0
        self._offset, self._length = _BEGIN, 0

    def read(self) -> Any:
        """Return the object; None if there is none yet. OSError if its checksum is wrong."""
        if not self._version:
            return None
        entry = os.pread(self._descriptor, _ENTRY.size, self._entry(self._version))
        self._offset, length, checksum, rest = _ENTRY.unpack(entry)
        self._length = length + rest
        content = os.pread(self._descriptor, length, self._offset)
        if zlib.crc32(content) != checksum:
            raise OSError(f"the kept state of version {self._version} has a wrong checksum")
        stream = io.BytesIO(content)
        sizes, offset, buffers = pickle.load(stream), self._offset + length, []  # noqa: S301  the launcher's memory
        for size in sizes:
            buffers.append(bytearray(size))
            self._move(os.preadv, buffers[-1], offset)
            offset += size
        return pickle.load(stream, buffers=buffers)  # noqa: S301

    def write(self, state: object) -> None:
        """Replace the object."""
        buffers: list[memoryview] = []
        pickled = io.BytesIO()
        _Pickler(pickled, 5, buffer_callback=lambda one: buffers.append(one.raw())).dump(state)
        head = pickle.dumps([one.nbytes for one in buffers]) + pickled.getvalue()
        length = len(head) + sum(one.nbytes for one in buffers)
        offset = _BEGIN if _BEGIN + length <= self._offset else self._offset + self._length
        behind = offset
        for content in (memoryview(head), *buffers):
            self._move(os.pwritev, content, behind)
            behind += len(content)
        self._version += 1
        entry = _ENTRY.pack(offset, len(head), zlib.crc32(head), length - len(head))
        os.pwrite(self._descriptor, entry, self._entry(self._version))
        os.pwrite(self._descriptor, _VERSION.pack(self._version), 0)
        self._offset, self._length = offset, length

    def _move(self, call: Any, content: bytearray | memoryview, offset: int) -> None:
        """Read or write all of a buffer: one call moves less than 2 GiB."""
        rest = memoryview(content)
        while rest:
            moved = call(self._descriptor, [rest], offset)
            rest, offset = rest[moved:], offset + moved

    def _entry(self, version: int) -> int:
        return _ENTRIES + _ENTRY.size * (version % 2)
