"""Output of many processes on one terminal or in one log: whole lines, each prefixed by the name of its process."""

from __future__ import annotations

import errno
import os
import re
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_PARTIAL_DELAY = 0.25
"""Seconds after which an incomplete line is shown: a question, or a stalled progress bar."""
_LONGEST = 1 << 20
"""Bytes at which a line is broken, to bound memory."""
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r(?!\n|\Z))")  # a trailing \r may be half of \r\n
_MESSAGE = b"\x1e"
"""Beginning of a line that is a message for the launcher: ASCII's record separator."""
_COLOURS = (36, 33, 35, 32, 34, 31)


@dataclass(eq=False, slots=True)
class Stream:
    """Standard output or standard error of one process."""

    prefix: bytes
    sink: _Sink
    pending: bytearray = field(default_factory=bytearray)
    """The incomplete last line."""
    shown: int = 0
    """Bytes of ``pending`` that are written already, at the end of the log."""
    unshown_since: float | None = None
    """Monotonic time of the first byte of ``pending`` that is not shown."""
    was_cut: bool = False
    """True if another process's line broke this one after its shown beginning."""
    on_message: Callable[[str], None] | None = None
    """Handler of the messages of a supervisor on another host, whose lines have their prefixes already."""


class Output:
    """Standard output and standard error of this process, shared by many streams."""

    def __init__(self, out: int = 1, errors: int = 2, host: str = "") -> None:
        """Write to the file descriptors ``out`` and ``errors``, which may be the same file; reports name the host."""
        self._reporter = b"gangline: " + (f"{host}: ".encode() if host else b"")
        self._out = _sink(out)
        self._errors = self._out if _is_same_file(out, errors) else _sink(errors)
        self._streams: list[Stream] = []

    def stream(self, label: str, number: int, *, is_error: bool) -> Stream:
        """Add a stream.

        Args:
            label: name of the process.
            number: index of the label's colour, on terminals with colours.
            is_error: write to standard error.
        """
        sink = self._errors if is_error else self._out
        prefix = f"[{label}]".encode()
        if sink.has_colours:
            prefix = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[number % len(_COLOURS)], prefix)
        stream = Stream(prefix + b" ", sink)
        self._streams.append(stream)
        return stream

    def relayed(self, on_message: Callable[[str], None] | None = None, *, is_error: bool) -> Stream:
        """Add a stream whose lines have prefixes already; messages among them go to a handler."""
        stream = Stream(b"", self._errors if is_error else self._out, on_message=on_message)
        self._streams.append(stream)
        return stream

    def write(self, stream: Stream, data: bytes) -> None:
        """Write the lines that ``data`` completes, and buffer the rest.

        Raises:
            OSError: if writing fails; BrokenPipeError if the reader of a pipe is gone.
        """
        stream.pending += data
        end, lines = 0, []
        for match in _LINE.finditer(stream.pending):
            end = match.end()
            if stream.on_message is not None and match[1].startswith(_MESSAGE):
                stream.on_message(match[1][1:].decode())
                continue
            if match[1] or match[2] != b"\r":  # a progress bar may begin with \r: no line to end
                lines.append((match[1], match[2] != b"\r"))
        if len(stream.pending) - end > _LONGEST:
            lines.append((bytes(stream.pending[end:]), True))
            end = len(stream.pending)
        if end:
            if lines:
                stream.sink.write(stream, lines)
            del stream.pending[:end]
            stream.shown, stream.was_cut, stream.unshown_since = 0, False, None
        if stream.pending and stream.unshown_since is None:
            stream.unshown_since = time.monotonic()

    def seconds_left(self) -> float | None:
        """Return the seconds until `show_beginnings` has something to show; None if there is nothing."""
        waiting = [stream.unshown_since for stream in self._streams if stream.unshown_since is not None]
        return max(0.0, min(waiting) + _PARTIAL_DELAY - time.monotonic()) if waiting else None

    def show_beginnings(self) -> None:
        """Write incomplete lines that are older than the delay; raises as `write`."""
        now = time.monotonic()
        for stream in self._streams:
            if stream.unshown_since is not None and stream.unshown_since + _PARTIAL_DELAY <= now:
                stream.unshown_since = None
                stream.sink.write_beginning(stream)

    def end(self, stream: Stream) -> None:
        """End a stream: write its incomplete last line; raises as `write`."""
        if stream in self._streams:
            self._streams.remove(stream)
            if stream.pending:
                self.write(stream, b"\n")

    def report(self, text: str) -> None:
        """Write a line of the launcher itself to standard error; raises as `write`."""
        own = Stream(self._reporter, self._errors)
        own.sink.write(own, [(text.encode(errors="replace"), True)])

    def send(self, message: str) -> None:
        """Write a message for the launcher on another host to standard error; raises as `write`."""
        own = Stream(_MESSAGE, self._errors)
        own.sink.write(own, [(message.encode(), True)])

    def close(self) -> None:
        """End the last row, so that the cursor is at the beginning of one; raises as `write`."""
        for sink in {self._out, self._errors}:
            sink.close()

    def lost(self) -> int:
        """Return the number of bytes that did not fit on the disk."""
        return sum(sink.lost for sink in {self._out, self._errors})


