"""What a worker sends when: by priority, as far as the server keeps up, and again when a connection was lost."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import zmq

from gangline.collectives.errors import DeadNodeError, MismatchError, StallError
from gangline.collectives.work import Work
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.client.collective_calls import PendingRequests
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.client.server_client import ServerClient
from gangline.kvstore.parameter_server.protocol import Ack, Failed, Hello, Message, Push, Welcome
from gangline.kvstore.parameter_server.transport.unix_stream import UnixListener, UnixStream

pytestmark = pytest.mark.timeout(30)
MIB = 1 << 20


class Server:
    """The other end of a stream, by hand."""

    def __init__(self) -> None:
        self.listener = UnixListener()
        self.address = f"tcp://127.0.0.1:1 {self.listener.name}"
        self.stream: UnixStream | None = None
        self.heard: list[Message] = []
        self.welcomes = True

    def serve(self) -> None:
        """Take what has come; hellos are answered."""
        self.stream = self.listener.accept() or self.stream
        if self.stream is None:
            return
        for frames in self.stream.receive():
            if len(frames) == 1 and len(frames[0]) == 16:  # who it is
                continue
            message = protocol.unpack(frames[0])
            if isinstance(message, Hello) and self.welcomes:
                self.say(Welcome(False, b""))
            self.heard.append(message)

    def say(self, message: Message) -> None:
        assert self.stream is not None
        self.stream.send([protocol.pack(message)])

    def pushes(self) -> list[Push]:
        return [message for message in self.heard if isinstance(message, Push)]

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
def member(server: Server) -> SimpleNamespace:
    return SimpleNamespace(
        rank=0, view=1, identity=b"i" * 16, servers=[server.address], gone={}, lost="", on_news=lambda: None
    )


@pytest.fixture
def wire(server: Server, member: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerClient]:
    greet = ServerClient._progress

    def progress(
        self: ServerClient, timeout_ms: int, looks_seconds: float = 0.0
    ) -> None:  # the server's turn comes first
        server.serve()
        greet(self, min(timeout_ms, 1), looks_seconds)

    monkeypatch.setattr(ServerClient, "_progress", progress)
    monkeypatch.setattr("gangline.kvstore.parameter_server.client.server_client._GRACE_SECONDS", 0.05)
    wire = ServerClient(member, "sync", -1, None, 5.0)  # type: ignore[arg-type]
    yield wire
    wire.close()


def push(number: int, priority: int, nbytes: int, over: list[int]) -> Request:
    def answered(message: Message, datas: list[torch.Tensor]) -> bool:
        over.append(number)
        return True

    entries = [[number, 1, protocol.DENSE, 4]]
    return Request(
        0,
        lambda sequence: Push(sequence, entries, None, None, False, None),
        f"push {number}",
        nbytes=nbytes,
        frames=[bytes(4)],
        on_answer=answered,
        priority=priority,
    )


def parts(server: Server) -> list[int]:
    server.serve()
    return [message.entries[0][0] for message in server.pushes()]


def test_what_a_server_has_not_taken_is_bounded_and_the_rest_goes_by_priority(
    wire: ServerClient, server: Server
) -> None:
    over: list[int] = []
    for number, priority in enumerate([0, 0, 0, 0, 0, 5, 9, 5]):
        wire.submit(push(number, priority, 4 * MIB, over))
    assert parts(server) == [0, 1, 2, 3]  # 16 MiB are under way
    for already, following in ((0, 6), (1, 5), (2, 7), (3, 4)):
        server.say(Ack([server.pushes()[already].sequence]))
        wire.wait(lambda already=already: already in over)  # type: ignore[misc]
        assert parts(server)[-1] == following
    assert over == [0, 1, 2, 3]


def test_who_has_too_much_waiting_to_be_sent_waits_for_room(wire: ServerClient, server: Server) -> None:
    over: list[int] = []
    for number in range(70):
        wire.submit(push(number, 0, 4 * MIB, over))
        if number < 68:
            wire.wait_for_room()  # at once: up to 256 MiB may wait besides the 16 that are under way
            assert over == []
    assert parts(server) == [0, 1, 2, 3]
    for sequence in [one.sequence for one in server.pushes()]:
        server.say(Ack([sequence]))
    wire.wait_for_room()
    assert len(over) >= 2


def test_what_can_never_be_sent_makes_room(wire: ServerClient, server: Server, member: SimpleNamespace) -> None:
    errors: list[Exception] = []
    for number in range(80):
        one = push(number, 0, 4 * MIB, [])
        one.on_error = errors.append
        wire.submit(one)
    member.gone[("server", 0)] = "was killed"
    wire.wait_for_room()
    assert len(errors) == 80


def test_one_larger_than_the_window_goes_alone(wire: ServerClient, server: Server) -> None:
    over: list[int] = []
    wire.submit(push(0, 0, 100 * MIB, over))
    wire.submit(push(1, 0, 1, over))
    assert parts(server) == [0]
    server.say(Ack([server.pushes()[0].sequence]))
    wire.wait(lambda: 0 in over)
    assert parts(server) == [0, 1]


def test_what_was_not_answered_is_asked_again_by_the_same_number(wire: ServerClient, server: Server) -> None:
    over: list[int] = []
    wire.submit(push(0, 0, 10, over))
    wire.submit(push(1, 0, 10, over))
    assert parts(server) == [0, 1]
    first, second = server.pushes()
    server.say(Ack([first.sequence]))
    wire.wait(lambda: over == [0])
    server.hang_up()
    wire.wait(lambda: len(server.pushes()) == 3)
    assert server.pushes()[-1] == second
    assert isinstance(server.heard[-2], Hello)
    server.say(Ack([second.sequence, first.sequence]))  # an answer that came before is no harm
    wire.wait(lambda: over == [0, 1])


def test_a_dead_server_and_a_silent_one_are_errors_that_say_what_waited(
    wire: ServerClient, member: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Exception] = []
    request = push(7, 0, 10, [])
    request.on_error = told.append
    wire.submit(request)
    monkeypatch.setattr(wire, "_timeout", 0.1)
    wire.wait(lambda: bool(told))
    assert isinstance(told[0], StallError)
    assert "push 7 has waited" in str(told[0])
    monkeypatch.setattr(wire, "_timeout", 5.0)
    again = push(8, 0, 10, [])
    again.on_error = told.append
    wire.submit(again)
    member.gone["server", 0] = "was killed or left: connection lost"
    wire.wait(lambda: len(told) == 2)
    assert isinstance(told[1], DeadNodeError)
    assert str(told[1]) == "server 0 was killed or left: connection lost (worker 0 waited in push 8)"


def test_what_is_asked_of_a_server_known_to_be_dead_fails_at_once(wire: ServerClient, member: SimpleNamespace) -> None:
    told: list[Exception] = []
    member.gone["server", 0] = ""
    request = push(9, 0, 10, [])
    request.on_error = told.append
    wire.submit(request)
    assert [str(error) for error in told] == ["server 0 has left the job (worker 0 waited in push 9)"]


def test_what_carries_its_own_data_is_over_when_it_is_sent(wire: ServerClient, server: Server) -> None:
    late: list[Exception] = []
    works = [Work(f"push {number}") for number in range(3)]
    for number, is_own in enumerate([True, True, False]):
        request = push(number, 0, 10, [])
        request.is_own = is_own
        with PendingRequests(works[number], "push", on_late=late.append) as pending:
            pending.submit([request], wire)
    assert [work.is_completed() for work in works] == [True, True, False]
    assert not wire.flush(0.05)  # but the server has none of them
    first, second, third = server.pushes()
    server.say(Ack([first.sequence, third.sequence]))
    wire.wait(works[2].is_completed)
    assert not wire.flush(0.05)
    assert late == []
    server.say(Failed(second.sequence, "ValueError", "it does not fit"))
    wire.deliver()
    assert [str(error) for error in late] == ["it does not fit"]
    assert works[1].exception() is None


def test_what_is_over_when_sent_is_not_over_before(wire: ServerClient, server: Server) -> None:
    works = [Work(f"push {number}") for number in range(2)]
    for number, work in enumerate(works):
        request = push(number, 0, 10 * MIB, [])
        request.is_own = True
        with PendingRequests(work, "push") as pending:
            pending.submit([request], wire)
    assert [work.is_completed() for work in works] == [True, False]  # the window is full
    server.serve()
    server.say(Ack([server.pushes()[0].sequence]))
    wire.wait(works[1].is_completed)
    assert parts(server) == [0, 1]
    server.say(Ack([server.pushes()[1].sequence]))


def test_close_says_what_servers_may_not_have(wire: ServerClient, caplog: pytest.LogCaptureFixture) -> None:
    request = push(0, 0, 10, [])
    request.is_own = True
    wire.submit(request)
    wire.close()
    assert caplog.messages == ["worker 0 leaves, and servers may not have all that it has pushed"]


def test_a_hello_that_is_refused_is_an_error_at_once(
    server: Server, member: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    greet = ServerClient._progress

    def progress(self: ServerClient, *wait: float) -> None:
        server.welcomes = False
        server.serve()
        if server.heard:
            server.say(Failed(0, "MismatchError", "worker 0 wants async rounds"))
        greet(self, *wait)

    monkeypatch.setattr(ServerClient, "_progress", progress)
    with pytest.raises(MismatchError, match="worker 0 wants async rounds"):
        ServerClient(member, "async", -1, None, 5.0)  # type: ignore[arg-type]


def test_a_server_that_dies_before_it_answers_a_hello_is_named(member: SimpleNamespace) -> None:
    member.gone["server", 0] = "was killed or left: connection lost"
    with pytest.raises(DeadNodeError, match=r"server 0 was killed or left: connection lost \(worker 0 said hello\)"):
        ServerClient(member, "sync", -1, None, 5.0)  # type: ignore[arg-type]


def test_after_close_nothing_is_taken(wire: ServerClient) -> None:
    told: list[Exception] = []
    request = push(0, 0, 10, [])
    request.on_error = told.append
    wire.submit(request)
    wire.close()
    assert [str(error) for error in told] == ["the store was closed"]
    with pytest.raises(RuntimeError, match="closed"):
        wire.submit(push(1, 0, 10, []))


def test_the_context_of_a_closed_wire_is_gone(server: Server, wire: ServerClient) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = wire._context
    wire.close()
    assert context.closed
