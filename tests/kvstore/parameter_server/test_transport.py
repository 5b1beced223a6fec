"""Transport of messages: the poller, Unix streams, and buffers of sockets."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator

import pytest
import zmq

from gangline.collectives.errors import ProtocolError
from gangline.kvstore.parameter_server.transport.poller import SPIN_SECONDS, Poller
from gangline.kvstore.parameter_server.transport.unix_stream import UnixListener, UnixStream, connect

pytestmark = pytest.mark.timeout(30)


# Poller: descriptors and ZeroMQ sockets together


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller()
    yield poller
    poller.close()


@pytest.fixture
def sockets() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as near, context.socket(zmq.DEALER) as far:
        port = far.bind_to_random_port("tcp://127.0.0.1")
        near.connect(f"tcp://127.0.0.1:{port}")
        yield near, far


def until(poller: Poller, source: object, tries: int = 100) -> bool:
    """Return whether a source becomes ready; single waits may return nothing."""
    return any(source in poller.wait(100, spin) for _ in range(tries) for spin in (0.0, SPIN_SECONDS))


def test_messages_are_reported_though_the_descriptor_is_no_longer_readable(
    poller: Poller, sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]
) -> None:
    near, far = sockets
    for number in range(3):
        near.send(b"%d" % number)
    assert far.poll(5000)  # they have arrived before add()
    poller.add(far)
    for number in range(3):
        assert until(poller, far)
        assert far.recv(zmq.NOBLOCK) == b"%d" % number
    assert poller.wait(0) == set()
    for number in range(100):
        near.send(b"%d" % number)
        far.send(b"back")  # reads the events, so the descriptor is no longer readable
        assert until(poller, far)
        assert far.recv(zmq.NOBLOCK) == b"%d" % number


# Unix streams: messages of all sizes arrive complete and in order; invalid bytes are refused


Pair = tuple[UnixStream, UnixStream]


@pytest.fixture
def pair() -> Iterator[Pair]:
    listener = UnixListener()
    near = connect(listener.name)
    far = listener.accept()
    assert far is not None
    yield near, far
    for one in (near, far, listener):
        one.close()


def received(stream: UnixStream, sender: UnixStream, count: int) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    while len(messages) < count:
        sender.flush()
        select.select([stream.descriptor], [], [], 5)
        messages += [[bytes(frame) for frame in frames] for frames in stream.receive()]
    return messages


def test_sent_memory_may_be_overwritten_at_once(pair: Pair) -> None:
    near, far = pair
    memory = bytearray(b"a" * 5_000_000)
    near.send([memoryview(memory)])
    memory[:] = b"b" * len(memory)
    assert received(far, near, 1) == [[b"a" * len(memory)]]


@pytest.mark.parametrize(
    "invalid",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"glu1" + struct.pack("<I", 0),
        b"glu1" + struct.pack("<I", 1 << 31),
        b"glu1" + struct.pack("<IQ", 1, 1 << 60),
    ],
    ids=["text", "no frames", "too many frames", "too large"],
)
def test_invalid_messages_are_refused_before_memory_is_allocated(invalid: bytes) -> None:
    listener = UnixListener()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(f"\0{listener.name}")
        stranger.sendall(invalid)
        far = listener.accept()
        assert far is not None
        with pytest.raises(ProtocolError):
            list(far.receive())
        far.close()
    listener.close()
