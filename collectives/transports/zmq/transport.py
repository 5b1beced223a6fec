"""Messages over ZeroMQ: between hosts by tcp, on one host by ipc where ranks cannot share memory."""

from __future__ import annotations

import struct
import time
from typing import NamedTuple

import torch
import zmq
from torch import Tensor

from gangline.collectives.errors import DeadNodeError, ProtocolError
from gangline.collectives.transports.base import (
    PIECE,
    BootstrapAllGather,
    MessageTag,
    ReceiveRequest,
    SendRequest,
    Transport,
    WaitPolicy,
)
from gangline.collectives.transports.zmq.peer_sockets import PeerSockets

INLINE = 1 << 16
"""Up to so many bytes travel, copied, with their header; more are sent from their memory, a frame for each piece."""

_HEADER = struct.Struct("<4sQqQQ")  # magic, number of the message on its line, sequence, code, bytes
_MAGIC = b"gll1"
_MOST_BYTES = 1 << 48
_TICK_MS = 10
_LINGER_MS = (
    10_000  # what a finished call has sent still goes out; a rank that closes waits if the other is that far behind
)
_BROKEN_SECONDS = 30.0  # a lost connection is nearly always a dead rank: the roster may say so first


class ZmqTransport(Transport):
    """A connection for each pair of ranks.

    A message is a header, which holds what is small, and a frame for each piece of what is not. All sends are taken at
    once and go out in ZeroMQ's own thread; a large tensor is sent from where it lies, and received where it shall lie.

    Args:
        exchange: used once.
        wait_policy: asked while this rank waits.
        address: "ipc" or "tcp://HOST", see `PeerSockets`.

    Raises:
        RuntimeError, ValueError, StallError, ProtocolError: as `PeerSockets`.
    """

    def __init__(
        self, rank: int, size: int, exchange: BootstrapAllGather, wait_policy: WaitPolicy, *, address: str
    ) -> None:
        self.name = "ipc" if address == "ipc" else "tcp"
        self.rank = rank
        self.size = size
        self._wait_policy = wait_policy
        options = {
            int(zmq.SNDHWM): 0,
            int(zmq.RCVHWM): 0,  # libzmq (4.3) loses what it has not read yet when a line ends while it holds back
            int(zmq.MAXMSGSIZE): PIECE + INLINE,
            # Never again, for what was on its way on a lost connection would be missing; but not "-1", by which ZeroMQ
            # drops with the connection what came over it and is not read yet.
            int(zmq.RECONNECT_IVL): (1 << 31) - 1,
        }
        self._pairs = PeerSockets(rank, size, exchange, address=address, options=options)
        for line in self._pairs.lines.values():
            line.socket.copy_threshold = 0  # or a small last frame is copied, and done before the others left
        self._sent = dict.fromkeys(self._pairs.lines, 0)  # messages: what is lost or foreign shows in their numbers
        self._received = dict.fromkeys(self._pairs.lines, 0)
        self._is_sound = True

    def send(self, to: int, data: Tensor, message_tag: MessageTag) -> SendRequest:  # noqa: D102  as the base says
        view = data.numpy().data
        header = _HEADER.pack(_MAGIC, self._sent[to], message_tag.sequence, message_tag.code, len(view))
        self._sent[to] += 1
        if len(view) <= INLINE:
            self._put(to, header + view)
            return _SENT
        self._put(to, header)
        last = len(view) - (len(view) - 1) % PIECE - 1
        for begin in range(0, last, PIECE):
            self._put(to, view[begin : begin + PIECE])
        return _OnTheWay(self, to, self._put(to, view[last:], track=True))

    def receive(self, source: int) -> ReceiveRequest:  # noqa: D102
        while (receive_request := self.poll(source)) is None:
            self.wait(source)
        return receive_request

    def poll(self, source: int) -> ReceiveRequest | None:  # noqa: D102
        frame = self._pairs.lines[source].take()
        if frame is None:
            return None
        header, body = _read(source, self._received[source], frame)
        self._received[source] += 1
        if body is not None:
            return _Whole(header, body)
        return _InPieces(self, source, header)

    def progress(self) -> None:  # noqa: D102  ZeroMQ's thread does that
        pass

    def close(self) -> None:  # noqa: D102
        for line in self._pairs.lines.values():
            if not line.socket.closed:
                line.look()
                line.close(_LINGER_MS if self._is_sound and line.down_since is None else 0)
        self._pairs.close(0)

    def wait(self, source: int) -> None:
        """Return when a frame of a rank is here.

        Raises:
            DeadNodeError: the connection is lost.
            GanglineError: what `WaitPolicy.check` raises.
        """
        line = self._pairs.lines[source]
        while not line.socket.poll(_TICK_MS):
            line.look()
            is_over = line.down_since is not None
            if is_over and line.socket.poll(0):  # what came before the end
                return
            # While the connection is there, what a rank sent may still come, though it is missing nowhere else.
            self.be_patient(source, is_over=is_over)

    def be_patient(self, peer: int, *, is_over: bool) -> None:
        """See whether waiting still makes sense; ``is_over``: nothing more can come from, or go to, that rank.

        Raises:
            DeadNodeError: the connection is lost, and nobody knows better.
            GanglineError: what `WaitPolicy.check` raises.
        """
        try:
            self._wait_policy.check([peer] if is_over else [])
            lost = self._pairs.lines[peer].down_since
            if lost is not None and time.monotonic() - lost > _BROKEN_SECONDS:
                raise DeadNodeError(f"rank {self.rank} lost its connection with rank {peer}")
        except BaseException:
            self._is_sound = False
            raise

    def take(self, source: int) -> zmq.Frame:
        """The next frame of a rank; waits for it."""
        while (frame := self._pairs.lines[source].take()) is None:
            self.wait(source)
        return frame

    def take_into(self, source: int, target: memoryview) -> int:
        """The next frame of a rank into memory, as far as it fits; waits for it, gives the frame's bytes."""
        while (nbytes := self._pairs.lines[source].take_into(target)) is None:
            self.wait(source)
        return nbytes

    def _put(self, to: int, data: bytes | memoryview, *, track: bool = False) -> zmq.MessageTracker | None:
        line = self._pairs.lines[to]
        try:
            return line.put(data, copy=len(data) <= INLINE and not track, track=track)
        except zmq.Again:  # only without a connection: there is no high-water mark
            line.look()
            self.be_patient(to, is_over=True)
            return None


