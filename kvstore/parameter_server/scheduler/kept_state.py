"""State of a scheduler that outlives its process, in memory that the launcher owns."""

from __future__ import annotations

import os
import struct
import zlib

_VERSION = struct.Struct("<Q")
_ENTRY = struct.Struct("<QQQ")
"""Offset, length and checksum of a content."""
_ENTRIES = 8
"""Offset of the entries of even and of odd versions."""
_BEGIN = 4096


class KeptState:
    """A content that is replaced as a whole; a process may be killed between any two instructions.

    The memory begins with the version of the content. Two entries, for even and for odd versions, say where it is.

    Args:
        descriptor: of the memory (a memfd).
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        words = os.pread(descriptor, _VERSION.size, 0)
        self._version = _VERSION.unpack(words)[0] if words else 0
        self._offset, self._length = _BEGIN, 0

    def read(self) -> bytes:
        """Return the content; b"" if there is none yet.

        Raises:
            OSError: if its checksum is wrong.
        """
        if not self._version:
            return b""
        entry = os.pread(self._descriptor, _ENTRY.size, self._entry(self._version))
        self._offset, self._length, checksum = _ENTRY.unpack(entry)
        content = os.pread(self._descriptor, self._length, self._offset)
        if zlib.crc32(content) != checksum:
            raise OSError(f"the scheduler's kept state of version {self._version} has a wrong checksum")
        return content

    def write(self, content: bytes) -> None:
        """Replace the content."""
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
