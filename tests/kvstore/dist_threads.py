"""A scheduler and servers in threads of the test, and lines to them on which a test says what it likes."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self
from unittest.mock import patch

import zmq

from gangline.collectives.errors import StallError
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.environment import ServerJob
from gangline.kvstore.parameter_server.protocol import Beat, Failed, Hello, Message, Welcome
from gangline.kvstore.parameter_server.scheduler.scheduler import Scheduler
from gangline.kvstore.parameter_server.server.server import Server, open_server

LIMIT = 30.0
"""Seconds after which what a test waits for has failed to happen."""


class Job:
    """A scheduler and servers, which run once all workers have come; a context manager."""

    def __init__(self, workers: int, servers: int = 1, timeout: float = LIMIT, *, is_supervised: bool = False) -> None:
        self._workers = workers
        with patch.dict(os.environ, GANGLINE_TIMEOUT=str(timeout)):
            self.scheduler = Scheduler(workers, servers, is_supervised=is_supervised)
        self.address = f"tcp://127.0.0.1:{self.scheduler.port}"
        self._servers: queue.SimpleQueue[Server] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(16)
        self.ending = self._pool.submit(self.scheduler.run)
        place = ServerJob(
            "server", "127.0.0.1", self.scheduler.port, workers, servers, -1, "127.0.0.1", None, is_supervised
        )
        self._serving = [self._pool.submit(self._serve, place) for _ in range(servers)]
        self._members: list[SchedulerClient] = []
        self.gives_up = False
        """Whether the scheduler is to end because somebody does not come."""

    def _serve(self, place: ServerJob) -> None:
        with open_server(place) as server:
            self._servers.put(server)
            server.run()

    def member(self, rank: int = -1, role: str = "worker") -> SchedulerClient:
        """A worker's membership, once all have come."""
        self._members.append(SchedulerClient(role, self.address, rank=rank, timeout=LIMIT))
        return self._members[-1]

    def members(self) -> list[SchedulerClient]:
        """All workers', in rank order."""
        return self.at_once(*[lambda rank=rank: self.member(rank) for rank in range(self._workers)])

    def server(self) -> Server:
        """The next server that has joined."""
        return self._servers.get(timeout=LIMIT)

    def at_once(self, *calls: Callable[[], Any]) -> list[Any]:
        """What calls return that wait for each other."""
        return [call.result(LIMIT) for call in [self._pool.submit(call) for call in calls]]

    def later(self, call: Callable[[], Any]) -> Any:
        """A call that goes on meanwhile, as a Future."""
        return self._pool.submit(call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """See the workers leave, and scheduler and servers end by themselves."""
        try:
            for member in self._members:
                member.close()
            for one in [self.ending, *self._serving] if error is None else ():
                with suppress(*([StallError] if self.gives_up else [])):
                    one.result(LIMIT)
        finally:
            self._pool.shutdown()


class Line:
    """A line to a server, or to the scheduler, by which anything can be said; a context manager."""

    def __init__(self, address: str, identity: bytes = b"") -> None:
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(1000 * LIMIT))
        if identity:
            self._socket.setsockopt(zmq.IDENTITY, identity)
        self._socket.connect(address.partition(" ")[0])  # a server's stream stands behind a blank

    @classmethod
    def of_worker(
        cls, member: SchedulerClient, mode: str = "sync", staleness: int = -1, card: bytes = b"", server: int = 0
    ) -> Line:
        """A worker's line to a server, which has said hello."""
        line = cls(member.servers[server], member.identity)
        answer = line.ask(Hello(member.rank, member.view, mode, staleness, card, 0))
        assert isinstance(answer, Welcome), answer
        return line

    def say(self, message: Message | bytes, *frames: bytes) -> None:
        self._socket.send_multipart([message if isinstance(message, bytes) else protocol.pack(message), *frames])

    def hear(self, *, beats: bool = False) -> tuple[Any, list[bytes]]:
        while True:
            header, *frames = self._socket.recv_multipart()
            message = protocol.unpack(header)
            if not isinstance(message, Beat) or beats:
                return message, frames

    def hears_nothing(self) -> bool:
        """Whether nothing has come; to be asked when an answer to something later has."""
        return not self._socket.poll(0)

    def ask(self, message: Message | bytes, *frames: bytes) -> Any:
        """Say something, and give the answer's header."""
        self.say(message, *frames)
        return self.hear()[0]

    def refusal(self, message: Message | bytes, *frames: bytes) -> str:
        """Say something that is refused, and give the class of the error and its text."""
        answer = self.ask(message, *frames)
        assert isinstance(answer, Failed), answer
        return f"{answer.error}: {answer.text}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Be gone, without a goodbye; again: nothing."""
        self._socket.close()
        self._context.term()

    def reconnect(self) -> None:
        """Lose the connection with all that has come and was not heard, and have a new one."""
        identity = self._socket.getsockopt(zmq.IDENTITY)
        assert isinstance(identity, bytes)
        self.close()
        self.__init__(self.address, identity)  # type: ignore[misc]


def of_ranks(members: Sequence[SchedulerClient], **options: Any) -> list[Line]:
    """A line to the first server for each worker."""
    return [Line.of_worker(member, **options) for member in members]
