"""Peer sockets: strangers at their ports, connections that end at bad moments, and the end of contexts."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from gangline.collectives.call_signature import CallSignature
from gangline.collectives.liveness.membership import LOST, ProcessMembership
from gangline.collectives.transports.base import BootstrapAllGather
from gangline.collectives.transports.zmq import context as zmq_context
from gangline.collectives.transports.zmq.peer_sockets import PeerSocket, PeerSockets
from tests.collectives.processes import Processes, Rank
from tests.collectives.ranks import with_exchange

pytestmark = pytest.mark.timeout(60)

ADDRESS = "tcp://127.0.0.1"
NEVER = (1 << 31) - 1
TOKEN = secrets.token_bytes(32)
HELLO, ANSWER = TOKEN[16:], TOKEN[:16]
ENDS_OF_HANDSHAKES = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@contextmanager
def caller(port: str, token: bytes, *, kind: int = zmq.DEALER) -> Iterator[tuple[zmq.Socket[bytes], Callable[[], int]]]:
    """Yield a socket that connects with the routing id of a token, and a function that returns its handshake event."""
    with zmq.Context() as context, context.socket(kind) as bare:
        bare.linger = 1000
        bare.setsockopt(zmq.RECONNECT_IVL, NEVER)
        if token:
            bare.routing_id = b"gangline-" + token
        with bare.get_monitor_socket(ENDS_OF_HANDSHAKES) as monitor:
            bare.connect(port)
            yield bare, lambda: int(recv_monitor_message(monitor)["event"]) if monitor.poll(10_000) else 0
            bare.disable_monitor()


def two(visit: Callable[[str], None], options: dict[int, int] | None = None) -> list[PeerSockets]:
    """Return both ranks' sockets; ``visit`` is called with rank 0's endpoint before rank 1 knows it."""

    def make(rank: int, exchange: BootstrapAllGather) -> PeerSockets:
        def visited(data: bytes) -> list[bytes]:
            if rank == 0:
                visit(msgpack.unpackb(data, strict_map_key=False)[1][1][0])
            return exchange(data)

        return PeerSockets(rank, 2, visited, address=ADDRESS, options=options or {})

    return with_exchange(make, make)


@pytest.mark.parametrize(
    ("token", "kind", "end"),
    [
        (b"", zmq.PAIR, zmq.EVENT_DISCONNECTED),
        (b"", zmq.DEALER, zmq.EVENT_HANDSHAKE_SUCCEEDED),
        (TOKEN, zmq.DEALER, zmq.EVENT_HANDSHAKE_SUCCEEDED),
    ],
    ids=["of another program", "without a name", "with the token of another port"],
)
def test_a_stranger_that_connects_first_does_not_replace_the_rank(token: bytes, kind: int, end: int) -> None:
    with ExitStack() as stack:

        def visit(port: str) -> None:  # as a closed communicator does if the port is reused
            bare, ended = stack.enter_context(caller(port, token, kind=kind))
            assert ended() == end
            if end == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                bare.send(HELLO)
                bare.send_multipart([HELLO, b"of", b"many parts"])

        both = two(visit, {int(zmq.RECONNECT_IVL): NEVER})
        for each in both:
            stack.callback(each.close, 0)
        both[1].sockets[0].send(b"for 0")
        both[0].sockets[1].send(b"for 1")
        assert [first_of(both[0].sockets[1]), first_of(both[1].sockets[0])] == [b"for 0", b"for 1"]


def first_of(peer: PeerSocket) -> Any:
    """Return the first message of a peer; those of strangers also wake a poll, and are dropped."""
    until = time.monotonic() + 10
    while (message := peer.receive()) is None and time.monotonic() < until:
        peer.socket.poll(100)
    return message


def test_sending_without_a_peer_is_refused() -> None:
    with binding_socket() as (connection, _):
        assert not connection.send(b"at")
        with pytest.raises(zmq.Again):
            connection.send_frame(b"at")


@pytest.mark.slow
def test_hundreds_of_contexts_terminate() -> None:
    for _ in range(300):
        for each in two(lambda port: None):
            each.sockets[1 - each.rank].send(b"closed")
            each.close(0)
            each.close(0)


@pytest.mark.slow
def test_a_context_terminates_whenever_the_peer_disconnects(tmp_path: Path) -> None:
    port = f"ipc://{tmp_path}/connection"
    with zmq.Context() as callers:
        for turn in range(1000):  # note 1 in zmq/context.py: it happened once in a few hundred repetitions
            context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            connection = PeerSocket(context, TOKEN, binds=True)
            connection.socket.bind(port)
            with callers.socket(zmq.DEALER) as peer:
                peer.linger = 0
                peer.routing_id = b"gangline-" + TOKEN
                peer.connect(port)
                peer.send(HELLO)
                assert connection.socket.poll(10_000)
                assert connection.poll_hello()
            moment = time.perf_counter() + turn % 120 * 1e-6
            while time.perf_counter() < moment:
                pass
            connection.send(b"closed")
            connection.close(500)
            zmq_context.end(context)
            assert context.closed, turn


@contextmanager
def binding_socket() -> Iterator[tuple[PeerSocket, str]]:
    """Yield a binding peer socket and its endpoint."""
    with zmq.Context() as context:
        connection = PeerSocket(context, TOKEN, binds=True)
        connection.socket.bind(f"{ADDRESS}:*")
        try:
            yield connection, connection.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        finally:
            connection.close(0)


def call_once(connection: PeerSocket, port: str, *messages: bytes) -> None:
    """Connect to a binding socket, send messages and disconnect; return when its monitor has the event."""
    with caller(port, TOKEN) as (bare, end):
        assert end() == zmq.EVENT_HANDSHAKE_SUCCEEDED
        for message in messages:
            bare.send(message)
        assert connection.socket.poll(10_000)
    host, _, number = port.removeprefix("tcp://").partition(":")
    with socket.create_connection(
        (host, int(number))
    ) as later:  # ZeroMQ's I/O thread greets it after it has processed the end
        assert later.recv(10)


def test_a_connection_lost_before_its_hello_is_read_is_down() -> None:
    with binding_socket() as (connection, port):
        call_once(connection, port, HELLO, b"last words")
        connection.poll_monitor()  # processes the end before the hello
        assert connection.poll_hello()
        assert connection.down_since is not None
        assert connection.receive() == b"last words"
        assert connection.down_since is not None


def test_a_new_connection_is_up_before_the_end_of_the_old_one_is_read() -> None:
    ups: list[str] = []
    with binding_socket() as (connection, port):
        connection.on_up = lambda: ups.append("up")
        with caller(port, TOKEN) as (bare, _):
            bare.send(HELLO)
            assert connection.socket.poll(10_000)
            assert connection.poll_hello()
            assert connection.down_since is None
            assert bare.poll(10_000)
            assert bare.recv() == ANSWER
        with caller(port, TOKEN) as (bare, _):
            bare.send(HELLO)
            bare.send(b"here again")
            assert connection.socket.poll(10_000)
            assert connection.receive() == b"here again"
            assert (connection.down_since, ups) == (None, ["up", "up"])
            assert bare.poll(10_000)
            assert bare.recv() == ANSWER
            connection.poll_monitor()
            assert connection.down_since is None


def test_a_strangers_hello_is_ignored() -> None:
    with binding_socket() as (connection, port), caller(port, TOKEN) as (bare, _):
        bare.send(ANSWER)
        bare.send(b"closed")
        assert connection.socket.poll(10_000)
        assert not connection.poll_hello()
        assert connection.receive() is None
        assert connection.down_since is not None


# Heartbeats: note 4 in zmq/context.py


def _with_heartbeats(rank: Rank, seconds: float) -> ProcessMembership:
    return ProcessMembership(rank.rank, rank.size, rank.exchange, heartbeat=seconds, limit=10, address=ADDRESS)


def _fall_behind(rank: Rank) -> None:
    """Rank 0 reads nothing while rank 1 announces thousands of calls and dies."""
    membership = _with_heartbeats(rank, 0.002)
    code = CallSignature("barrier").code
    if rank.rank == 1:
        for number in range(1, 5000):
            membership.announce_and_read(number, code)
        rank.tell("announced")
        rank.hear()
    rank.tell("ready")
    rank.hear()
    time.sleep(0.3)  # several heartbeats fall due
    while not membership.gone:
        membership.announce_and_read(0, code)
    rank.tell([membership.at[1][0], membership.gone])
    membership.close()
    rank.tell("closed")


def test_a_rank_that_reads_no_announcements_survives_the_death_of_the_announcing_one() -> None:
    with Processes(_fall_behind, 2) as ranks:
        assert ranks.heard(0) == "ready"
        assert ranks.heard(1) == "announced"
        ranks.kill(1)
        ranks.say(0, "look")
        number, gone = ranks.heard(0)
        assert 0 < number < 5000  # the last announcements may still be in the memory of the killed process
        assert gone == {1: LOST}
        assert ranks.heard(0) == "closed"


def _close_often(rank: Rank) -> None:
    for _ in range(200):
        membership = _with_heartbeats(rank, 0.002)
        for _ in range(200):
            for connection in membership.connections.peers.sockets.values():
                connection.send(b"unread")
        membership.close()
    rank.tell("closed")


@pytest.mark.slow
def test_ranks_that_close_at_once_do_not_abort() -> None:
    with Processes(_close_often, 2) as ranks:
        assert ranks.all_heard() == ["closed"] * 2


# Contexts


def test_a_context_that_does_not_terminate_is_abandoned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(zmq_context, "CONTEXT_END_SECONDS", 0.1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    open_one = context.socket(zmq.PUSH)  # term() waits for it
    with caplog.at_level(logging.WARNING, "gangline"):
        zmq_context.end(context)
    assert caplog.messages == ["a ZeroMQ context has not terminated within 0.1 s and is abandoned"]
    open_one.close(0)
    [thread] = [one for one in threading.enumerate() if one.name == "gangline-context-end"]
    thread.join(30)
    assert not thread.is_alive()
