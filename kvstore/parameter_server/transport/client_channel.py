"""Connection to a server or the scheduler: a Unix stream on the same host, a ZeroMQ socket to other hosts."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence, Set
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from gangline.collectives.environments.job_key import JobKey
from gangline.collectives.errors import ProtocolError
from gangline.collectives.limits import limits
from gangline.collectives.transports import unix_sockets
from gangline.collectives.transports.addresses import is_loopback, required_key
from gangline.collectives.transports.zmq.curve import HANDSHAKE_EVENTS, Handshakes, secure_connecting
from gangline.kvstore.parameter_server.transport import unix_stream
from gangline.kvstore.parameter_server.transport.pieces import PIECE, split
from gangline.kvstore.parameter_server.transport.poller import Poller, Source
from gangline.kvstore.parameter_server.transport.socket_buffers import close_cut_connections, limit_loopback_buffers

_COPIED = 1 << 16
_RETRY_SECONDS = 0.1
_PROBE_SECONDS = 0.5  # time to find out whether anybody listens at an address

ECHO = b"echo"
"""End of the identity of a process's connection that returns the scheduler's messages, see `start_echo`."""

Frames = Sequence[bytes | memoryview]
Context = zmq.Context[zmq.Socket[bytes]]


class Channel(Protocol):
    """Connection that is re-established when it is lost; the caller resends messages that were lost with it."""

    disconnected_at: float
    """`time.monotonic` seconds since when there is no connection; 0: there is one."""

    @property
    def problem(self) -> str:
        """Why no connection can be made, such as another job key; "" if one can."""

    @property
    def is_full(self) -> bool:
        """True if bytes are queued, which `receive` sends when there is room."""

    def reconnected(self, events: Set[Source]) -> bool:
        """Return whether a new connection was made since the last call; ``events``: result of the poller."""

    def send(self, frames: Frames) -> None:
        """Send a message; it is lost if there is no connection."""

    def receive(self, events: Set[Source]) -> Iterator[list[memoryview]]:
        """Yield the messages that have arrived."""

    def is_refused(self) -> bool:
        """Return True if the host of the peer answers that nobody listens there, False if the link may be cut."""

    def close(self) -> None:
        """Close the connection; what was sent is still delivered."""


def open_channel(address: str, context: Context, identity: bytes, poller: Poller, key: JobKey | None = None) -> Channel:
    """Connect over the fastest transport that works; ``key``: for addresses that need one, in place of this process's.

    The address is "tcp://HOST:PORT", "unix://NAME" of a `UnixListener`, or both with a space between them; in that of a
    server "process://ID" besides.
    """
    words = dict(word.split("://", 1) for word in address.split())
    if "unix" in words and ("tcp" not in words or os.environ.get("GANGLINE_TRANSPORT") != "tcp"):
        channel = StreamChannel(words["unix"], identity, poller)
        if not channel.disconnected_at or "tcp" not in words:  # else the peer is on another host, or of another user
            return channel
    # A restarted server, or another one, may get the port of a former process, to which a socket still connects again.
    # What that sends must not count there, and its identity must be another (note 5 in zmq/context.py).
    return SocketChannel(f"tcp://{words['tcp']}", context, identity + words.get("process", "").encode(), poller, key)


def scheduler_address(endpoint: str) -> str:
    """Return the address for `open_channel` of the scheduler at "tcp://HOST:PORT"."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_unix = unix_sockets.replaces_tcp(host.strip("[]"))
    return f"unix://{unix_sockets.name_of('scheduler', int(port))}" if is_unix else endpoint


def start_echo(endpoint: str, context: Context, identity: bytes) -> None:
    """Return each message of the scheduler at "tcp://HOST:PORT" to it, until the context is terminated.

    A ZeroMQ proxy does so, which holds no GIL: the scheduler learns that this process runs while the interpreter is
    busy. A stopped process returns nothing.
    """
    connection = _dealer(endpoint, context, identity + ECHO)
    secure_connecting(connection, required_key(endpoint.removeprefix("tcp://").rpartition(":")[0]))
    connection.connect(endpoint)

    def serve() -> None:
        try:
            zmq.proxy(connection, connection)
        except zmq.ContextTerminated:
            pass
        finally:
            connection.close()

    threading.Thread(target=serve, name="gangline-echo", daemon=True).start()


