"""Where workers reach a server: a ROUTER for all, streams for those of its host."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence, Set

import zmq

from gangline.collectives.errors import ProtocolError
from gangline.collectives.transports.zmq.context import end
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.transport.poller import LOOKS_SECONDS, Poller, Source
from gangline.kvstore.parameter_server.transport.socket_buffers import fit_buffers
from gangline.kvstore.parameter_server.transport.unix_stream import UnixListener, UnixStream

_log = logging.getLogger("gangline")


class Listener:
    """A server's sockets; workers are known by their identities, whichever way they come.

    Args:
        host: the address to listen at.
        bell: a descriptor that ends a wait.

    Raises:
        zmq.ZMQError: the address cannot be listened at.
    """

    def __init__(self, host: str, bell: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(2)
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.SNDHWM, 0),
            (zmq.MAXMSGSIZE, protocol.MAX_PART),
            (zmq.LINGER, 0),
            (zmq.IPV6, int(":" in host)),
        ):
            self._socket.setsockopt(option, value)
        fit_buffers(self._socket, host)
        self._socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        """For `channels.open_channel`."""
        self.junk = 0
        """Connections that were closed because no messages came by them."""
        self._listener = UnixListener() if os.environ.get("GANGLINE_TRANSPORT") != "tcp" else None
        self._streams: dict[int, UnixStream] = {}  # by descriptor
        self._names: dict[int, bytes] = {}  # whose a descriptor's stream is, once it has said so
        self._descriptors: dict[bytes, int] = {}
        self._full: set[int] = set()
        self._watch = Poller()
        self._watch.add(self._socket)
        self._bell = bell
        self._watch.add(bell)
        self._events: Set[Source] = frozenset()
        if self._listener is not None:
            self.address += f" {self._listener.name}"
            self._watch.add(self._listener.fileno())

    def wait(self, timeout_ms: int, before_sleep: Callable[[], object] = lambda: None) -> bool:
        """Return when something has come, the bell rings, or the time is over; whether the bell rang.

        Args:
            timeout_ms: in milliseconds.
            before_sleep: called when nothing has come for a while.
        """
        self._events = self._watch.wait(timeout_ms, LOOKS_SECONDS, before_sleep)
        return self._bell in self._events

    def receive(self) -> Iterator[tuple[bytes, list[memoryview]]]:
        """The identities and messages of those who have said something, as far as `wait` has seen it."""
        events = self._events
        while self._socket in events:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            yield identity.bytes, [frame.buffer for frame in frames]
        if self._listener is not None and self._listener.fileno() in events:
            while (stream := self._listener.accept()) is not None:
                self._streams[stream.fileno()] = stream
                self._watch.add(stream.fileno())
        for descriptor in events:
            if isinstance(descriptor, int) and descriptor in self._streams:
                yield from self._by_stream(descriptor)

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview], *, in_place: bool = False) -> None:
        """Send a message; it is lost where the other is gone.

        Args:
            identity: whose.
            frames: copies are made of them.
            in_place: none need be made: they stay as they are until the other says that it has them.
        """
        descriptor = self._descriptors.get(identity)
        if descriptor is not None:
            try:
                self._streams[descriptor].send(frames)
            except ConnectionError:
                self._drop(descriptor)
            else:
                self._arm(descriptor)
            return
        try:
            self._socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=not in_place)
        except zmq.ZMQError as error:  # it is gone; who comes back asks again
            _log.debug("somebody cannot be answered: %s", error)

    def close(self) -> None:
        """Give all back; what was sent still goes out."""
        for descriptor in list(self._streams):
            with contextlib.suppress(OSError):
                self._streams[descriptor].flush()
            self._drop(descriptor)
        if self._listener is not None:
            self._listener.close()
        self._watch.close()
        self._socket.close(2000)
        end(self._context)

    def _by_stream(self, descriptor: int) -> Iterator[tuple[bytes, list[memoryview]]]:
        stream = self._streams[descriptor]
        try:
            if stream.is_full:
                stream.flush()
            for frames in stream.receive():
                identity = self._names.get(descriptor)
                if identity is None:  # the first message says who it is
                    self._names[descriptor] = identity = bytes(frames[0])
                    self._descriptors[identity] = descriptor
                else:
                    yield identity, frames
                    if self._streams.get(descriptor) is not stream:  # an answer found it broken
                        return
            self._arm(descriptor)
        except ConnectionError:
            self._drop(descriptor)
        except ProtocolError as error:
            self.junk += 1
            _log.warning("a connection is closed: %s", error)
            self._drop(descriptor)

    def _arm(self, descriptor: int) -> None:
        """Look for room where something waits to go out."""
        stream = self._streams.get(descriptor)
        if stream is not None and stream.is_full != (descriptor in self._full):
            self._full ^= {descriptor}
            self._watch.look_for_room(descriptor, room=stream.is_full)

    def _drop(self, descriptor: int) -> None:
        stream = self._streams.pop(descriptor, None)
        if stream is None:
            return
        self._watch.remove(descriptor)
        self._full.discard(descriptor)
        identity = self._names.pop(descriptor, None)
        if identity is not None and self._descriptors.get(identity) == descriptor:
            del self._descriptors[identity]
        stream.close()
