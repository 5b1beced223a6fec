"""Listening side of a server or the scheduler: Unix streams within a host, a ZeroMQ ROUTER for other hosts."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from gangline.collectives.environments.job_key import FILE, JobKey
from gangline.collectives.errors import ProtocolError
from gangline.collectives.limits import limits
from gangline.collectives.transports import unix_sockets
from gangline.collectives.transports.addresses import required_key
from gangline.collectives.transports.refusal_log import RefusalLog
from gangline.collectives.transports.zmq.context import end
from gangline.collectives.transports.zmq.curve import HANDSHAKE_EVENTS, secure_binding
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.transport.pieces import PIECE, joined
from gangline.kvstore.parameter_server.transport.poller import SPIN_SECONDS, Poller, Source
from gangline.kvstore.parameter_server.transport.socket_buffers import close_cut_connections, limit_loopback_buffers
from gangline.kvstore.parameter_server.transport.unix_stream import UnixListener, UnixStream

_log = logging.getLogger("gangline")
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_RETRY_SECONDS = 1.0
"""Time until connections are accepted again after descriptors or memory have run out."""
_STRANGERS = 128
"""Number of Unix streams of processes that are not admitted; the oldest is closed for one more."""
_ACCEPTED = 64
"""Number of Unix streams accepted at a time, so that each is read before as many others replace it."""
_ADMISSION_SECONDS = 10.0  # time for a process to be admitted after it has connected
_MAX_IDENTITY = 64
_SENDING_BYTES = 64 << 20
"""Bytes in ZeroMQ's hands beyond which a peer counts as one that does not read."""


