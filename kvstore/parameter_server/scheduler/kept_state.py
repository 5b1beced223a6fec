"""State of a scheduler that outlives its process, in memory that the launcher owns."""

from __future__ import annotations

import os
import pickle
import struct
import zlib
from typing import Any

_VERSION = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQQ")
"""Offset, length and checksum of a content."""
_ENTRIES = 8
"""Offset of the entries of even and of odd versions."""
_BEGIN = 4096


class KeptState:
    """An object that is replaced as a whole; a process may be killed between any two instructions.

    Only this user's launcher and scheduler have the memory, so the object is pickled. It begins with the version of the
    object. Two entries, for even and for odd versions, say where it is.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        words = os.pread(descriptor, _VERSION.size, 0)
        self._version = _VERSION.unpack(words)[0] if words else 0
        self._offset, self._length = _BEGIN, 0

    def read(self) -> Any:
        """Return the object; None if there is none yet.

        Raises:
            OSError: if its checksum is wrong.
        """
        if not self._version:
            return None
        entry = os.pread(self._descriptor, _ENTRY.size, self._entry(self._version))
        self._offset, self._length, checksum = _ENTRY.unpack(entry)
        content = os.pread(self._descriptor, self._length, self._offset)
        if zlib.crc32(content) != checksum:
            raise OSError(f"the scheduler's kept state of version {self._version} has a wrong checksum")
        return pickle.loads(content)  # noqa: S301  the launcher's memory

    def write(self, state: object) -> None:
        """Replace the object."""
        content = pickle.dumps(state)
        fits_before = _BEGIN + len(content) <= self._offset
        offset = _BEGIN if fits_before else self._offset + self._length
        os.pwrite(self._descriptor, content, offset)
        self._version += 1
        entry = _ENTRY.pack(offset, len(content), zlib.crc32(content))
        os.pwrite(self._descriptor, entry, self._entry(self._version))
        os.pwrite(self._descriptor, _VERSION.pack(self._version), 0)
        self._offset, self._length = offset, len(content)

    def _entry(self, version: int) -> int:
        return _ENTRIES + _ENTRY.size * (version % 2)
