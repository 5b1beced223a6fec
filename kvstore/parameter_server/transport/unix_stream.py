"""Messages between processes of one host over a Unix socket: no thread of ZeroMQ's stands between the two ends.

A ZeroMQ message wakes four threads on its way, this one wakes the receiver. Sockets have abstract names, which the
kernel forgets with them, and take nobody but processes of the same user.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache

from gangline.collectives.errors import ProtocolError
from gangline.kvstore.parameter_server.protocol import MAX_PART

_HEAD = struct.Struct("<4sI")  # magic, number of frames; their sizes follow, as 64-bit integers
_MAGIC = b"glu1"
_MOST_FRAMES = 1 << 16
_READ = 1 << 18
_BUFFER = 1 << 20
_CREDENTIALS = struct.Struct("3i")  # process, user, group


@lru_cache(64)
def _head(count: int) -> struct.Struct:
    """What stands before so many frames."""
    return struct.Struct(f"<4sI{count}Q")


class UnixStream:
    """One end: what does not go out at once is kept until `flush`.

    Args:
        connection: connected; it is closed with the stream.

    Raises:
        PermissionError: the other end is another user's.
    """

    def __init__(self, connection: socket.socket) -> None:
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(packed)[1] != os.getuid():
            connection.close()
            raise PermissionError("the other end of a socket belongs to another user")
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket = connection
        self._leaving: deque[memoryview] = deque()
        self._room = memoryview(bytearray(_READ))
        self._came = bytearray()  # the beginning of a message whose end is still to come

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._socket.fileno()

    @property
    def is_full(self) -> bool:
        """Whether something waits for room: poll for writing too, and `flush`."""
        return bool(self._leaving)

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send a message.

        Raises:
            ConnectionError: the other end is gone.
        """
        sizes = [len(frame) for frame in frames]
        head = _head(len(frames)).pack(_MAGIC, len(frames), *sizes)
        if not self._leaving and sum(sizes) < _READ:  # nearly always: one call, and it all fits
            whole = b"".join((head, *frames))
            try:
                sent = self._socket.send(whole)
            except BlockingIOError:
                sent = 0
            if sent < len(whole):
                self._leaving.append(memoryview(whole)[sent:])
            return
        self._leaving.append(memoryview(head))
        self._leaving.extend(memoryview(bytes(frame)) for frame in frames)  # copies: the memory may change at once
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as there is room.

        Raises:
            ConnectionError: the other end is gone.
        """
        while self._leaving:
            piece = self._leaving[0]
            try:
                sent = self._socket.send(piece) if len(piece) else 0
            except BlockingIOError:
                return
            if sent == len(piece):
                self._leaving.popleft()
            else:
                self._leaving[0] = piece[sent:]

    def receive(self) -> Iterator[list[memoryview]]:
        """The messages that are here, each in memory of its own.

        Raises:
            ConnectionError: the other end is gone, and all it said has been given.
            ProtocolError: what came is no message; the stream is of no use any more.
        """
        while True:
            try:
                count = self._socket.recv_into(self._room)
            except BlockingIOError:
                return
            if not count:
                raise ConnectionResetError("the other end is closed")
            yield from self._messages(self._room[:count])
            if count < _READ:
                return

    def close(self) -> None:
        """Close; again: nothing."""
        self._socket.close()

    def _messages(self, piece: memoryview) -> Iterator[list[memoryview]]:
        """The messages that a piece ends, and those within it."""
        came: bytearray | memoryview = piece
        if self._came:
            self._came += piece
            came = self._came
        begin = 0
        while (message := _message_at(came, begin)) is not None:
            frames, begin = message
            yield frames
        if came is piece:
            self._came += piece[begin:]
        else:
            del self._came[:begin]


def _message_at(came: bytearray | memoryview, begin: int) -> tuple[list[memoryview], int] | None:
    """A copy of the message that begins there, and where it ends; None: its end is still to come."""
    if len(came) - begin < _HEAD.size:
        return None
    magic, count = _HEAD.unpack_from(came, begin)
    if magic != _MAGIC or not 0 < count <= _MOST_FRAMES:
        raise ProtocolError(f"{bytes(came[begin : begin + 16])!r} came, which is no message")
    head = _head(count)
    if len(came) - begin < head.size:
        return None
    _, _, *sizes = head.unpack_from(came, begin)
    begin += head.size
    nbytes = sum(sizes)
    if nbytes > MAX_PART:
        raise ProtocolError(f"a message of {nbytes} bytes came; expected at most {MAX_PART}")
    if len(came) - begin < nbytes:
        return None
    frames = []
    for size in sizes:  # each in memory of its own, which begins where elements may lie
        frames.append(memoryview(bytearray(came[begin : begin + size])))
        begin += size
    return frames, begin


class UnixListener:
    """Where streams of this host arrive."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.name = f"gangline-{secrets.token_hex(16)}"
        """Its abstract name, without the zero byte in front."""
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(128)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._socket.fileno()

    def accept(self) -> UnixStream | None:
        """Somebody of the same user who has come, or None."""
        try:
            return UnixStream(self._socket.accept()[0])
        except (BlockingIOError, PermissionError):
            return None

    def close(self) -> None:
        """Close; again: nothing."""
        self._socket.close()


def connect(name: str) -> UnixStream:
    """A stream to a `UnixListener` of this host.

    Raises:
        OSError: there is none, or it is another user's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return UnixStream(connection)
