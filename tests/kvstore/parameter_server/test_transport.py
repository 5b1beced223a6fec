"""Transport of messages: the poller, Unix streams, and buffers of sockets."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq

from gangline.collectives.errors import ProtocolError
from gangline.kvstore.parameter_server.transport.client_channel import StreamChannel
from gangline.kvstore.parameter_server.transport.poller import SPIN_SECONDS, Poller
from gangline.kvstore.parameter_server.transport.socket_buffers import limit_loopback_buffers
from gangline.kvstore.parameter_server.transport.unix_stream import UnixListener, UnixStream, connect

pytestmark = pytest.mark.timeout(30)


# Poller: descriptors and ZeroMQ sockets together


@pytest.fixture
def poller() -> Iterator[Poller]:
    poller = Poller()
    yield poller
    poller.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    with near, far:
        yield near, far


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


def test_a_writable_descriptor_is_reported_on_request(
    poller: Poller, ends: tuple[socket.socket, socket.socket]
) -> None:
    near, far = ends
    poller.add(near.fileno())
    with suppress(BlockingIOError):
        while True:
            near.send(bytes(1 << 16))
    poller.poll_writable(near.fileno(), writable=True)
    assert poller.wait(0) == set()
    while far.recv(1 << 20, socket.MSG_DONTWAIT):
        if poller.wait(0):
            break
    assert poller.wait(0) == {near.fileno()}
    poller.poll_writable(near.fileno(), writable=False)
    assert poller.wait(0) == set()


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


def bytes_like(size: int, number: int) -> bytes:
    return bytes((index * 7 + number) % 251 for index in range(min(size, 251))) * (size // 251 + 1)


@pytest.mark.parametrize("size", [0, 1, 1000, (1 << 18) - 1, 1 << 18, 3_000_001])
def test_messages_of_every_size_arrive_whole_and_in_order(pair: Pair, size: int) -> None:
    near, far = pair
    sent = [[b"head", bytes_like(size, number)[:size], b""] for number in range(4)]
    for frames in sent:
        near.send(frames)
    assert near.is_full or size < 1_000_000
    assert received(far, near, len(sent)) == sent
    assert not near.is_full


def test_sent_memory_may_be_overwritten_at_once(pair: Pair) -> None:
    near, far = pair
    memory = bytearray(b"a" * 5_000_000)
    near.send([memoryview(memory)])
    memory[:] = b"b" * len(memory)
    assert received(far, near, 1) == [[b"a" * len(memory)]]


def test_the_last_message_arrives_before_the_end(pair: Pair) -> None:
    near, far = pair
    near.send([b"last"])
    near.close()
    select.select([far.descriptor], [], [], 5)
    assert [[bytes(frame) for frame in frames] for frames in far.receive()] == [[b"last"]]
    with pytest.raises(ConnectionError):
        list(far.receive())


@pytest.mark.parametrize("size", [1, 3_000_001])
def test_the_last_message_arrives_though_one_was_sent_after_the_end(poller: Poller, size: int) -> None:
    listener = UnixListener()
    channel = StreamChannel(listener.name, b"identity", poller)
    far = listener.accept()
    assert far is not None
    far.send([b"last"])
    far.close()
    for _ in range(2):
        channel.send([bytes(size)])
    assert [bytes(frame) for (frame,) in channel.receive(poller.wait(5000))] == [b"last"]
    assert not list(channel.receive(poller.wait(0)))
    assert channel.disconnected_at
    listener.close()


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


# Socket buffers


@pytest.mark.parametrize(
    ("hosts", "is_small"),
    [
        (["127.0.0.1", "127.9.9.9", "[::1]", "::1", "localhost"], True),
        (["10.0.0.1", "[fe80::1]", "head", "*"], False),
    ],
)
def test_buffers_are_small_on_loopback_only(hosts: list[str], is_small: bool) -> None:
    for host in hosts:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with context, context.socket(zmq.ROUTER) as socket:
            before = [socket.getsockopt(option) for option in (zmq.SNDBUF, zmq.RCVBUF)]
            limit_loopback_buffers(socket, host)
            after = [socket.getsockopt(option) for option in (zmq.SNDBUF, zmq.RCVBUF)]
        assert after == ([192 << 10] * 2 if is_small else before)
