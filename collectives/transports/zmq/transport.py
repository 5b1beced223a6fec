"""Transport over ZeroMQ: "tcp" between hosts, "ipc" (Unix domain sockets) on one host if it has no shared memory."""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
import zmq
from torch import Tensor

from gangline.collectives.errors import DeadNodeError, ProtocolError
from gangline.collectives.host_memory import memory_of
from gangline.collectives.limits import PEER_LOST_SECONDS, TRANSPORT_LINGER_SECONDS, WAIT_CHECK_SECONDS
from gangline.collectives.transports.base import (
    PIECE,
    BootstrapAllGather,
    MessageTag,
    ReceiveRequest,
    SendRequest,
    Transport,
    WaitPolicy,
    wait_until,
)
from gangline.collectives.transports.zmq.context import SharedContext
from gangline.collectives.transports.zmq.peer_sockets import PeerSockets

INLINE = 1 << 16
"""Bytes up to which a message is copied into one frame with its header. Larger ones are sent from their memory, one
frame per piece."""

_MOST_UNREAD = 128
"""Maximum frames per rank in the receive buffer: 64 MiB of pieces. Beyond it, TCP blocks the sender."""
_MOST_COPIED = 1 << 24
"""Bytes of small messages to a rank after which a send waits until they are sent."""
_HEADER = struct.Struct("<4sQqQQ")  # magic, message number of the connection, sequence, code, bytes
_MAGIC = b"gll1"
_MAX_BYTES = 1 << 48
_SEND_POLL_SECONDS = 0.001  # nothing announces that a message has left
_DROP_SECONDS = 5.0  # for ZeroMQ's I/O thread to drop what a closed socket has not sent; takes well below 1 ms
_Result = TypeVar("_Result")
_CHECK_MS = round(WAIT_CHECK_SECONDS * 1000)
_COPIED = SendRequest()


