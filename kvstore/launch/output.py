"""Many processes on one terminal or in one log: whole lines, each with the name of its process, and in time."""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_QUIET = 0.25
"""Seconds after which the beginning of a line is shown without its end: a question, or a bar that does not move on."""
_LONGEST = 1 << 20
"""Bytes at which a line is cut, so that none fills the memory."""
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\n|\r(?!\n|\Z))")  # a last \r may be the first half of \r\n
_COLOURS = (36, 33, 35, 32, 34, 31)


@dataclass(eq=False, slots=True)
class Stream:
    """The standard output, or the standard error, of one process."""

    prefix: bytes
    sink: _Sink
    pending: bytearray = field(default_factory=bytearray)
    """The line that has not ended yet."""
    shown: int = 0
    """How much of it is to be seen already, at the open end of the log."""
    waits_since: float | None = None
    """When the first byte of ``pending`` came that was not shown."""
    was_cut: bool = False
    """Whether the line's beginning stands alone, for another process's line came between."""


class Output:
    """This process's standard output and standard error, shared by many streams."""

    def __init__(self, out: int = 1, errors: int = 2) -> None:
        """Write to the file descriptors ``out`` and ``errors``; one row is kept where both are the same file."""
        self._out = _sink(out)
        self._errors = self._out if _is_same_file(out, errors) else _sink(errors)
        self._streams: list[Stream] = []

    def stream(self, label: str, number: int, *, is_error: bool) -> Stream:
        """A new stream.

        Args:
            label: the process's name.
            number: chooses the colour, on terminals that have any.
            is_error: whether it goes to standard error.
        """
        sink = self._errors if is_error else self._out
        prefix = f"[{label}]".encode()
        if sink.has_colours:
            prefix = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[number % len(_COLOURS)], prefix)
        stream = Stream(prefix + b" ", sink)
        self._streams.append(stream)
        return stream

    def take(self, stream: Stream, data: bytes) -> None:
        """Write the lines that end in ``data``; what begins a line waits for its end.

        Raises:
            OSError: it cannot be written, as when the reader of a pipe has gone.
        """
        stream.pending += data
        end, lines = 0, []
        for match in _LINE.finditer(stream.pending):
            end = match.end()
            if match[1] or match[2] != b"\r":  # a progress bar may begin with \r, which ends nothing then
                lines.append((match[1], match[2] != b"\r"))
        if len(stream.pending) - end > _LONGEST:
            lines.append((bytes(stream.pending[end:]), True))
            end = len(stream.pending)
        if end:
            if lines:
                stream.sink.write(stream, lines)
            del stream.pending[:end]
            stream.shown, stream.was_cut, stream.waits_since = 0, False, None
        if stream.pending and stream.waits_since is None:
            stream.waits_since = time.monotonic()

    def seconds_left(self) -> float | None:
        """Until `show_beginnings` has something to show; None if it has not."""
        waiting = [stream.waits_since for stream in self._streams if stream.waits_since is not None]
        return max(0.0, min(waiting) + _QUIET - time.monotonic()) if waiting else None

    def show_beginnings(self) -> None:
        """Write the beginnings of lines that have waited long enough; errors as for `take`."""
        now = time.monotonic()
        for stream in self._streams:
            if stream.waits_since is not None and stream.waits_since + _QUIET <= now:
                stream.waits_since = None
                stream.sink.write_beginning(stream)

    def end(self, stream: Stream) -> None:
        """Write the last line of a stream even if it has no end; errors as for `take`."""
        if stream in self._streams:
            self._streams.remove(stream)
            if stream.pending:
                self.take(stream, b"\n")

    def say(self, text: str) -> None:
        """Write a line of the launcher's own to standard error; errors as for `take`."""
        own = Stream(b"gangline: ", self._errors)
        own.sink.write(own, [(text.encode(errors="replace"), True)])

    def close(self) -> None:
        """Leave the cursor at the beginning of a row; errors as for `take`."""
        for sink in {self._out, self._errors}:
            sink.close()


class _Sink:
    """A file or pipe: nothing that was written can be taken back."""

    has_colours = False

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._open: Stream | None = None
        """Whose line stands at the end, without an end."""

    def write(self, stream: Stream, lines: Sequence[tuple[bytes, bool]]) -> None:
        """Write lines, the first of which begins where the stream's pending one does.

        Each is its text and whether it is final, or the next one takes its place on a terminal.
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
        _write(self.fd, out)

    def write_beginning(self, stream: Stream) -> None:
        out = bytearray()
        if self._open is not stream:
            out += self._break() + stream.prefix
        text = bytes(stream.pending).removesuffix(b"\r")
        out += text[stream.shown :]
        stream.shown, self._open = len(text), stream
        _write(self.fd, out)

    def close(self) -> None:
        _write(self.fd, self._break())

    def _break(self) -> bytes:
        """End the open line early: the rest of it will begin another one."""
        if self._open is None:
            return b""
        del self._open.pending[: self._open.shown]
        self._open.shown, self._open.was_cut, self._open = 0, True, None
        return b"\n"


class _Terminal(_Sink):
    """A terminal: the last row is written over until its line has ended, so no line is ever cut in two."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.has_colours = not os.environ.get("NO_COLOR")
        self._is_row_free = True

    def write(self, stream: Stream, lines: Sequence[tuple[bytes, bool]]) -> None:
        out = bytearray()
        for text, is_final in lines:
            out += self._free_row() + stream.prefix + text + (b"\n" if is_final else b"")
            self._is_row_free = is_final
        _write(self.fd, out)

    def write_beginning(self, stream: Stream) -> None:
        out = self._free_row() + stream.prefix + bytes(stream.pending).removesuffix(b"\r")
        self._is_row_free = False
        _write(self.fd, out)

    def close(self) -> None:
        if not self._is_row_free:
            self._is_row_free = True
            _write(self.fd, b"\n")

    def _free_row(self) -> bytes:
        return b"" if self._is_row_free else b"\r\x1b[K"


def _sink(fd: int) -> _Sink:
    return _Terminal(fd) if os.isatty(fd) and os.environ.get("TERM") != "dumb" else _Sink(fd)


def _is_same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:  # one is closed
        return False


def _write(fd: int, data: bytes | bytearray) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # somebody we share it with wants it so
            select.select([], [fd], [])
