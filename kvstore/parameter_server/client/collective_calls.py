"""What workers do together and servers are told as a whole: agreeing, leaving it to rank 0, commands to all servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgpack
from torch import Tensor

from gangline.collectives.compression import Codec
from gangline.collectives.errors import DeadNodeError, GanglineError, MismatchError, StallError
from gangline.collectives.work import Work
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.client.server_client import ServerClient
from gangline.kvstore.parameter_server.protocol import Answer, Command, Message
from gangline.kvstore.parameter_server.transport.frames import memory_of

_PIECE = 16 << 20
"""Bytes that a worker gives to one meeting: the scheduler holds so many of each."""
_LENGTH = 8
_ERRORS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (ValueError, TypeError, KeyError)}


class PendingRequests:
    """A Work that is over when all its requests are, with the first error that one of them met.

    A context manager: the Work is not over before the section is, and what the section raises is the Work's error.
    """

    def __init__(
        self,
        work: Work,
        name: str,
        codec: Codec | None = None,
        on_late: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        """Begin.

        Args:
            work: what is to end.
            name: for errors.
            codec: how values come back.
            on_late: told of errors of requests that nobody waits for: what they carry is their own, so that they are
                over when they are sent.
        """
        self.name = name
        self.codec = codec
        self._on_late = on_late
        self._work = work
        self._open = 1
        self._ended = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def submit(self, requests: Sequence[Request], wire: ServerClient) -> None:
        """Have requests sent, and the Work wait for them."""
        with self._lock:
            self._open += len(requests)
        for request in requests:
            if request.is_over_when_sent:
                request.on_sent = partial(self._end, None)
                request.on_error = partial(self._fail, request)
            else:
                request.on_answer = self._ending_with(request.on_answer)
                request.on_error = self._end
        for request in requests:
            wire.submit(request)

    def __enter__(self) -> PendingRequests:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self._end(error)
        return True  # the Work raises it

    def _ending_with(self, take: Callable[[Message, list[Tensor]], bool]) -> Callable[[Message, list[Tensor]], bool]:
        def on_answer(message: Message, datas: list[Tensor]) -> bool:
            is_over = take(message, datas)
            if is_over:
                self._end(None)
            return is_over

        return on_answer

    def _fail(self, request: Request, error: Exception) -> None:
        if request.sequence:  # it is sent, and over
            self._on_late(error)
        else:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._open -= 1
            self._error = self._error or error
            is_over = not self._ended and (not self._open or isinstance(error, (DeadNodeError, StallError)))
            self._ended |= is_over
        if is_over:  # where somebody is dead or late, what was asked of the others may never be answered
            self._work.complete(self._error)


class CollectiveCalls:
    """A worker among the workers and servers of its job."""

    def __init__(self, member: SchedulerClient, wire: ServerClient) -> None:
        self._member = member
        self._wire = wire

    @property
    def servers(self) -> range:
        """The servers' ranks."""
        return range(len(self._member.servers))

    def meet(self, what: str) -> None:
        """Return when all workers have come."""
        self._member.meet(b"", what)

    def exchange(self, data: bytes) -> list[bytes]:
        """All-gather bytes of any length; return them in rank order, empty for joined workers."""
        said = self._member.meet(len(data).to_bytes(_LENGTH, "big") + data[:_PIECE])
        whole = [bytearray(one[_LENGTH:]) for one in said]
        longest = max(int.from_bytes(one[:_LENGTH], "big") for one in said)
        for begin in range(_PIECE, longest, _PIECE):
            for own, more in zip(whole, self._member.meet(data[begin : begin + _PIECE]), strict=True):
                own += more
        return [bytes(own) for own in whole]

    def agree(self, packed: bytes, read: Callable[[bytes], object], what: str) -> None:
        """See that all workers say the same.

        Args:
            packed: what this one says.
            read: makes of it what errors show.
            what: the call, for errors.

        Raises:
            MismatchError: on all alike, where one says something else than rank 0.
        """
        said = self._member.meet(packed, what)
        for rank, other in enumerate(said):
            if other and other != said[0]:
                raise MismatchError(f"{what}: rank 0 has {read(said[0])}, but rank {rank} {read(other)}")

    def by_rank_0(self, action: Callable[[], object], what: str, rank: int = 0) -> None:
        """Have rank 0, or another ``rank``, do something while the others wait; what it raises, all raise."""
        said = b""
        error: Exception | None = None
        if self._member.rank == rank:
            try:
                action()
            except Exception as raised:  # noqa: BLE001  raised again below
                error = raised
                said = msgpack.packb([type(raised).__name__, str(raised)])
        told = self._member.meet(said, what)[rank]
        if error is not None:
            raise error
        if told:
            kind, text = msgpack.unpackb(told)
            raise _ERRORS.get(kind, GanglineError)(text)

    def ask(self, requests: Sequence[Request], what: str) -> None:
        """Send requests and return when they are answered."""
        work = Work(what)
        with PendingRequests(work, what) as pending:
            pending.submit(requests, self._wire)
        self._wire.wait(work.is_completed)
        work.wait()

    def command(
        self, name: str, payload: bytes | Sequence[bytes] = b"", datas: Sequence[Sequence[Tensor]] | None = None
    ) -> list[tuple[bytes, list[Tensor]]]:
        """Have each server do something; gives their answers.

        Args:
            name: of the command.
            payload: for all, or one a server.
            datas: tensors for each server.
        """
        answers: dict[int, tuple[bytes, list[Tensor]]] = {}

        def request(server: int) -> Request:
            own = payload if isinstance(payload, bytes) else payload[server]

            def answered(answer: Any, data: list[Tensor]) -> bool:
                assert isinstance(answer, Answer)
                answers[server] = answer.payload, data
                return True

            given = () if datas is None else datas[server]
            return Request(
                server,
                lambda sequence: Command(sequence, name, own),
                name,
                frames=[memory_of(one) for one in given],
                on_answer=answered,
                wants=True,
            )

        self.ask([request(server) for server in self.servers], name)
        return [answers[server] for server in self.servers]
