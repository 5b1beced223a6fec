"""Client of the servers: priorities, window, repeats after a lost connection, errors."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gangline.collectives.errors import MismatchError, StallError
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.client.pending import RequestWork
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.client.server_client import ServerClient
from gangline.kvstore.parameter_server.protocol import Ack, Failed, Hello, Message, Push, Welcome
from gangline.kvstore.parameter_server.transport.unix_stream import UnixListener, UnixStream

pytestmark = pytest.mark.timeout(30)
MIB = 1 << 20


class Server:
    """Fake server at the other end of a Unix stream."""

    def __init__(self) -> None:
        self.listener = UnixListener()
        self.address = f"unix://{self.listener.name}"
        self.stream: UnixStream | None = None
        self.received: list[Message] = []
        self.welcomes = True

    def serve(self) -> None:
        """Receive messages and answer Hello."""
        self.stream = self.listener.accept() or self.stream
        if self.stream is None:
            return
        for frames in self.stream.receive():
            if len(frames) == 1 and len(frames[0]) == 16:  # its identity
                continue
            message = protocol.unpack(frames[0])
            if isinstance(message, Hello) and self.welcomes:
                self.send(Welcome(False, b""))
            self.received.append(message)

    def send(self, message: Message) -> None:
        assert self.stream is not None
        self.stream.send([protocol.pack(message)])

    def pushes(self) -> list[Push]:
        return [message for message in self.received if isinstance(message, Push)]

    def hang_up(self) -> None:
        assert self.stream is not None
        self.stream.close()
        self.stream = None


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.listener.close()
    if server.stream is not None:
        server.stream.close()


@pytest.fixture
def scheduler(server: Server) -> SimpleNamespace:
    place = SimpleNamespace(
        rank=0, view=1, identity=b"i" * 16, servers=[server.address], gone={}, away={}, lost="", on_change=lambda: None,
        faults=None, allows_restarts=False, reasons=[],
    )  # fmt: skip
    place.leave = place.reasons.append
    return place


@pytest.fixture
def client(server: Server, scheduler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerClient]:
    greet = ServerClient._progress

    def progress(self: ServerClient, timeout_ms: int, spin_seconds: float = 0.0) -> None:
        server.serve()  # the server's turn comes first
        greet(self, min(timeout_ms, 1), spin_seconds)

    monkeypatch.setattr(ServerClient, "_progress", progress)
    client = ServerClient(scheduler, "sync", -1, None, 5.0)  # type: ignore[arg-type]
    yield client
    with suppress(StallError):
        client.close(0.05)


def push(number: int, priority: int, nbytes: int, over: list[int]) -> Request:
    def answered(message: Message, datas: list[torch.Tensor]) -> bool:
        over.append(number)
        return True

    entries = [(number, 1, protocol.DENSE, 4)]
    return Request(
        0,
        Push(0, entries, None, None, False, None),
        f"push {number}",
        nbytes=nbytes,
        frames=[bytes(4)],
        on_answer=answered,
        priority=priority,
    )


def failing(number: int, nbytes: int = 10) -> tuple[Request, list[Exception]]:
    """Return a push, and the list that gets its error."""
    errors: list[Exception] = []
    request = push(number, 0, nbytes, [])
    request.on_error = lambda _, error: errors.append(error)
    return request, errors


def shards(server: Server) -> list[int]:
    server.serve()
    return [message.entries[0][0] for message in server.pushes()]


def test_the_window_is_bounded_and_the_rest_is_sent_by_priority(client: ServerClient, server: Server) -> None:
    over: list[int] = []
    for number, priority in enumerate([0, 0, 0, 0, 0, 5, 9, 5]):
        client.submit(push(number, priority, 4 * MIB, over))
    assert shards(server) == [0, 1, 2, 3]  # 16 MiB are in flight
    for already, following in ((0, 6), (1, 5), (2, 7), (3, 4)):
        server.send(Ack([server.pushes()[already].sequence]))
        client.wait(lambda already=already: already in over)  # type: ignore[misc]
        assert shards(server)[-1] == following
    assert over == [0, 1, 2, 3]


def test_requests_to_a_dead_server_free_the_queue(
    client: ServerClient, server: Server, scheduler: SimpleNamespace
) -> None:
    errors: list[list[Exception]] = []
    for number in range(80):  # 256 MiB may be queued besides 16 MiB in flight
        request, told = failing(number, 4 * MIB)
        client.submit(request)
        errors.append(told)
    scheduler.gone[("server", 0)] = "was killed"
    client.wait_for_room()
    assert all(errors)


def test_a_server_that_comes_back_between_two_looks_at_its_connection_is_not_cut_off(
    client: ServerClient, server: Server, scheduler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    over: list[int] = []
    restarted = Server()
    receive = ServerClient._receive

    def receive_then_news(self: ServerClient, *arguments: Any) -> None:
        receive(self, *arguments)
        if scheduler.away and 0 < client._connections[0].channel.disconnected_at < time.monotonic() - 0.2:
            scheduler.servers = [restarted.address]  # as the scheduler's client does in its own thread
            scheduler.away = {}
            client._checked_at = -math.inf

    scheduler.away = {("server", 0): "was killed or left: connection lost"}
    server.listener.close()
    server.hang_up()
    monkeypatch.setattr(ServerClient, "_receive", receive_then_news)
    monkeypatch.setattr(server, "serve", restarted.serve)
    monkeypatch.setattr(client, "_limit", 0.1)
    client.submit(push(7, 0, 10, over))
    client.wait(lambda: bool(restarted.pushes()))
    restarted.send(Ack([restarted.pushes()[0].sequence]))
    client.wait(lambda: bool(over))
    assert over == [7]
    assert scheduler.reasons == []
    restarted.listener.close()
    restarted.hang_up()


def test_a_request_that_owns_its_data_completes_when_sent(client: ServerClient, server: Server) -> None:
    late: list[Exception] = []
    works = [RequestWork(f"push {number}", on_late_error=late.append) for number in range(3)]
    for number, owns_data in enumerate([True, True, False]):
        request = push(number, 0, 10, [])
        request.completes_when_sent = owns_data
        works[number].run(lambda work, request=request: work.submit([request], client))  # type: ignore[misc]
    assert [work.is_completed() for work in works] == [True, True, False]
    assert not client.flush(0.05)  # but the server has received none of them
    first, second, third = server.pushes()
    server.send(Ack([first.sequence, third.sequence]))
    client.wait(works[2].is_completed)
    assert not client.flush(0.05)
    assert late == []
    server.send(Failed(second.sequence, "ValueError", "it does not fit"))
    client.deliver()
    assert [str(error) for error in late] == ["it does not fit"]
    assert works[1].exception() is None


def test_a_refused_hello_is_an_error_at_once(
    server: Server, scheduler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet = ServerClient._progress

    def progress(self: ServerClient, *wait: float) -> None:
        server.welcomes = False
        server.serve()
        if server.received:
            server.send(Failed(0, "MismatchError", "worker 0 wants async rounds"))
        greet(self, *wait)

    monkeypatch.setattr(ServerClient, "_progress", progress)
    with pytest.raises(MismatchError, match="worker 0 wants async rounds"):
        ServerClient(scheduler, "async", -1, None, 5.0)  # type: ignore[arg-type]


def test_a_stall_names_what_a_restarted_server_has_not_done(
    client: ServerClient, server: Server, scheduler: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_timeout", 0.1)
    monkeypatch.setattr(server, "serve", lambda: None)
    silent = UnixListener()
    for address, missing in (
        ("unix://nobody", "is not connected"),
        (f"unix://{silent.name}", "has not answered its Hello"),
    ):
        scheduler.servers[0] = address
        request, told = failing(1)
        client.submit(request)
        client.wait(lambda told=told: bool(told))  # type: ignore[misc]
        assert str(told[0]).endswith(f" s for server 0, which {missing} at {address}")
    silent.close()