def _dealer(endpoint: str, context: Context, identity: bytes) -> zmq.Socket[bytes]:
    """Return a socket that is not connected yet."""
    dealer = context.socket(zmq.DEALER)
    dealer.set_hwm(0)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.MAXMSGSIZE, -1)
    dealer.setsockopt(zmq.IPV6, int("[" in endpoint))
    dealer.setsockopt(zmq.IDENTITY, identity)
    limit_loopback_buffers(dealer, endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]"))
    close_cut_connections(dealer, limits().heartbeat_limit)
    return dealer


class SocketChannel:
    """ZeroMQ DEALER, which reconnects by itself."""

    is_full = False  # ZeroMQ's I/O thread sends what is queued

    def __init__(
        self, endpoint: str, context: Context, identity: bytes, poller: Poller, key: JobKey | None = None
    ) -> None:
        host, _, self._port = endpoint.removeprefix("tcp://").rpartition(":")
        self._host = host.strip("[]")
        key = required_key(host) if key is None or is_loopback(host) else key
        self._handshakes = Handshakes(endpoint, key)
        self._poller = poller
        self._socket = _dealer(endpoint, context, identity)
        self.disconnected_at = time.monotonic()
        self._monitor = self._socket.get_monitor_socket(HANDSHAKE_EVENTS | zmq.EVENT_DISCONNECTED)
        poller.add(self._socket)
        poller.add(self._monitor)
        secure_connecting(self._socket, key)
        self._socket.connect(endpoint)

    @property
    def problem(self) -> str:  # noqa: D102  see Channel, also below
        return self._handshakes.problem

    def reconnected(self, events: Set[Source]) -> bool:  # noqa: D102  see Channel, also below
        is_new = False
        while self._monitor in events and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._handshakes.count(event)
            is_new = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.disconnected_at = 0.0 if is_new else self.disconnected_at or time.monotonic()
        return is_new

    def send(self, frames: Frames) -> None:  # noqa: D102
        # Large frames are sent without a copy; callers keep them unchanged until they are acknowledged.
        nbytes = sum(map(len, frames))
        self._socket.send_multipart(frames if nbytes < PIECE else split(frames), zmq.NOBLOCK, copy=nbytes <= _COPIED)

    def receive(self, events: Set[Source]) -> Iterator[list[memoryview]]:  # noqa: D102
        while self._socket in events:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield [frame.buffer for frame in frames]

    def is_refused(self) -> bool:  # noqa: D102
        try:
            socket.create_connection((self._host, int(self._port)), _PROBE_SECONDS).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:  # noqa: D102
        for source in (self._socket, self._monitor):
            self._poller.remove(source)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(1000)


class StreamChannel:
    """Unix stream, opened again when it breaks."""

    def __init__(self, name: str, identity: bytes, poller: Poller) -> None:
        self._name = name
        self._identity = identity
        self._poller = poller
        self._stream: unix_stream.UnixStream | None = None
        self._is_new = False
        self._is_refused = False
        self._retry_at = 0.0
        self.problem = ""  # see Channel
        self.disconnected_at = time.monotonic()
        self._connect()

    @property
    def is_full(self) -> bool:  # noqa: D102
        return self._stream is not None and self._stream.is_full

    def reconnected(self, events: Set[Source]) -> bool:  # noqa: ARG002, D102
        if self._stream is None and time.monotonic() >= self._retry_at:
            self._connect()
        is_new, self._is_new = self._is_new, False
        return is_new

    def send(self, frames: Frames) -> None:  # noqa: D102
        if self._stream is not None:
            try:  # noqa: SIM105  two calls fewer for each message
                self._stream.send(frames)
            except OSError:  # `receive` closes it, once it has read what the peer sent before it closed
                pass

    def receive(self, events: Set[Source]) -> Iterator[list[memoryview]]:  # noqa: D102
        if self._stream is None or self._stream.descriptor not in events:
            return
        try:
            yield from self._stream.receive()
        except OSError:
            self.close()
        except ProtocolError as error:  # the peer would send it again
            self.problem, self._retry_at = str(error), math.inf
            self.close()

    def is_refused(self) -> bool:  # noqa: D102
        return self._is_refused

    def close(self) -> None:  # noqa: D102
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            self.disconnected_at = time.monotonic()

    def _connect(self) -> None:
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        try:
            self._stream = unix_stream.connect(self._name, self._poller)
        except OSError as error:
            self._is_refused = isinstance(error, (ConnectionRefusedError, PermissionError))
            if isinstance(error, PermissionError):
                self.problem = f"cannot connect to the Unix socket @{self._name}: {error}"
            return
        self.disconnected_at = 0.0
        self._is_new = True
        self.send([self._identity])
