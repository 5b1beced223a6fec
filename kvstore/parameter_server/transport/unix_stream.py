"""Messages over Unix sockets between processes of one host.

A ZeroMQ message wakes four threads between sender and receiver; a message sent here wakes only the receiver. Only
processes of the same user can connect (`unix_sockets`). A message is refused by the sizes in its head, before memory is
taken for it.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache

from gangline.collectives.errors import ProtocolError
from gangline.collectives.transports import unix_sockets
from gangline.kvstore.parameter_server.protocol import MAX_MESSAGE
from gangline.kvstore.parameter_server.transport.poller import Poller

_HEAD = struct.Struct("<4sI")  # magic and number of frames; their sizes follow as 64-bit integers
_MAGIC = b"glu1"
_MAX_FRAMES = 1 << 16
_READ = 1 << 18
_READS = 16  # reads before other connections have their turn
_BUFFER = 1 << 20


@lru_cache(64)
def _head(count: int) -> struct.Struct:
    """Return the format of the head of a message with this many frames."""
    return struct.Struct(f"<4sI{count}Q")


class UnixStream:
    """One end of a connection. Bytes that the kernel does not take at once are queued until `flush`.

    A poller reports the stream when it is readable, and writable while bytes are queued.
    """

    def __init__(self, connection: socket.socket, poller: Poller | None = None, limit: int = MAX_MESSAGE) -> None:
        self.limit = limit
        """Maximum bytes of the next message that is received."""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket = connection
        self.descriptor = connection.fileno()
        """-1 once closed."""
        self._queue: deque[memoryview] = deque()
        self._buffer = memoryview(bytearray(_READ))
        self._partial = bytearray()  # beginning of an incomplete message
        self._poller = poller
        self.is_full = False
        """True if bytes are queued."""
        if poller is not None:
            poller.add(self.descriptor)

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send a message; the frames may be modified afterwards. ConnectionError if the peer has closed it."""
        count, sizes = len(frames), [*map(len, frames)]
        layout, nbytes = _head(count), sum(sizes)
        head = layout.pack(_MAGIC, count, *sizes)
        if not self._queue and nbytes < _READ:  # fast path: one system call, which nearly always takes it all
            whole = b"".join((head, *frames))
            try:
                sent = self._socket.send(whole)
            except BlockingIOError:
                sent = 0
            if sent < layout.size + nbytes:
                self._queue.append(memoryview(whole)[sent:])
                self._update_poller()
            return
        self._queue.append(memoryview(head))
        self._queue.extend(memoryview(bytes(frame)) for frame in frames)
        self.flush()

    def flush(self) -> None:
        """Send queued bytes until the kernel takes no more; ConnectionError if the peer has closed the connection."""
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
        """Send queued bytes and yield the messages that have arrived, each frame in its own memory.

        It stops if the stream is closed meanwhile.

        Raises:
            ConnectionError: if the peer has closed the connection; all its messages have been yielded before.
            ProtocolError: if the bytes are not a message; the stream is unusable afterwards.
        """
        if self._queue:
            with suppress(ConnectionError):  # the peer may have sent messages before it closed the connection
                self.flush()
        for _ in range(_READS):
            try:
                count = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            if not count:
                raise ConnectionResetError("the peer has closed the connection")
            data: bytearray | memoryview = self._buffer[:count]
            if self._partial:
                self._partial += data
                data = self._partial
            begin, end = 0, len(data)
            while begin < end and (message := _message_at(data, begin, end, self.limit)) is not None:
                frames, begin = message
                yield frames
                if self.descriptor < 0:
                    return
            if data is self._partial:
                del data[:begin]
            elif begin < end:
                self._partial += data[begin:]
            if count < _READ:
                return

    def close(self) -> None:
        """Close the socket and remove it from the poller. Idempotent."""
        if self._poller is not None and self.descriptor >= 0:
            self._poller.remove(self.descriptor)
        self.descriptor = -1
        self._socket.close()

    def _update_poller(self) -> None:
        if self.is_full != bool(self._queue):
            self.is_full = not self.is_full
            if self._poller is not None:
                self._poller.poll_writable(self.descriptor, writable=self.is_full)


def _message_at(data: bytearray | memoryview, begin: int, end: int, limit: int) -> tuple[list[memoryview], int] | None:
    """Return a copy of the message at an offset and the offset of its end; None if it is incomplete."""
    if end - begin < _HEAD.size:
        return None
    magic, count = _HEAD.unpack_from(data, begin)
    if magic != _MAGIC or not 0 < count <= _MAX_FRAMES:
        raise ProtocolError(f"received {bytes(data[begin : begin + 16])!r}, which is not a message")
    if 8 * count > limit:
        raise ProtocolError(f"received a message of {count} frames; expected at most {limit} bytes")
    head = _head(count)
    if end - begin < head.size:
        return None
    _, _, *sizes = head.unpack_from(data, begin)
    begin += head.size
    nbytes = sum(sizes)
    if nbytes > limit:
        raise ProtocolError(f"received a message of {nbytes} bytes; expected at most {limit}")
    if end - begin < nbytes:
        return None
    frames: list[memoryview] = []
    for size in sizes:  # a new bytearray is aligned for any dtype
        frames += (memoryview(bytearray(data[begin : begin + size])),)
        begin += size
    return frames, begin


class UnixListener:
    """Listening Unix socket that accepts processes of the same user; OSError if the name is in use."""

    def __init__(self, name: str = "") -> None:
        self.name = name or f"gangline-server-{secrets.token_hex(16)}"
        """Abstract name without the leading zero byte."""
        self._socket = unix_sockets.listen(self.name)
        self.descriptor = self._socket.fileno()

    def accept(self, poller: Poller | None = None, limit: int = MAX_MESSAGE) -> UnixStream | None:
        """Return the next connection, or None; arguments as of `UnixStream`.

        PermissionError if a process of another user has connected; its connection is closed.
        """
        try:
            connection = self._socket.accept()[0]
        except BlockingIOError:
            return None
        try:
            unix_sockets.check_user(connection)
        except PermissionError:
            connection.close()
            raise
        return UnixStream(connection, poller, limit)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()


def connect(name: str, poller: Poller | None = None) -> UnixStream:
    """Connect to a `UnixListener` of this host; OSError if nobody of this user listens at the name."""
    return UnixStream(unix_sockets.connect(name), poller)
