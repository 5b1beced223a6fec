"""Output of many processes on one terminal or in one log: whole lines, each prefixed with its process."""

from __future__ import annotations

import errno
import os
import re
import select
from collections.abc import Callable
from dataclasses import dataclass, field

_LONGEST = 1 << 20  # maximum bytes of a line, to bound memory; longer lines are broken
_END = re.compile(rb"\r\n|\n|\r(?!\n|\Z)")  # of a line; a trailing \r may be half of \r\n
_MESSAGE = b"\x1e"  # prefix of messages for the launcher: ASCII's record separator


@dataclass(eq=False, slots=True)
class Stream:
    """Standard output or standard error of one process."""

    prefix: bytes
    is_error: bool
    on_message: Callable[[str], None] | None = None
    """Handler of messages from a supervisor on another host, whose lines already have prefixes."""
    pending: bytearray = field(default_factory=bytearray)
    """The incomplete last line."""


class Output:
    """Standard output and standard error of this process, shared by many streams."""

    def __init__(self, out: int = 1, errors: int = 2, host: str = "") -> None:
        """Write to the file descriptors ``out`` and ``errors``; reports name the host."""
        self._reporter = b"gangline: " + (f"{host}: ".encode() if host else b"")
        self._files = {False: out, True: errors}
        self.lost = 0
        """Number of bytes that did not fit on the disk."""

    def stream(self, label: str, *, is_error: bool) -> Stream:
        """Return a stream to standard error or standard output whose lines are prefixed with the label."""
        return Stream(f"[{label}] ".encode(), is_error)

    def write(self, stream: Stream, data: bytes) -> None:
        """Write the lines that ``data`` completes, and buffer the remainder. Each state of a progress bar is a line.

        OSError if writing fails; BrokenPipeError if the reader of a pipe is gone.
        """
        stream.pending += data
        end, out = 0, bytearray()
        for match in _END.finditer(stream.pending):
            line, end = bytes(stream.pending[end : match.start()]), match.end()
            if stream.on_message is not None and line.startswith(_MESSAGE):
                stream.on_message(line[1:].decode())
            elif line or match[0] != b"\r":  # a progress bar may begin with \r: no line to end
                out += stream.prefix + line + b"\n"
        if len(stream.pending) - end > _LONGEST:
            out += stream.prefix + stream.pending[end:] + b"\n"
            end = len(stream.pending)
        del stream.pending[:end]
        self._put(out, is_error=stream.is_error)

    def end(self, stream: Stream) -> None:
        """Write the incomplete last line of a stream; raises as `write`."""
        if stream.pending:
            self.write(stream, b"\n")

    def report(self, text: str) -> None:
        """Write a line of the launcher itself to standard error; raises as `write`."""
        self._put(self._reporter + text.encode(errors="replace") + b"\n", is_error=True)

    def send(self, message: str) -> None:
        """Write a message for the launcher on another host to standard error; raises as `write`."""
        self._put(_MESSAGE + message.encode() + b"\n", is_error=True)

    def _put(self, data: bytes | bytearray, *, is_error: bool) -> None:
        self.lost += write_what_fits(self._files[is_error], data)


def write_what_fits(fd: int, data: bytes | bytearray) -> int:
    """Write data to a file or pipe; return the number of bytes that a full disk refused. OSError for other reasons."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # another process that shares the file made it non-blocking
            select.select([], [fd], [])
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            break
    return len(left)
