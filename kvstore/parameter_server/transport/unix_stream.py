"""Messages over Unix sockets between processes of one host.

A ZeroMQ message wakes four threads between sender and receiver; a message sent here wakes only the receiver. Sockets
have abstract names, which vanish when they are closed, and accept only processes of the same user.
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
from gangline.kvstore.parameter_server.protocol import MAX_SHARD
from gangline.kvstore.parameter_server.transport.poller import Poller

_HEAD = struct.Struct("<4sI")  # magic and number of frames; their sizes follow as 64-bit integers
_MAGIC = b"glu1"
_MAX_FRAMES = 1 << 16
_READ = 1 << 18
_BUFFER = 1 << 20
_CREDENTIALS = struct.Struct("3i")  # process, user, group


@lru_cache(64)
def _head(count: int) -> struct.Struct:
    """Return the format of the head of a message with this many frames."""
    return struct.Struct(f"<4sI{count}Q")


class UnixStream:
    """One end of a connection. Bytes that the kernel does not take at once are queued until `flush`.

    Args:
        connection: connected socket; closed with the stream.
        poller: reports the stream when it is readable, and writable while bytes are queued; None: no poller.

    Raises:
        PermissionError: if the peer belongs to another user.
    """

    def __init__(self, connection: socket.socket, poller: Poller | None = None) -> None:
        packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(packed)[1] != os.getuid():
            connection.close()
            raise PermissionError("the peer of a Unix socket belongs to another user")
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket = connection
        self._queue: deque[memoryview] = deque()
        self._buffer = memoryview(bytearray(_READ))
        self._partial = bytearray()  # beginning of an incomplete message
        self._poller = poller
        self._polls_writable = False
        if poller is not None:
            poller.add(self.fileno())

    def fileno(self) -> int:
        """Return the descriptor; -1 once closed."""
        return self._socket.fileno()

    @property
    def is_full(self) -> bool:
        """True if bytes are queued."""
        return bool(self._queue)

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send a message; the frames may be modified afterwards.

        Raises:
            ConnectionError: if the peer has closed the connection.
        """
        sizes = list(map(len, frames))
        head = _head(len(frames)).pack(_MAGIC, len(frames), *sizes)
        if not self._queue and sum(sizes) < _READ:  # fast path: one system call, which nearly always takes it all
            whole = b"".join((head, *frames))
            try:
                sent = self._socket.send(whole)
            except BlockingIOError:
                sent = 0
            if sent < len(whole):
                self._queue.append(memoryview(whole)[sent:])
                self._update_poller()
            return
        self._queue.append(memoryview(head))
        self._queue.extend(memoryview(bytes(frame)) for frame in frames)
        self.flush()

    def flush(self) -> None:
        """Send queued bytes until the kernel takes no more.

        Raises:
            ConnectionError: if the peer has closed the connection.
        """
        while self._queue:
            chunk = self._queue[0]
            try:
                sent = self._socket.send(chunk) if len(chunk) else 0
            except BlockingIOError:
                break
            if sent == len(chunk):
                self._queue.popleft()
            else:
                self._queue[0] = chunk[sent:]
        self._update_poller()

    def receive(self) -> Iterator[list[memoryview]]:
        """Yield the messages that have arrived, each frame in its own memory; stop if the stream is closed meanwhile.

        Raises:
            ConnectionError: if the peer has closed the connection; all its messages have been yielded before.
            ProtocolError: if the bytes are not a message; the stream is unusable afterwards.
        """
        while True:
            try:
                count = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            if not count:
                raise ConnectionResetError("the peer has closed the connection")
            for frames in self._messages(self._buffer[:count]):
                yield frames
                if self.fileno() < 0:
                    return
            if count < _READ:
                return

    def close(self) -> None:
        """Close the socket and remove it from the poller. Idempotent."""
        if self._poller is not None and self.fileno() >= 0:
            self._poller.remove(self.fileno())
        self._socket.close()

    def _update_poller(self) -> None:
        if self._poller is not None and self.is_full != self._polls_writable:
            self._polls_writable = self.is_full
            self._poller.poll_writable(self.fileno(), writable=self.is_full)

    def _messages(self, chunk: memoryview) -> Iterator[list[memoryview]]:
        """Yield the messages that this chunk completes and keep the rest."""
        data: bytearray | memoryview = chunk
        if self._partial:
            self._partial += chunk
            data = self._partial
        begin = 0
        while begin < len(data) and (message := _message_at(data, begin)) is not None:
            frames, begin = message
            yield frames
        if data is chunk:
            self._partial += chunk[begin:]
        else:
            del self._partial[:begin]


def _message_at(data: bytearray | memoryview, begin: int) -> tuple[list[memoryview], int] | None:
    """Return a copy of the message at an offset and the offset of its end; None if it is incomplete."""
    if len(data) - begin < _HEAD.size:
        return None
    magic, count = _HEAD.unpack_from(data, begin)
    if magic != _MAGIC or not 0 < count <= _MAX_FRAMES:
        raise ProtocolError(f"received {bytes(data[begin : begin + 16])!r}, which is not a message")
    head = _head(count)
    if len(data) - begin < head.size:
        return None
    _, _, *sizes = head.unpack_from(data, begin)
    begin += head.size
    nbytes = sum(sizes)
    if nbytes > MAX_SHARD:
        raise ProtocolError(f"received a message of {nbytes} bytes; expected at most {MAX_SHARD}")
    if len(data) - begin < nbytes:
        return None
    frames = []
    for size in sizes:  # a new bytearray is aligned for any dtype
        frames.append(memoryview(bytearray(data[begin : begin + size])))
        begin += size
    return frames, begin


class UnixListener:
    """Listening Unix socket with a random abstract name."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.name = f"gangline-{secrets.token_hex(16)}"
        """Abstract name without the leading zero byte."""
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(128)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    def accept(self, poller: Poller | None = None) -> UnixStream | None:
        """Return the next connection of a process of the same user, or None."""
        try:
            return UnixStream(self._socket.accept()[0], poller)
        except (BlockingIOError, PermissionError):
            return None

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()


def connect(name: str, poller: Poller | None = None) -> UnixStream:
    """Connect to a `UnixListener` of this host.

    Raises:
        OSError: if nobody listens at the name or the listener belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return UnixStream(connection, poller)
