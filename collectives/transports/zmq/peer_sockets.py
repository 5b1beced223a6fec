"""Connected ZeroMQ sockets to all other ranks, used by membership and by the ZeroMQ transport."""

from __future__ import annotations

import errno
import logging
import os
import resource
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgpack
import zmq
from zmq.utils.monitor import recv_monitor_message

from gangline.collectives.errors import ProtocolError, StallError
from gangline.collectives.limits import CONNECT_POLL_SECONDS, CONNECT_SECONDS
from gangline.collectives.transports.addresses import required_key
from gangline.collectives.transports.base import BootstrapAllGather
from gangline.collectives.transports.zmq.context import SharedContext
from gangline.collectives.transports.zmq.curve import (
    HANDSHAKE_EVENTS,
    Handshakes,
    leaves_host,
    secure_binding,
    secure_connecting,
)

_log = logging.getLogger("gangline")
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | HANDSHAKE_EVENTS
_HALF = 16  # bytes of the token that each side sends as its hello
_DESCRIPTORS = 16  # of a context
_DESCRIPTORS_PER_PEER = 5  # two sockets, the monitor's other end, a connection, and a listener on one of the two sides
_GROUPS_TO_COME = 16  # meshes of sockets for which the limit of open files is raised at a time
_NO_THREAD = ("can't start new thread", "zmq gc socket requested during shutdown")
"""Errors of pyzmq's thread that frees messages: at a limit of threads, and at interpreter exit, it can only copy."""
_LONGEST_SOCKET_NAME = 107  # bytes (unix(7), sun_path)
_NAME = b"gangline-"  # ZeroMQ reserves routing ids that begin with a zero byte


class PeerSockets:
    """One socket to each other rank, in a separate ZeroMQ context.

    The lower rank of a pair binds, the higher rank connects. The binding side uses a ROUTER socket and identifies its
    peer by a routing id that only the two ranks know, so a socket of another program or of a closed communicator that
    connects to a reused port does no harm; a PAIR socket would accept the first to connect. (On ZAP, see note 2 in
    zmq/context.py.)

    Args:
        all_gather: between the ranks; called once.
        address: "ipc" (all ranks on one host; the sockets are in a directory that only this user can enter and that is
            removed before this returns) or "tcp://HOST", where HOST is this host's address for the others; ports are
            chosen by the system.
        options: ZeroMQ socket options by number.
        payload: bytes to exchange along with the endpoints; ``payloads`` holds those of all ranks.
        check: called while a rank waits for the connections of others, with their ranks and the payloads of all ranks;
            an error that it raises ends the wait.
        context: ZeroMQ context of these and other sockets; None: a new one.

    Raises:
        RuntimeError: if other machines can reach ``address`` and there is no job key (`required_key`).
        ValueError: if ``address`` is neither "ipc" nor "tcp://HOST".
        StallError: if a rank does not connect within 60 s.
        ProtocolError: if another rank's exchanged bytes are malformed, or it has another job key.
        OSError: on all ranks, if a rank has too few file descriptors or no folder for its sockets.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        all_gather: BootstrapAllGather,
        *,
        address: str,
        options: Mapping[int, int],
        payload: bytes = b"",
        check: Callable[[list[int], list[bytes]], None] | None = None,
        context: SharedContext | None = None,
    ) -> None:
        kind, separator, host = address.partition("://")
        if address != "ipc" and (kind != "tcp" or not separator or not host):
            raise ValueError(f"address is {address!r}; expected 'ipc' or 'tcp://HOST'")
        self._key = required_key(host) if kind == "tcp" else None
        self.rank = rank
        self.size = size
        self.sockets: dict[int, PeerSocket] = {}
        self.payloads: list[bytes] = []
        self._options = {
            **options,
            int(zmq.IPV6): int(":" in host),
            int(zmq.HANDSHAKE_IVL): round(CONNECT_SECONDS * 1000),  # the default drops peers that accept late
        }
        directory = None
        try:
            _check_descriptors(rank, size)
            directory = _private_directory(rank) if kind == "ipc" else None
        except OSError as error:
            all_gather(msgpack.packb({"errno": error.errno, "text": error.strerror}))  # the others raise it too
            raise
        self._shared = context or SharedContext()
        self._context = self._shared.take()
        self._context.set(zmq.MAX_SOCKETS, max(1023, 8 * size))
        self._is_closed = False
        try:
            self._exchange_endpoints(all_gather, payload, f"ipc://{directory}" if directory else address)
            self._wait_until_connected(check)
        except BaseException:
            self.close(0)
            raise
        finally:
            if directory:  # connected sockets need no file, and a process killed later leaves none behind
                shutil.rmtree(directory, ignore_errors=True)

    def close(self, linger_ms: int) -> None:
        """Close all sockets; block for up to ``linger_ms`` until messages are sent. Idempotent."""
        for connection in self.sockets.values():
            connection.close(linger_ms)
        if not self._is_closed:
            self._is_closed = True
            self._shared.release()

    def _exchange_endpoints(self, all_gather: BootstrapAllGather, payload: bytes, address: str) -> None:
        endpoints = {}
        for peer in range(self.rank + 1, self.size):
            token = secrets.token_bytes(2 * _HALF)
            connection = self._create(peer, self._secret(token))
            secure_binding(connection.socket, self._key)
            connection.socket.bind(f"{address}/{peer}" if address.startswith("ipc") else f"{address}:*")
            endpoint = connection.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
            endpoints[peer] = (endpoint, token)
        gathered = all_gather(msgpack.packb((payload, endpoints)))
        unpacked = [_unpack(rank, packed) for rank, packed in enumerate(gathered)]
        self.payloads = [theirs for theirs, _ in unpacked]
        for peer in range(self.rank):
            endpoint, token = unpacked[peer][1][self.rank]
            key = required_key(endpoint.removeprefix("tcp://").rpartition(":")[0]) if leaves_host(endpoint) else None
            connection = self._create(peer, self._secret(token))
            connection.handshakes = Handshakes(endpoint, key)
            secure_connecting(connection.socket, key)
            connection.socket.connect(endpoint)

    def _secret(self, token: bytes) -> bytes:
        """Derive the secret of a pair's hellos from the exchanged token, which others may read."""
        return token if self._key is None else self._key.mac("gangline peer token 1", token)

    def _create(self, peer: int, token: bytes) -> PeerSocket:
        self.sockets[peer] = connection = PeerSocket(self._context, token, binds=peer > self.rank)
        for option, value in self._options.items():
            connection.socket.setsockopt(option, value)
        return connection

    def _wait_until_connected(self, check: Callable[[list[int], list[bytes]], None] | None) -> None:
        deadline = time.monotonic() + CONNECT_SECONDS
        poller = zmq.Poller()
        waiting = dict(self.sockets)
        for connection in waiting.values():
            poller.register(connection.monitor, zmq.POLLIN)
            poller.register(connection.socket, zmq.POLLIN)
        while waiting:
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, waiting))
                raise StallError(f"rank {self.rank} has no connection with rank {ranks} after {CONNECT_SECONDS:g} s")
            poller.poll(round(CONNECT_POLL_SECONDS * 1000))
            for peer, connection in list(waiting.items()):
                if connection.poll_hello():
                    poller.unregister(connection.monitor)
                    poller.unregister(connection.socket)  # messages after the hello belong to the socket's owner
                    del waiting[peer]
            for peer, connection in waiting.items():
                if connection.handshakes is not None and connection.handshakes.problem:
                    raise ProtocolError(
                        f"rank {self.rank} cannot connect to rank {peer}: {connection.handshakes.problem}"
                    )
            if waiting and check is not None:
                check(list(waiting), self.payloads)


