"""Unix streams: messages of all sizes arrive complete and in order; invalid bytes are refused."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator

import pytest

from gangline.collectives.errors import ProtocolError
from gangline.kvstore.parameter_server.transport.unix_stream import UnixListener, UnixStream, connect

pytestmark = pytest.mark.timeout(30)
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
        select.select([stream], [], [], 5)
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
    select.select([far], [], [], 5)
    assert [[bytes(frame) for frame in frames] for frames in far.receive()] == [[b"last"]]
    with pytest.raises(ConnectionError):
        list(far.receive())


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
