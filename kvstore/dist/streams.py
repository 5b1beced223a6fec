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

import zmq

from collectives.errors import ProtocolError
from kvstore.dist.protocol import MAX_PART

_HEAD = struct.Struct("<4sI")  # magic, number of frames; their sizes follow, as 64-bit integers
_MAGIC = b"glu1"
_MOST_FRAMES = 1 << 16
_READ = 1 << 18
_BUFFER = 1 << 20
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class Stream:
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
        self._came = bytearray()

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
        head = _HEAD.pack(_MAGIC, len(frames)) + struct.pack(f"<{len(frames)}Q", *sizes)
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

    def receive(self) -> Iterator[list[zmq.Frame]]:
        """The messages that are here.

        Raises:
            ConnectionError: the other end is gone, and all it said has been given.
            ProtocolError: what came is no message; the stream is of no use any more.
        """
        while True:
            try:
                piece = self._socket.recv(_READ)
            except BlockingIOError:
                return
            if not piece:
                raise ConnectionResetError("the other end is closed")
            self._came += piece
            yield from self._messages()
            if len(piece) < _READ:
                return

    def close(self) -> None:
        """Close; again: nothing."""
        self._socket.close()

    def _messages(self) -> Iterator[list[zmq.Frame]]:
        begin = 0
        while (message := self._message_at(begin)) is not None:
            frames, begin = message
            yield frames
        if begin:
            del self._came[:begin]

    def _message_at(self, begin: int) -> tuple[list[zmq.Frame], int] | None:
        if len(self._came) - begin < _HEAD.size:
            return None
        magic, count = _HEAD.unpack_from(self._came, begin)
        if magic != _MAGIC or not 0 < count <= _MOST_FRAMES:
            raise ProtocolError(f"{bytes(self._came[begin : begin + 16])!r} came, which is no message")
        begin += _HEAD.size
        if len(self._came) - begin < 8 * count:
            return None
        sizes = struct.unpack_from(f"<{count}Q", self._came, begin)
        begin += 8 * count
        if sum(sizes) > MAX_PART:
            raise ProtocolError(f"a message of {sum(sizes)} bytes came; expected at most {MAX_PART}")
        if len(self._came) - begin < sum(sizes):
            return None
        frames = []
        for size in sizes:
            frames.append(zmq.Frame(bytes(self._came[begin : begin + size])))
            begin += size
        return frames, begin


class Listener:
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

    def accept(self) -> Stream | None:
        """Somebody of the same user who has come, or None."""
        try:
            return Stream(self._socket.accept()[0])
        except (BlockingIOError, PermissionError):
            return None

    def close(self) -> None:
        """Close; again: nothing."""
        self._socket.close()


def connect(name: str) -> Stream:
    """A stream to a `Listener` of this host.

    Raises:
        OSError: there is none, or it is another user's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return Stream(connection)