class ZmqTransport(Transport):
    """Transport over one ZeroMQ connection per pair of ranks.

    A message is a header frame, which includes the data of a small message, and one frame per piece of a large one.
    ZeroMQ's I/O thread sends; a large tensor is sent from its own memory and received into its destination.

    Args:
        all_gather: between the ranks; called once.
        wait_policy: called while this rank waits.
        address: "ipc" or "tcp://HOST", and ``context``: see `PeerSockets`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        all_gather: BootstrapAllGather,
        wait_policy: WaitPolicy,
        *,
        address: str,
        context: SharedContext | None = None,
    ) -> None:
        self.name = "ipc" if address == "ipc" else "tcp"
        self.rank = rank
        self.size = size
        self._wait_policy = wait_policy
        options = {
            int(zmq.SNDHWM): 0,
            int(zmq.RCVHWM): 0 if address == "ipc" else _MOST_UNREAD,  # note 3 in zmq/context.py
            int(zmq.MAXMSGSIZE): PIECE + INLINE,
            # Effectively never: a reconnection would lose messages in flight. Not -1: note 3.
            int(zmq.RECONNECT_IVL): (1 << 31) - 1,
        }
        self.peers = PeerSockets(
            rank,
            size,
            all_gather,
            address=address,
            options=options,
            check=lambda missing, _: wait_policy.check(missing),
            context=context,
        )
        for connection in self.peers.sockets.values():
            connection.socket.copy_threshold = 0  # a copied last frame would be done before the frames ahead of it
        self._sent = dict.fromkeys(self.peers.sockets, 0)  # number of messages, by which losses are detected
        self._received = dict.fromkeys(self.peers.sockets, 0)
        self._trackers: dict[int, zmq.MessageTracker] = {}  # of the last frame to each rank from a tensor's memory
        self._copied = dict.fromkeys(self.peers.sockets, 0)  # bytes of small messages since the last one waited for
        self._has_failed = False
        self._wake_event: int | None = None  # file descriptor

    def send(self, to: int, data: Tensor, message_tag: MessageTag) -> SendRequest:  # noqa: D102
        view = memory_of(data)
        header = _HEADER.pack(_MAGIC, self._sent[to], message_tag.sequence, message_tag.code, len(view))
        self._sent[to] += 1
        if len(view) <= INLINE:
            self._copied[to] += len(view)
            if self._copied[to] < _MOST_COPIED:
                self._send_frame(to, header + view)
                return _COPIED
            self._copied[to] = 0
            return _TrackedSend(self, to, self._send_frame(to, header + view, track=True))
        self._send_frame(to, header)
        last = len(view) - (len(view) - 1) % PIECE - 1
        for begin in range(0, last, PIECE):
            self._send_frame(to, view[begin : begin + PIECE])
        tracker = self._send_frame(to, view[last:], track=True)
        if tracker is not None:
            self._trackers[to] = tracker
        return _TrackedSend(self, to, tracker)

    def receive(self, source: int) -> ReceiveRequest:  # noqa: D102
        return self.wait_for(source, partial(self.poll, source))

    def poll(self, source: int) -> ReceiveRequest | None:  # noqa: D102
        frame = self.peers.sockets[source].receive_frame()
        if frame is None:
            return None
        message_tag, nbytes, body = _read_header(source, self._received[source], frame)
        self._received[source] += 1
        return _PieceReceive(self, source, message_tag, nbytes) if body is None else _InlineReceive(message_tag, body)

    def progress(self) -> bool:  # noqa: D102
        return False  # ZeroMQ's I/O thread sends

    def waiter(self, sources: Collection[int], targets: Collection[int]) -> Callable[[float], None]:  # noqa: D102
        if self._wake_event is None:
            self._wake_event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_event)
        poll = select.poll()
        for descriptor in (self._wake_event, *(self.peers.sockets[source].socket.FD for source in sources)):
            poll.register(descriptor, select.POLLIN)

        def wait(seconds: float) -> None:
            poll.poll(1000 * (min(seconds, _SEND_POLL_SECONDS) if targets else seconds))

        return wait

    def wake(self) -> None:  # noqa: D102
        if self._wake_event is not None:
            os.eventfd_write(self._wake_event, 1)

    def withdraw(self) -> None:  # noqa: D102
        unsent = {to: tracker for to, tracker in self._trackers.items() if not tracker.done}
        for to in unsent:  # frames that have not left are dropped, and the receiver sees that the connection is lost
            self.peers.sockets[to].close(0)
        for tracker in unsent.values():
            with suppress(zmq.NotDone):
                tracker.wait(_DROP_SECONDS)

    def close(self) -> None:  # noqa: D102
        if self._wake_event is not None:
            os.close(self._wake_event)
            self._wake_event = None
        linger_ms = round(TRANSPORT_LINGER_SECONDS * 1000)
        for connection in self.peers.sockets.values():
            if not connection.socket.closed:
                connection.poll_monitor()
                connection.close(0 if self._has_failed or connection.down_since is not None else linger_ms)
        self.peers.close(0)

    def check_wait(self, peer: int, *, is_blocked: bool) -> None:
        """Raise if waiting for a rank cannot succeed; ``is_blocked``: the connection to it is lost.

        Raises:
            DeadNodeError: if the connection is lost and membership has not reported why in time.
            GanglineError: if `WaitPolicy.check` raises it.
        """
        try:
            self._wait_policy.check([peer] if is_blocked else [])
            lost = self.peers.sockets[peer].down_since
            if lost is not None and time.monotonic() - lost > PEER_LOST_SECONDS:
                raise DeadNodeError(f"rank {self.rank} lost its connection with rank {peer}")
        except BaseException:
            self._has_failed = True
            raise

    def wait_for(self, source: int, take: Callable[[], _Result | None]) -> _Result:
        """Block until ``take()``, which never blocks, returns a result from a rank; return the result."""
        taken = take()
        if taken is not None:
            return taken
        connection = self.peers.sockets[source]

        def has_taken() -> bool:
            nonlocal taken
            taken = take()
            return taken is not None

        def check() -> None:
            connection.poll_monitor()
            is_lost = connection.down_since is not None
            if not (is_lost and connection.socket.poll(0)):  # it arrived before the connection was lost
                # While the connection is up, data from before the rank closed may still arrive.
                self.check_wait(source, is_blocked=is_lost)

        wait_until(has_taken, lambda _: connection.socket.poll(_CHECK_MS), check)
        assert taken is not None
        return taken

    def _send_frame(self, to: int, data: bytes | memoryview, *, track: bool = False) -> zmq.MessageTracker | None:
        connection = self.peers.sockets[to]
        try:
            return connection.send_frame(data, copy=len(data) <= INLINE and not track, track=track)
        except zmq.Again:  # no connection: there is no high-water mark
            connection.poll_monitor()
            self.check_wait(to, is_blocked=True)
            return None


class _TrackedSend(SendRequest):
    def __init__(self, transport: ZmqTransport, to: int, tracker: zmq.MessageTracker | None) -> None:
        self._transport = transport
        self._to = to
        self._tracker = tracker  # of the last frame, which leaves last; None: not sent, as there was no connection

    def is_done(self) -> bool:
        return self._tracker is not None and self._tracker.done

    def wait(self) -> None:
        def pause(_: float) -> None:
            if self._tracker is None:
                time.sleep(WAIT_CHECK_SECONDS)
            else:
                with suppress(zmq.NotDone):
                    self._tracker.wait(WAIT_CHECK_SECONDS)

        wait_until(self.is_done, pause, lambda: self._transport.check_wait(self._to, is_blocked=True))


class _InlineReceive(ReceiveRequest):
    """Small message that arrived in one frame with its header."""

    def __init__(self, message_tag: MessageTag, body: memoryview) -> None:
        self.message_tag, self.nbytes = message_tag, len(body)
        self._body = body

    def piece(self, index: int) -> Tensor:  # noqa: ARG002  it has one piece
        return torch.frombuffer(bytearray(self._body), dtype=torch.uint8)  # copied, as the frame is not aligned

    def into(self, target: Tensor) -> None:
        if self.nbytes:
            memory_of(target)[:] = self._body

    def done(self) -> None:
        pass


class _PieceReceive(ReceiveRequest):
    """Large message, one frame per piece."""

    def __init__(self, transport: ZmqTransport, source: int, message_tag: MessageTag, nbytes: int) -> None:
        self.message_tag, self.nbytes = message_tag, nbytes
        self._transport, self._source = transport, source
        self._connection = transport.peers.sockets[source]
        self._next = 0  # piece
        self._frame: zmq.Frame | None = None  # owns the memory of the last piece returned

    def piece(self, index: int) -> Tensor:
        self._skip_to(index)
        self._frame = self._transport.wait_for(self._source, self._connection.receive_frame)
        self._count(len(self._frame))
        return torch.frombuffer(self._frame.buffer, dtype=torch.uint8)

    def into(self, target: Tensor) -> None:
        view = memory_of(target)
        while self._begin < self.nbytes:
            piece = view[self._begin : self._begin + PIECE]
            self._count(self._transport.wait_for(self._source, partial(self._connection.receive_into, piece)))

    def done(self) -> None:
        self._skip_to(self.pieces)
        self._frame = None

    @property
    def _begin(self) -> int:
        return self._next * PIECE

    def _skip_to(self, index: int) -> None:
        while self._next < index:
            self._count(len(self._transport.wait_for(self._source, self._connection.receive_frame)))

    def _count(self, nbytes: int) -> None:
        expected = min(PIECE, self.nbytes - self._begin)
        if nbytes != expected:
            raise ProtocolError(f"rank {self._source} sent {nbytes} bytes as a piece of a message, expected {expected}")
        self._next += 1


def _read_header(source: int, expected: int, frame: zmq.Frame) -> tuple[MessageTag, int, memoryview | None]:
    """Return tag and bytes of the message with the ``expected`` number, and its data if its first frame includes it."""
    view = frame.buffer
    if len(view) < _HEADER.size:
        raise ProtocolError(f"rank {source} sent {len(view)} bytes; expected a message header of {_HEADER.size}")
    magic, number, sequence, code, nbytes = _HEADER.unpack_from(view)
    inline = nbytes if nbytes <= INLINE else 0
    if magic != _MAGIC or nbytes > _MAX_BYTES or len(view) != _HEADER.size + inline:
        raise ProtocolError(f"rank {source} sent {bytes(view[: _HEADER.size])!r}, which is not a message header")
    if number != expected:
        raise ProtocolError(f"rank {source} sent message {number}, expected {expected}: messages were lost")
    return MessageTag(sequence, code), nbytes, view[_HEADER.size :] if nbytes <= INLINE else None