class PeerSocket:
    """One socket to one rank, and the state of its connection.

    Every connection begins with a hello of both sides: half of a token of 32 bytes that only the two ranks know. The
    connection is up from the peer's hello until it ends; messages and connections without that hello are ignored.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], token: bytes, *, binds: bool) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER if binds else zmq.DEALER)
        self.socket.linger = 0  # note 1 in zmq/context.py; close() takes the real one
        self._routing_id = _NAME + token
        if binds:
            self.socket.router_mandatory = True  # send raises if the peer is not connected
            self.socket.router_handover = True  # a reconnecting peer replaces its lost connection
        else:
            self.socket.routing_id = self._routing_id
        self.token = token
        self.down_since: float | None = time.monotonic()
        """Time by `time.monotonic` at which the connection was found to be lost; None while it is up."""
        self.on_up: Callable[[], None] = lambda: None
        """Called whenever the connection is up."""
        self.monitor = _monitor(self.socket)
        self.handshakes: Handshakes | None = None
        """Outcome of the handshakes; None on the binding side."""
        self._binds = binds
        halves = token[:_HALF], token[_HALF:]
        self._own_hello, self._peer_hello = halves if binds else halves[::-1]
        self._descriptor = -1  # file descriptor of the connection that carried the hello
        self._open: set[int] = set()  # file descriptors of open connections, including those of strangers
        self._has_hello = False

    def poll_monitor(self) -> None:
        """Process pending monitor events; never blocks."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            if self.handshakes is not None:
                self.handshakes.count(event["event"])
            match event["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED if not self._binds:
                    self.send(self._own_hello)
                case zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED:
                    self._open.add(event["value"])
                    if event["value"] == self._descriptor:
                        self._descriptor = -1  # the system has reused the number for a connection without a hello yet
                case zmq.EVENT_DISCONNECTED:
                    self._open.discard(event["value"])
                    if event["value"] == self._descriptor:
                        self.down_since = time.monotonic()

    def poll_hello(self) -> bool:
        """Process monitor events and messages up to the peer's hello; return whether it has ever arrived.

        The result stays True if the connection is lost afterwards. Never blocks.
        """
        self.poll_monitor()
        while not self._has_hello and (frame := self.receive_frame()) is not None:
            self._accept_hello(frame)
        return self._has_hello

    def receive(self) -> bytes | None:
        """Return the peer's next message, or None; skips hellos and strangers' messages. Never blocks."""
        while (frame := self.receive_frame()) is not None:
            if self._accept_hello(frame):
                continue
            if frame.get(zmq.SRCFD) == self._descriptor:  # messages of a lost connection count too
                return frame.bytes
        return None

    def receive_frame(self) -> zmq.Frame | None:
        """Return the next frame, hellos included, or None. Never blocks."""
        try:
            self._skip_routing_id()
            return self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def receive_into(self, target: memoryview) -> int | None:
        """Receive the next frame into memory, truncated to fit; return the frame's size in bytes, or None.

        Never blocks.
        """
        try:
            self._skip_routing_id()
            return int(self.socket.recv_into(target, flags=zmq.NOBLOCK))
        except zmq.Again:
            return None

    def send(self, message: bytes) -> bool:
        """Send if possible without blocking; return whether it was sent."""
        try:
            self.send_frame(message)
        except zmq.Again:
            return False
        return True

    def send_frame(
        self, message: bytes | memoryview, *, copy: bool = True, track: bool = False
    ) -> zmq.MessageTracker | None:
        """Send without blocking; ``copy`` and ``track`` as in pyzmq.

        Raises:
            zmq.Again: if the peer is not connected, or the send queue is full.
        """
        try:
            if self._binds:
                self.socket.send(self._routing_id, zmq.NOBLOCK | zmq.SNDMORE)
            try:
                return self.socket.send(message, zmq.NOBLOCK, copy=copy, track=track)
            except RuntimeError as error:
                if not str(error).startswith(_NO_THREAD):
                    raise
                self.socket.send(message, zmq.NOBLOCK)
                return zmq.MessageTracker() if track else None  # it is done: the message is copied
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise zmq.Again from None
            raise

    def close(self, linger_ms: int) -> None:
        """Close the sockets; pending messages are sent for up to ``linger_ms``. Idempotent."""
        if not self.socket.closed:
            self.socket.monitor(None, 0)
            self.monitor.close(0)
            self.socket.close(linger_ms)

    def _skip_routing_id(self) -> None:
        """Consume the routing id before a message on the binding side; drop strangers' messages."""
        while self._binds and self.socket.recv(zmq.NOBLOCK) != self._routing_id:
            while self.socket.rcvmore:
                self.socket.recv(zmq.NOBLOCK)

    def _accept_hello(self, frame: zmq.Frame) -> bool:
        if frame.bytes != self._peer_hello:
            return False
        self.poll_monitor()  # before the descriptor changes: pending events are about earlier connections
        self._descriptor = int(frame.get(zmq.SRCFD))
        self._has_hello = True
        if self._descriptor not in self._open:  # the connection was lost after the hello was sent
            self.down_since = self.down_since or time.monotonic()
            return True
        self.down_since = None
        if self._binds:
            self.send(self._own_hello)
        self.on_up()
        return True


def _monitor(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    name = f"inproc://monitor-{secrets.token_hex(8)}"
    socket.monitor(name, _EVENTS)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)  # a full queue, if nobody reads for hours, would block ZeroMQ's I/O thread
    monitor.connect(name)
    return monitor


def _check_descriptors(rank: int, size: int) -> None:
    """Check that this process can open its sockets: libzmq aborts the process if it cannot.

    Raise the soft limit if it is too low, with room for further groups, as far as the hard limit allows.
    """
    needed = _DESCRIPTORS + _DESCRIPTORS_PER_PEER * (size - 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = soft
    if soft == resource.RLIM_INFINITY or soft - used >= needed:
        return
    wanted = used + _GROUPS_TO_COME * needed
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if limit - used >= needed:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            _log.info("the limit of open files of rank %d is now %d instead of %d", rank, limit, soft)
            return
    raise OSError(
        errno.EMFILE,
        f"rank {rank} has {max(soft - used, 0)} of {soft} file descriptors left, and its sockets to {size - 1} ranks "
        f"need {needed}; raise the limit with `ulimit -n` before the job starts (the hard limit is {hard})",
    )


def _private_directory(rank: int) -> str:
    """Create a directory that only this user can enter, in /tmp if socket names in TMPDIR would be too long."""
    parent = tempfile.gettempdir()
    is_short = len(os.fsencode(parent)) + len("/gangline-12345678/12345") <= _LONGEST_SOCKET_NAME
    try:
        return tempfile.mkdtemp(prefix="gangline-", dir=parent if is_short else "/tmp")  # noqa: S108
    except OSError as error:
        text = f"rank {rank} cannot create a directory for its sockets in {parent} or /tmp: {error.strerror}"
        raise OSError(error.errno, text) from error


def _unpack(rank: int, packed: bytes) -> tuple[bytes, dict[int, tuple[str, bytes]]]:
    try:
        unpacked = msgpack.unpackb(packed, strict_map_key=False)
        if isinstance(unpacked, dict):
            raise OSError(unpacked["errno"], unpacked["text"])
        payload, endpoints = unpacked
        return bytes(payload), {int(peer): (str(name), bytes(token)) for peer, (name, token) in endpoints.items()}
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"rank {rank} sent {packed[:80]!r} in the bootstrap exchange; expected a map of its endpoints"
        ) from error
