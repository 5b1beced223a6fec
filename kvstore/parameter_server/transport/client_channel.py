"""A worker's way to one server: by ZeroMQ, or on one host by a stream."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence, Set
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from gangline.collectives.errors import ProtocolError
from gangline.kvstore.parameter_server.transport import unix_stream
from gangline.kvstore.parameter_server.transport.poller import Poller, Source
from gangline.kvstore.parameter_server.transport.socket_buffers import fit_buffers

_COPIED = 1 << 16
_RETRY_SECONDS = 0.1

Frames = Sequence[bytes | memoryview]


class Channel(Protocol):
    """What a worker and a server talk by; what a lost connection has swallowed is the caller's to send again."""

    @property
    def is_full(self) -> bool:
        """Whether something waits for room to go out, which `receive` moves."""

    def arm(self, watch: Poller) -> None:
        """Have it watched; to be called before each wait, with the same watch."""

    def has_come(self, events: Set[Source]) -> bool:
        """Whether there is a connection that was not there when this was asked last; ``events``: what a wait gave."""

    def send(self, frames: Frames) -> None:
        """Send a message; it is lost where there is no connection."""

    def receive(self, events: Set[Source]) -> Iterator[list[memoryview]]:
        """The messages that have come."""

    def close(self) -> None:
        """Give it back; what was sent still goes out."""


def open_channel(address: str, context: zmq.Context[zmq.Socket[bytes]], identity: bytes) -> Channel:
    """The best way to a server.

    Args:
        address: as the server gave it: "tcp://HOST:PORT", and behind a blank the name of its `streams.Listener`.
        context: for ZeroMQ's socket.
        identity: of this worker.
    """
    endpoint, _, name = address.partition(" ")
    if name and os.environ.get("GANGLINE_TRANSPORT") != "tcp":
        try:
            return StreamChannel(name, identity)
        except OSError:  # the server is on another host, or another user's
            pass
    return SocketChannel(endpoint, context, identity)


class SocketChannel:
    """A DEALER, which connects again by itself."""

    def __init__(self, endpoint: str, context: zmq.Context[zmq.Socket[bytes]], identity: bytes) -> None:
        self._socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, -1),
            (zmq.IPV6, int("[" in endpoint)),
        ):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.IDENTITY, identity)
        fit_buffers(self._socket, endpoint.removeprefix("tcp://").rpartition(":")[0])
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(endpoint)
        self._is_armed = False

    @property
    def is_full(self) -> bool:  # noqa: D102  ZeroMQ's thread sees to it
        return False

    def arm(self, watch: Poller) -> None:  # noqa: D102  as Channel's, and so below
        if not self._is_armed:
            self._is_armed = True
            watch.add(self._socket)
            watch.add(self._monitor)

    def has_come(self, events: Set[Source]) -> bool:  # noqa: D102
        came = False
        while self._monitor in events and self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            came = True
        return came

    def send(self, frames: Frames) -> None:  # noqa: D102
        # What is large is read where it lies, and stays there until it is acknowledged.
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=sum(map(len, frames)) <= _COPIED)

    def receive(self, events: Set[Source]) -> Iterator[list[memoryview]]:  # noqa: D102
        while self._socket in events:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield [frame.buffer for frame in frames]

    def close(self) -> None:  # noqa: D102
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(1000)


class StreamChannel:
    """A stream, made anew when it breaks."""

    def __init__(self, name: str, identity: bytes) -> None:
        self._name = name
        self._identity = identity
        self._stream: unix_stream.UnixStream | None = None
        self._is_new = False
        self._watch: Poller | None = None  # set while it watches the stream
        self._looks_for_room = False
        self._due = 0.0
        self._connect()

    @property
    def is_full(self) -> bool:  # noqa: D102
        return self._stream is not None and self._stream.is_full

    def arm(self, watch: Poller) -> None:  # noqa: D102
        if self._stream is None:
            return
        if self._watch is None:
            self._watch = watch
            watch.add(self._stream.fileno())
            self._looks_for_room = False
        if self._stream.is_full != self._looks_for_room:
            self._looks_for_room = self._stream.is_full
            watch.look_for_room(self._stream.fileno(), room=self._looks_for_room)

    def has_come(self, events: Set[Source]) -> bool:  # noqa: ARG002, D102
        if self._stream is None and time.monotonic() >= self._due:
            self._due = time.monotonic() + _RETRY_SECONDS
            try:
                self._connect()
            except OSError:
                return False
        came, self._is_new = self._is_new, False
        return came

    def send(self, frames: Frames) -> None:  # noqa: D102
        if self._stream is not None:
            try:
                self._stream.send(frames)
            except ConnectionError:
                self._lose()

    def receive(self, events: Set[Source]) -> Iterator[list[memoryview]]:  # noqa: D102
        if self._stream is None or self._stream.fileno() not in events:
            return
        stream = self._stream
        try:
            stream.flush()
            for frames in stream.receive():
                yield frames
                if self._stream is not stream:  # an answer to it found the connection broken
                    return
        except (ConnectionError, ProtocolError):
            self._lose()

    def close(self) -> None:  # noqa: D102
        self._lose()

    def _connect(self) -> None:
        self._stream = unix_stream.connect(self._name)
        self._is_new = True
        self.send([self._identity])

    def _lose(self) -> None:
        if self._stream is not None:
            if self._watch is not None:
                self._watch.remove(self._stream.fileno())
                self._watch = None
            self._stream.close()
            self._stream = None
