"""Collective calls of the workers of a job: all-gather, agreement, actions of one rank, commands to all servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
from torch import Tensor

from gangline.collectives.errors import MismatchError
from gangline.collectives.work import Work
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.client.server_client import PendingRequests, ServerClient
from gangline.kvstore.parameter_server.protocol import Command, CommandResult, make_error
from gangline.kvstore.parameter_server.transport.frames import frame_of

_CHUNK = 16 << 20
"""Bytes per worker and collective, all of which the scheduler holds in memory."""
_LENGTH = 8


class CollectiveCalls:
    """Collective calls over a worker's clients of the scheduler and the servers."""

    def __init__(self, scheduler: SchedulerClient, servers: ServerClient) -> None:
        self._scheduler = scheduler
        self._servers = servers

    @property
    def servers(self) -> range:
        """Ranks of the servers."""
        return range(len(self._scheduler.servers))

    def exchange(self, data: bytes) -> list[bytes]:
        """All-gather bytes of any length in chunks; return them in rank order, empty for joined workers."""
        gathered = self._scheduler.all_gather(len(data).to_bytes(_LENGTH, "big") + data[:_CHUNK])
        whole = [bytearray(one[_LENGTH:]) for one in gathered]
        longest = max(int.from_bytes(one[:_LENGTH], "big") for one in gathered)
        for begin in range(_CHUNK, longest, _CHUNK):
            for own, chunk in zip(whole, self._scheduler.all_gather(data[begin : begin + _CHUNK]), strict=True):
                own += chunk
        return [bytes(own) for own in whole]

    def check_same(self, packed: bytes, read: Callable[[bytes], object], what: str) -> None:
        """Check that all workers pass the same value. Collective: all workers must call it.

        Args:
            packed: this worker's value.
            read: converts a packed value to what errors show.
            what: name of the call, for errors.

        Raises:
            MismatchError: on all workers, if a value differs from rank 0's.
        """
        gathered = self._scheduler.all_gather(packed, what)
        for rank, other in enumerate(gathered):
            if other and other != gathered[0]:
                raise MismatchError(f"{what}: rank 0 has {read(gathered[0])}, but rank {rank} {read(other)}")

    def run_on_rank(self, action: Callable[[], object], what: str, rank: int = 0) -> None:
        """Run an action on one rank while the others wait; if it raises, raise on all workers. Collective."""
        packed = b""
        error: Exception | None = None
        if self._scheduler.rank == rank:
            try:
                action()
            except Exception as raised:  # noqa: BLE001  raised again below
                error = raised
                packed = msgpack.packb([type(raised).__name__, str(raised)])
        failure = self._scheduler.all_gather(packed, what)[rank]
        if error is not None:
            raise error
        if failure:
            raise make_error(*msgpack.unpackb(failure))

    def request_all(self, requests: Sequence[Request], what: str) -> None:
        """Send requests and wait until all are answered."""
        work = Work(what)
        with PendingRequests(work, what) as pending:
            pending.submit(requests, self._servers)
        self._servers.wait(work.is_completed)
        work.wait()

    def command(
        self, name: str, payload: bytes | Sequence[bytes] = b"", datas: Sequence[Sequence[Tensor]] | None = None
    ) -> list[tuple[bytes, list[Tensor]]]:
        """Run a command on every server and return payload and tensors of each result, in rank order.

        Args:
            name: name of the command.
            payload: for all servers, or one per server.
            datas: tensors for each server.
        """
        results: dict[int, tuple[bytes, list[Tensor]]] = {}

        def request(server: int) -> Request:
            own = payload if isinstance(payload, bytes) else payload[server]

            def on_answer(answer: Any, data: list[Tensor]) -> bool:
                assert isinstance(answer, CommandResult)
                results[server] = answer.payload, data
                return True

            return Request(
                server,
                lambda sequence: Command(sequence, name, own),
                name,
                frames=[frame_of(one) for one in (() if datas is None else datas[server])],
                on_answer=on_answer,
                wants_values=True,
            )

        self.request_all([request(server) for server in self.servers], name)
        return [results[server] for server in self.servers]
