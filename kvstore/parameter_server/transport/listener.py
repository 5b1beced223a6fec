"""Listening side of a server: a ZeroMQ ROUTER for all workers, Unix streams for workers of the same host."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence, Set

import zmq

from gangline.collectives.errors import ProtocolError
from gangline.collectives.limits import limits
from gangline.collectives.transports.addresses import required_key
from gangline.collectives.transports.zmq.context import end
from gangline.collectives.transports.zmq.curve import secure_binding
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.refusal_log import RefusalLog
from gangline.kvstore.parameter_server.transport.poller import SPIN_SECONDS, Poller, Source
from gangline.kvstore.parameter_server.transport.socket_buffers import close_cut_connections, limit_loopback_buffers
from gangline.kvstore.parameter_server.transport.unix_stream import UnixListener, UnixStream

_log = logging.getLogger("gangline")
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_SECONDS = 1.0
"""Time until connections are accepted again after descriptors or memory have run out."""


class Listener:
    """Sockets of a server; a worker has the same identity over either transport.

    Args:
        host: address to listen at.
        event_fd: eventfd that ends `wait`.

    Raises:
        RuntimeError: if other machines can reach the address and there is no job key (`required_key`).
        zmq.ZMQError: if the address cannot be bound.
    """

    def __init__(self, host: str, event_fd: int) -> None:
        key = required_key(host)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(2)
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),  # workers bound what is in flight; a full receive window would count as a cut link
            (zmq.MAXMSGSIZE, protocol.MAX_SHARD),
            (zmq.LINGER, 0),
            (zmq.IPV6, int(":" in host)),
        ):
            self._socket.setsockopt(option, value)
        limit_loopback_buffers(self._socket, host)
        close_cut_connections(self._socket, limits().heartbeat_limit)
        secure_binding(self._socket, key)
        self._socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        """Address for `client_channel.open_channel`."""
        self._refusals = RefusalLog()
        self.rejected = 0
        """Number of connections closed because they did not carry messages."""
        self._unix_listener = UnixListener() if os.environ.get("GANGLINE_TRANSPORT") != "tcp" else None
        self._streams: dict[int, UnixStream] = {}  # by descriptor
        self._identities: dict[int, bytes] = {}  # by descriptor, once the worker has sent it
        self._descriptors: dict[bytes, int] = {}
        self._poller = Poller()
        self._poller.add(self._socket)
        self._event_fd = event_fd
        self._accepts_at = 0.0  # `time.monotonic` seconds when Unix streams are accepted again; 0: they are
        self._poller.add(event_fd)
        self._events: Set[Source] = frozenset()
        if self._unix_listener is not None:
            self.address += f" {self._unix_listener.name}"
            self._poller.add(self._unix_listener.fileno())

    def wait(self, timeout_ms: int, before_sleep: Callable[[], object] = lambda: None) -> bool:
        """Wait for messages or the eventfd; return whether the eventfd was readable.

        Args:
            timeout_ms: timeout in milliseconds.
            before_sleep: called if nothing has arrived while spinning.
        """
        if self._unix_listener is not None and self._accepts_at and time.monotonic() > self._accepts_at:
            self._accepts_at = 0.0
            self._poller.add(self._unix_listener.fileno())
        self._events = self._poller.wait(timeout_ms, SPIN_SECONDS, before_sleep)
        return self._event_fd in self._events

    def receive(self) -> Iterator[tuple[bytes, list[memoryview]]]:
        """Yield sender identity and frames of each message that the last `wait` has reported."""
        events = self._events
        while self._socket in events:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            yield identity.bytes, [frame.buffer for frame in frames]
        if self._unix_listener is not None and self._unix_listener.fileno() in events:
            self._accept(self._unix_listener)
        for descriptor in events:
            if isinstance(descriptor, int) and descriptor in self._streams:
                yield from self._receive_from(descriptor)

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview], *, in_place: bool = False) -> None:
        """Send a message; it is lost if the worker is not connected.

        Args:
            identity: of the worker.
            frames: header and data.
            in_place: the caller keeps the frames unchanged until the worker confirms them, so they need no copy.
        """
        descriptor = self._descriptors.get(identity)
        if descriptor is not None:
            try:
                self._streams[descriptor].send(frames)
            except OSError:
                self._close_stream(descriptor)
            return
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=not in_place)
        except zmq.ZMQError as error:  # the worker is not connected; it repeats its requests when it reconnects
            _log.debug("a message to a worker could not be sent: %s", error)

    def close(self) -> None:
        """Close all sockets; what was sent is still delivered."""
        for descriptor in list(self._streams):
            with contextlib.suppress(OSError):
                self._streams[descriptor].flush()
            self._close_stream(descriptor)
        if self._unix_listener is not None:
            self._unix_listener.close()
        self._poller.close()
        self._socket.close(2000)
        end(self._context)

    def _accept(self, listener: UnixListener) -> None:
        """Accept connections; if descriptors or memory run out, go on without and try again later."""
        try:
            while (stream := listener.accept(self._poller)) is not None:
                self._streams[stream.fileno()] = stream
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
            _log.warning("no worker can connect at present: %s", error.strerror)
            self._poller.remove(listener.fileno())  # it would be reported without end
            self._accepts_at = time.monotonic() + _RETRY_SECONDS

    def _receive_from(self, descriptor: int) -> Iterator[tuple[bytes, list[memoryview]]]:
        stream = self._streams[descriptor]
        try:
            if stream.is_full:
                stream.flush()
            for frames in stream.receive():
                identity = self._identities.get(descriptor)
                if identity is None:  # the first message is the identity
                    self._identities[descriptor] = identity = bytes(frames[0])
                    self._descriptors[identity] = descriptor
                else:
                    yield identity, frames
        except OSError:
            self._close_stream(descriptor)
        except ProtocolError as error:
            self.rejected += 1
            self._refusals.warn("closed a connection: %s", error)
            self._close_stream(descriptor)

    def _close_stream(self, descriptor: int) -> None:
        stream = self._streams.pop(descriptor, None)
        if stream is None:
            return
        identity = self._identities.pop(descriptor, None)
        if identity is not None and self._descriptors.get(identity) == descriptor:
            del self._descriptors[identity]
        stream.close()
