"""A ZeroMQ socket for each other rank, all connected: what the roster and the ZeroMQ transport are made of."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping

import msgpack
import zmq
from zmq.utils.monitor import recv_monitor_message

from gangline.collectives.errors import ProtocolError, StallError
from gangline.collectives.transports.addresses import check_address
from gangline.collectives.transports.base import BootstrapAllGather
from gangline.collectives.transports.zmq.context import end

_CONNECT_LIMIT = 60.0
"""Seconds for all to connect: everybody is there already, for they exchanged their addresses."""

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_HALF = 16  # bytes of a token that each side says
_NAME = b"gangline-"  # a name that began with a zero byte would be ZeroMQ's own


class PeerSockets:
    """A socket to each other rank, in a ZeroMQ context of its own; the lower rank of a pair binds.

    Who binds has a ROUTER, which takes everybody in and knows a rank by a name that only the two have: a socket of
    another program, or of a closed communicator, that tries for a port which was free and is used again takes nobody's
    place. (A PAIR would be taken by the first who comes. To have ZeroMQ ask us about everybody, by ZAP, is no way out:
    with libzmq 4.3 one context in some hundred then never ended.)

    Args:
        exchange: used once. ``card`` travels along and is given back for every rank in ``cards``.
        address: "ipc" (all ranks on one host: sockets in a directory that only this user may enter, gone again
            before this returns) or "tcp://HOST", HOST being this host's address for the others; the port is free to be
            any.
        options: ZeroMQ socket options by number.
        io_threads: of the context.

    Raises:
        RuntimeError: ``address`` may be reached by strangers (`check_address`).
        ValueError: ``address`` is neither.
        StallError: a rank did not connect within 60 s.
        ProtocolError: what was exchanged is not what gangline sends.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: BootstrapAllGather,
        *,
        address: str,
        options: Mapping[int, int],
        card: bytes = b"",
        io_threads: int = 1,
    ) -> None:
        kind, separator, host = address.partition("://")
        if address != "ipc" and (kind != "tcp" or not separator or not host):
            raise ValueError(f"address is {address!r}; expected 'ipc' or 'tcp://HOST'")
        if kind == "tcp":
            check_address(host)
        self.rank = rank
        self.size = size
        self.lines: dict[int, PeerSocket] = {}
        self.cards: list[bytes] = []
        self._options = {
            **options,
            int(zmq.IPV6): int(":" in host),
            int(zmq.HANDSHAKE_IVL): round(_CONNECT_LIMIT * 1000),  # a rank that comes late to its door lets in still
        }
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        self._context.set(zmq.MAX_SOCKETS, max(1023, 8 * size))
        directory = tempfile.mkdtemp(prefix="gangline-") if kind == "ipc" else None
        try:
            self._meet(exchange, card, f"ipc://{directory}" if directory else address)
            self._wait_until_connected()
        except BaseException:
            self.close(0)
            raise
        finally:
            if directory:  # who is connected needs no name any more, and a later kill leaves nothing behind
                shutil.rmtree(directory, ignore_errors=True)

    def close(self, linger_ms: int) -> None:
        """Give the sockets back; wait up to ``linger_ms`` for what is on its way out. Again: nothing."""
        for line in self.lines.values():
            line.close(linger_ms)
        end(self._context)

    def _meet(self, exchange: BootstrapAllGather, card: bytes, address: str) -> None:
        endpoints = {}
        for peer in range(self.rank + 1, self.size):
            line = self._line(peer, secrets.token_bytes(2 * _HALF))
            line.socket.bind(f"{address}/{peer}" if address.startswith("ipc") else f"{address}:*")
            endpoints[peer] = (line.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"), line.token)
        cards = [_read_card(rank, packed) for rank, packed in enumerate(exchange(msgpack.packb((card, endpoints))))]
        self.cards = [theirs for theirs, _ in cards]
        for peer in range(self.rank):
            endpoint, token = cards[peer][1][self.rank]
            self._line(peer, token).socket.connect(endpoint)

    def _line(self, peer: int, token: bytes) -> PeerSocket:
        self.lines[peer] = line = PeerSocket(self._context, token, binds=peer > self.rank)
        for option, value in self._options.items():
            line.socket.setsockopt(option, value)
        return line

    def _wait_until_connected(self) -> None:
        deadline = time.monotonic() + _CONNECT_LIMIT
        poller = zmq.Poller()
        waiting = dict(self.lines)
        for line in waiting.values():
            poller.register(line.monitor, zmq.POLLIN)
            poller.register(line.socket, zmq.POLLIN)
        while waiting:
            if time.monotonic() > deadline:
                ranks = ", ".join(map(str, waiting))
                raise StallError(f"rank {self.rank} has no connection with rank {ranks} after {_CONNECT_LIMIT:g} s")
            poller.poll(100)
            for peer, line in list(waiting.items()):
                if line.wait_up():
                    poller.unregister(line.monitor)
                    poller.unregister(line.socket)  # what comes after the hello is not ours to read
                    del waiting[peer]


class PeerSocket:
    """One socket to one rank, and what its monitor says of the connection.

    A line is up from the peer's hello to the end of the connection it came by. The hello is half of a token that only
    the ranks know, and every connection begins with one: others who find the port neither bring a line up nor down, nor
    hear anything.

    Args:
        context: where its sockets are made.
        token: of 32 bytes, the same at both ends.
        binds: whether this end waits for the other to connect.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], token: bytes, *, binds: bool) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER if binds else zmq.DEALER)
        # libzmq (4.3) ends a lost connection with the linger that its socket had at bind(): by default for ever, and if
        # this side closes at that moment with something unsent, its context never ends. `close` has its own linger.
        self.socket.linger = 0
        self._name = _NAME + token
        if binds:
            self.socket.router_mandatory = True  # nobody there: an error, not silence
            self.socket.router_handover = True  # who comes back need not wait until the old connection is known to end
        else:
            self.socket.routing_id = self._name
        self.token = token
        self.down_since: float | None = time.monotonic()
        """When the connection was seen to be gone, by `time.monotonic`; None while it is there."""
        self.on_up: Callable[[], None] = lambda: None
        self.monitor = _monitor(self.socket)
        self._binds = binds
        halves = token[:_HALF], token[_HALF:]
        self._mine, self._peers = halves if binds else halves[::-1]
        self._descriptor = -1  # of the connection by which the hello came
        self._open: set[int] = set()  # descriptors of connections that are there, strangers' too
        self._has_met = False

    def look(self) -> None:
        """Read what the monitor has; never blocks."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            match event["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED if not self._binds:
                    self.send(self._mine)
                case zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED:
                    self._open.add(event["value"])
                    if event["value"] == self._descriptor:
                        self._descriptor = -1  # the number goes round: what comes by it now is not the peer's
                case zmq.EVENT_DISCONNECTED:
                    self._open.discard(event["value"])
                    if event["value"] == self._descriptor:
                        self.down_since = time.monotonic()

    def receive(self) -> bytes | None:
        """The next message that the peer sent, or None; never blocks. Hellos, and what strangers sent, are left out."""
        while (frame := self.take()) is not None:
            if self._greet(frame):
                continue
            if frame.get(zmq.SRCFD) == self._descriptor:  # of a lost connection too: what was sent before counts
                return frame.bytes
        return None

    def take(self) -> zmq.Frame | None:
        """The next message as it is, a hello too, or None; never blocks."""
        try:
            self._skip_name()
            return self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def take_into(self, target: memoryview) -> int | None:
        """The same into memory, as far as it fits; gives the message's bytes."""
        try:
            self._skip_name()
            return int(self.socket.recv_into(target, flags=zmq.NOBLOCK))
        except zmq.Again:
            return None

    def wait_up(self) -> bool:
        """Read the monitor, and the socket up to the peer's hello and no further; whether that came.

        Who has lost its connection since is there no more, but it was: others will say what became of it.
        """
        self.look()
        while not self._has_met and (frame := self.take()) is not None:
            self._greet(frame)
        return self._has_met

    def send(self, message: bytes) -> bool:
        """Send if that goes without waiting; whether it did."""
        try:
            self.put(message)
        except zmq.Again:
            return False
        return True

    def put(self, message: bytes | memoryview, *, copy: bool = True, track: bool = False) -> zmq.MessageTracker | None:
        """Send; ``copy`` and ``track`` as in pyzmq.

        Raises:
            zmq.Again: the peer is not there, or there is no room.
        """
        try:
            if self._binds:
                self.socket.send(self._name, zmq.NOBLOCK | zmq.SNDMORE)
            return self.socket.send(message, zmq.NOBLOCK, copy=copy, track=track)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise zmq.Again from None
            raise

    def close(self, linger_ms: int) -> None:
        """Give the sockets back; what was sent may still go out for ``linger_ms``."""
        if not self.socket.closed:
            self.socket.monitor(None, 0)
            self.monitor.close(0)
            self.socket.close(linger_ms)

    def _skip_name(self) -> None:
        """Where a name goes before each message, take it; what strangers sent is thrown away."""
        while self._binds and self.socket.recv(zmq.NOBLOCK) != self._name:
            while self.socket.rcvmore:
                self.socket.recv(zmq.NOBLOCK)

    def _greet(self, frame: zmq.Frame) -> bool:
        if frame.bytes != self._peers:
            return False
        self.look()  # what the monitor says of earlier connections must not be taken for news of this one
        self._descriptor = int(frame.get(zmq.SRCFD))
        self._has_met = True
        if self._descriptor not in self._open:  # it said hello, and was lost before anybody looked
            self.down_since = self.down_since or time.monotonic()
            return True
        self.down_since = None
        if self._binds:
            self.send(self._mine)
        self.on_up()
        return True


def _monitor(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    name = f"inproc://monitor-{secrets.token_hex(8)}"
    socket.monitor(name, _EVENTS)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)  # nobody may look for hours, and ZeroMQ's thread would wait for room
    monitor.connect(name)
    return monitor


def _read_card(rank: int, packed: bytes) -> tuple[bytes, dict[int, tuple[str, bytes]]]:
    try:
        card, endpoints = msgpack.unpackb(packed, strict_map_key=False)
        return bytes(card), {int(peer): (str(name), bytes(token)) for peer, (name, token) in endpoints.items()}
    except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"rank {rank} exchanged {packed[:80]!r}, which is no list of its sockets") from error