class Listener:
    """Sockets of a server or the scheduler; a peer has the same identity over either transport.

    At a loopback address there is no TCP socket (`unix_sockets.replaces_tcp`). The eventfd ends `wait`. ``port`` is
    that of the scheduler, 0 any free one; None: any, and by Unix streams besides.

    Raises:
        RuntimeError: if other machines can reach the address and there is no job key (`required_key`).
        OSError, zmq.ZMQError: if the address cannot be bound.
    """

    def __init__(self, host: str, event_fd: int | None = None, *, port: int | None = None) -> None:
        key = required_key(host)
        self._process = b"" if port is not None else secrets.token_hex(4).encode()  # at the end of ZeroMQ's identities
        self._spin_seconds = SPIN_SECONDS if port is None else 0.0  # a scheduler is idle
        self.refusals = RefusalLog()
        """For warnings about messages and connections."""
        self.rejected = 0
        """Number of connections closed because they did not carry messages."""
        self._streams: dict[int, UnixStream] = {}  # by descriptor
        self._strangers: dict[int, float] = {}  # descriptor -> `time.monotonic` seconds of its connection, in order
        self._identities: dict[int, bytes] = {}  # by descriptor, once the peer has sent it
        self._descriptors: dict[bytes, int] = {}
        self._remote: dict[bytes, int] = {}  # descriptors of ZeroMQ's connections of admitted peers
        self._sending: dict[bytes, deque[tuple[zmq.MessageTracker, int]]] = {}  # frames in ZeroMQ's hands, and bytes
        self._source = -1  # descriptor of the connection of the last message over ZeroMQ
        self._lost: set[bytes] = set()
        self._has_warned = False  # of processes without the job key
        self._event_fd = event_fd
        self._accepts_at = 0.0  # `time.monotonic` seconds when Unix streams are accepted again; 0: they are
        self._events: Set[Source] = frozenset()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._unix_listener: UnixListener | None = None
        if unix_sockets.replaces_tcp(host):
            if port is None:
                self._unix_listener = UnixListener()
            else:
                port = port or unix_sockets.free_port("scheduler")
                self._unix_listener = UnixListener(unix_sockets.name_of("scheduler", port))
        else:
            self._bind(host, port or 0, key)
            if port is None and os.environ.get("GANGLINE_TRANSPORT") != "tcp":
                self._unix_listener = UnixListener()
        addresses = []
        if self._socket is not None:
            addresses.append(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
            port = int(addresses[0].rpartition(":")[2])
            if self._process:
                addresses.append(f"process://{self._process.decode()}")
        self.port = port
        """Port of a scheduler; not of a server, whose address names it."""
        if self._unix_listener is not None:
            addresses.append(f"unix://{self._unix_listener.name}")
        self.address = " ".join(addresses)
        """Address for `client_channel.open_channel`; that of a server is no other process's."""
        self._poller = Poller()
        unix = None if self._unix_listener is None else self._unix_listener.descriptor
        for source in (event_fd, self._socket, self._monitor, unix):
            if source is not None:
                self._poller.add(source)

    def wait(self, timeout_ms: int, before_sleep: Callable[[], object] = lambda: None) -> bool:
        """Wait for messages or the eventfd; return whether the eventfd was readable."""
        if self._accepts_at and self._unix_listener is not None and time.monotonic() > self._accepts_at:
            self._accepts_at = 0.0
            self._poller.add(self._unix_listener.descriptor)
        if self._strangers:
            self._close_idle_strangers()
        self._events = self._poller.wait(timeout_ms, self._spin_seconds, before_sleep)
        return self._event_fd in self._events

    def receive(self) -> Iterator[tuple[bytes, list[memoryview]]]:
        """Yield sender identity and frames of each message that the last `wait` has reported."""
        events = self._events
        if self._monitor in events:
            self._handle_monitor()
        while self._socket is not None and self._socket in events:
            try:
                sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                self._source = int((frames or [sender])[-1].get(zmq.SRCFD))
            except zmq.ZMQError:
                self._reject(ProtocolError("received a message of an old version of ZeroMQ's protocol"))
                continue
            if sender.bytes.endswith(self._process):  # else it is meant for a former process at this port
                yield sender.bytes.removesuffix(self._process), joined([frame.buffer for frame in frames])
        if self._unix_listener is not None and self._unix_listener.descriptor in events:
            self._accept(self._unix_listener)
        for descriptor in events:
            if type(descriptor) is not int or descriptor not in self._streams:
                continue
            try:
                for message in self._streams[descriptor].receive():
                    if descriptor in self._identities:
                        yield self._identities[descriptor], message
                    else:  # the first message is the identity
                        self._identify(descriptor, message)
            except OSError:
                self._close_stream(descriptor)
            except ProtocolError as error:
                self._reject(error)
                self._close_stream(descriptor)

    def admit(self, identity: bytes, max_message: int) -> None:
        """Stop treating the process that has sent the last message as a stranger."""
        self._lost.discard(identity)
        descriptor = self._descriptors.get(identity)
        if descriptor is None:
            self._remote[identity] = self._source
        else:
            self._strangers.pop(descriptor, None)
            self._streams[descriptor].limit = max_message

    def bound_messages(self, identity: bytes, max_message: int) -> None:
        """Set the maximum bytes of a message that an admitted process sends by a Unix stream."""
        descriptor = self._descriptors.get(identity, -1)
        if descriptor in self._streams and descriptor not in self._strangers:
            self._streams[descriptor].limit = max_message

    def take_lost(self) -> set[bytes]:
        """Return the identities of admitted processes that have lost their connection since the last call."""
        lost, self._lost = self._lost, set()
        return lost

    def send(
        self, identity: bytes, frames: Sequence[bytes | memoryview], transfers: list[zmq.MessageTracker] | None = None
    ) -> bool:
        """Send a message; it is lost if the peer is not connected, which returns False.

        With ``transfers``, frames are not copied: the caller keeps them until what is appended is done.
        """
        descriptor = self._descriptors.get(identity)
        if descriptor is not None:
            stream = self._streams[descriptor]
            try:
                stream.send(frames)
            except OSError:
                self._close_stream(descriptor)
                return False
            if stream.is_full and descriptor in self._strangers:  # it does not read its refusals
                self._close_stream(descriptor)
            return True
        if self._socket is None:
            return False
        parts: Sequence[Any] = frames
        if transfers is not None and sum(map(len, frames)) >= zmq.COPY_THRESHOLD:
            parts = [zmq.Frame(one, track=True, copy=False) for one in frames]
        try:
            self._socket.send_multipart([identity + self._process, *parts], zmq.NOBLOCK, copy=parts is frames)
        except zmq.ZMQError as error:  # not connected; a worker repeats its requests when it reconnects
            _log.debug("a message could not be sent: %s", error)
            return False
        if transfers is not None and parts is not frames:
            transfers += [part.tracker for part in parts]
            self._sending.setdefault(identity, deque()).extend(zip(transfers, map(len, frames), strict=True))
        return True

    def is_full(self, identity: bytes) -> bool:
        """Return whether a peer does not read what was sent to it."""
        descriptor = self._descriptors.get(identity)
        if descriptor is not None:
            return self._streams[descriptor].is_full
        sending = self._sending.get(identity)
        while sending and sending[0][0].done:
            sending.popleft()
        return bool(sending) and sum(nbytes for _, nbytes in sending or ()) > _SENDING_BYTES

    def disconnect(self, identity: bytes) -> None:
        """Close the Unix stream of a peer and forget what it has not received; it may connect again."""
        if identity in self._descriptors:
            self._close_stream(self._descriptors[identity])

    def close(self) -> None:
        """Close all sockets; what was sent is still delivered. Idempotent."""
        for descriptor in list(self._streams):
            with contextlib.suppress(OSError):
                self._streams[descriptor].flush()
            self._close_stream(descriptor)
        if self._unix_listener is not None:
            self._unix_listener.close()
        self._poller.close()
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(2000)
            self._socket = self._monitor = None
        if self._context is not None:
            end(self._context)

    def _bind(self, host: str, port: int, key: JobKey | None) -> None:
        """Create the ZeroMQ socket."""
        self._context = zmq.Context(2)
        self._socket = router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),  # workers bound what is in flight; a full receive window would count as a cut link
            (zmq.MAXMSGSIZE, PIECE),
            (zmq.HANDSHAKE_IVL, int(1000 * _ADMISSION_SECONDS)),
            (zmq.LINGER, 0),
            (zmq.IPV6, int(":" in host)),
        ):
            router.setsockopt(option, value)
        limit_loopback_buffers(router, host)
        close_cut_connections(router, limits().heartbeat_limit)
        secure_binding(router, key)
        try:
            router.bind(f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}")
        except zmq.ZMQError:
            router.close()
            end(self._context)
            raise
        self._monitor = router.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_EVENTS)

    def _handle_monitor(self) -> None:
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_DISCONNECTED:
                lost = [identity for identity, source in self._remote.items() if source == event["value"]]
                for identity in lost:
                    del self._remote[identity]
                    self._sending.pop(identity, None)
                self._lost.update(lost)
            elif event["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED and not self._has_warned:
                self._has_warned = True
                _log.warning("refused a process that does not use this job's key (%s)", FILE)

    def _accept(self, listener: UnixListener) -> None:
        """Accept connections; if descriptors or memory run out, go on without and try again later."""
        for _ in range(_ACCEPTED):
            try:
                stream = listener.accept(self._poller, protocol.MAX_STRANGER)
            except PermissionError as error:
                self._reject(error)
                continue
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self.refusals.warn("no process can connect at present: %s", error.strerror)
                self._poller.remove(listener.descriptor)  # it would be reported without end
                self._accepts_at = time.monotonic() + _RETRY_SECONDS
                return
            if stream is None:
                return
            self._streams[stream.descriptor] = stream
            self._strangers[stream.descriptor] = time.monotonic()
            if len(self._strangers) > _STRANGERS:
                self._close_stream(next(iter(self._strangers)))

    def _identify(self, descriptor: int, frames: list[memoryview]) -> None:
        identity = bytes(frames[0])
        if len(frames) > 1 or not 0 < len(identity) <= _MAX_IDENTITY:
            raise ProtocolError("received no identity in the first message of a connection")
        self._identities[descriptor] = identity
        self._descriptors[identity] = descriptor

    def _reject(self, error: Exception) -> None:
        self.rejected += 1
        self.refusals.warn("closed a connection: %s", error)

    def _close_idle_strangers(self) -> None:
        until = time.monotonic() - _ADMISSION_SECONDS
        for descriptor, connected_at in list(self._strangers.items()):
            if connected_at > until:
                return
            self._reject(ProtocolError("received nothing that admits its process"))
            self._close_stream(descriptor)

    def _close_stream(self, descriptor: int) -> None:
        stream = self._streams.pop(descriptor, None)
        if stream is None:
            return
        is_stranger = self._strangers.pop(descriptor, None) is not None
        identity = self._identities.pop(descriptor, None)
        if identity is not None and self._descriptors.get(identity) == descriptor:
            del self._descriptors[identity]
            if not is_stranger:
                self._lost.add(identity)
        stream.close()