class _Header(NamedTuple):
    message_tag: MessageTag
    nbytes: int


class _Sent(SendRequest):
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


_SENT = _Sent()


class _OnTheWay(SendRequest):
    def __init__(self, transport: ZmqTransport, to: int, tracker: zmq.MessageTracker | None) -> None:
        self._transport = transport
        self._to = to
        self._tracker = tracker  # of the last frame, which goes out last; None: there was no way out

    def is_done(self) -> bool:
        return self._tracker is not None and self._tracker.done

    def wait(self) -> None:
        while not self.is_done():
            try:
                if self._tracker is not None:
                    self._tracker.wait(_TICK_MS / 1000)
                else:
                    time.sleep(_TICK_MS / 1000)
            except zmq.NotDone:
                pass
            if not self.is_done():
                self._transport.be_patient(self._to, is_over=True)


class _Whole(ReceiveRequest):
    def __init__(self, header: _Header, body: memoryview) -> None:
        self.message_tag, self.nbytes = header
        self._body = body

    def piece(self, index: int) -> Tensor:  # noqa: ARG002  there is one
        return torch.frombuffer(bytearray(self._body), dtype=torch.uint8)  # a copy, for what arrives is not aligned

    def into(self, target: Tensor) -> None:
        if self.nbytes:
            target.numpy().data[:] = self._body

    def done(self) -> None:
        pass


class _InPieces(ReceiveRequest):
    def __init__(self, transport: ZmqTransport, source: int, header: _Header) -> None:
        self.message_tag, self.nbytes = header
        self._transport = transport
        self._source = source
        self._next = 0
        self._frame: zmq.Frame | None = None  # holds the memory of the piece handed out last

    def piece(self, index: int) -> Tensor:
        self._skip(index)
        self._frame = self._transport.take(self._source)
        self._check(len(self._frame))
        return torch.frombuffer(self._frame.buffer, dtype=torch.uint8)

    def into(self, target: Tensor) -> None:
        view = target.numpy().data
        while self._begin < self.nbytes:
            self._check(self._transport.take_into(self._source, view[self._begin : self._begin + PIECE]))

    def done(self) -> None:
        self._skip(-(-self.nbytes // PIECE))
        self._frame = None

    @property
    def _begin(self) -> int:
        return self._next * PIECE

    def _skip(self, index: int) -> None:
        while self._next < index:
            self._check(len(self._transport.take(self._source)))

    def _check(self, nbytes: int) -> None:
        expected = min(PIECE, self.nbytes - self._begin)
        if nbytes != expected:
            raise ProtocolError(f"rank {self._source} sent {nbytes} bytes as a piece of a message, expected {expected}")
        self._next += 1


def _read(source: int, expected: int, frame: zmq.Frame) -> tuple[_Header, memoryview | None]:
    """The header of a message, and its body where it came along."""
    view = frame.buffer
    if len(view) < _HEADER.size:
        raise ProtocolError(f"rank {source} sent {len(view)} bytes in place of a header of {_HEADER.size}")
    magic, number, sequence, code, nbytes = _HEADER.unpack_from(view)
    inline = nbytes if nbytes <= INLINE else 0
    if magic != _MAGIC or nbytes > _MOST_BYTES or len(view) != _HEADER.size + inline:
        raise ProtocolError(f"rank {source} sent {bytes(view[: _HEADER.size])!r}, which is no header of a message")
    if number != expected:
        raise ProtocolError(f"rank {source} sent message {number}, expected {expected}: some were lost")
    return _Header(MessageTag(sequence, code), nbytes), view[_HEADER.size :] if nbytes <= INLINE else None