class _Sink:
    """File or pipe, where nothing can be overwritten: an interrupted line is broken and continued later."""

    has_colours = False

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.lost = 0
        """Number of bytes that did not fit on the disk."""
        self._open: Stream | None = None
        """Stream whose incomplete line is at the end of the file."""

    def write(self, stream: Stream, lines: Sequence[tuple[bytes, bool]]) -> None:
        """Write lines.

        Args:
            stream: stream of the lines; the first of them begins with its ``pending``.
            lines: text, and whether the line is final; on a terminal the next line overwrites one that is not.
        """
        out = bytearray()
        if self._open is not stream:
            out += self._break()
        for text, _ in lines:
            if self._open is stream:
                out += text[stream.shown :] + b"\n"
            elif text or not stream.was_cut:
                out += stream.prefix + text + b"\n"
            self._open = None
            stream.was_cut = False
        self._put(out)

    def write_beginning(self, stream: Stream) -> None:
        out = bytearray()
        if self._open is not stream:
            out += self._break() + stream.prefix
        text = bytes(stream.pending).removesuffix(b"\r")
        out += text[stream.shown :]
        stream.shown, self._open = len(text), stream
        self._put(out)

    def close(self) -> None:
        self._put(self._break())

    def _put(self, data: bytes | bytearray) -> None:
        self.lost += write_what_fits(self.fd, data)

    def _break(self) -> bytes:
        """Break the incomplete line at the end; its rest will start a new line."""
        if self._open is None:
            return b""
        del self._open.pending[: self._open.shown]
        self._open.shown, self._open.was_cut, self._open = 0, True, None
        return b"\n"


class _Terminal(_Sink):
    """Terminal: the last row is overwritten until its line is complete, so no line is ever broken."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.has_colours = not os.environ.get("NO_COLOR")
        self._is_row_free = True

    def write(self, stream: Stream, lines: Sequence[tuple[bytes, bool]]) -> None:
        out = bytearray()
        for text, is_final in lines:
            out += self._free_row() + stream.prefix + text + (b"\n" if is_final else b"")
            self._is_row_free = is_final
        self._put(out)

    def write_beginning(self, stream: Stream) -> None:
        out = self._free_row() + stream.prefix + bytes(stream.pending).removesuffix(b"\r")
        self._is_row_free = False
        self._put(out)

    def close(self) -> None:
        if not self._is_row_free:
            self._is_row_free = True
            self._put(b"\n")

    def _free_row(self) -> bytes:
        return b"" if self._is_row_free else b"\r\x1b[K"


def _sink(fd: int) -> _Sink:
    return _Terminal(fd) if os.isatty(fd) and os.environ.get("TERM") != "dumb" else _Sink(fd)


def _is_same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:  # one of them is closed
        return False


def write_what_fits(fd: int, data: bytes | bytearray) -> int:
    """Write data to a file or pipe; return the number of bytes that a full disk refused.

    Raises:
        OSError: if writing fails for another reason.
    """
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
