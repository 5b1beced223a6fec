"""Scheduler and servers in threads of the test, and clients that send arbitrary messages to them."""

from __future__ import annotations

import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar
from unittest.mock import patch

import msgpack
import zmq

from gangline.collectives.errors import StallError
from gangline.kvstore.parameter_server import protocol
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.environment import ServerJob
from gangline.kvstore.parameter_server.protocol import (
    DENSE,
    Ack,
    Define,
    Failed,
    Heartbeat,
    Hello,
    Message,
    Pull,
    Push,
    Values,
    Welcome,
)
from gangline.kvstore.parameter_server.scheduler.scheduler import Scheduler
from gangline.kvstore.parameter_server.server.server import Server, open_server
from gangline.kvstore.parameter_server.store import DistStore, _closed_jobs
from gangline.kvstore.parameter_server.transport.client_channel import open_channel, scheduler_address
from gangline.kvstore.parameter_server.transport.poller import Poller

LIMIT = 30.0
"""Timeout of waits in seconds."""

Worker = TypeVar("Worker", DistStore, SchedulerClient)


class Job:
    """Scheduler and servers of a job; a context manager."""

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
        self._stores: list[DistStore] = []
        self.expected: tuple[type[Exception], ...] = ()
        """Errors with which servers may end."""
        self.gives_up = False
        """True if the scheduler is expected to end with a StallError."""

    def _serve(self, place: ServerJob) -> None:
        with open_server(place) as server:
            self._servers.put(server)
            server.run()

    def member(self, rank: int = -1, role: str = "worker") -> SchedulerClient:
        """Register a process and return its membership once all have registered."""
        self._members.append(SchedulerClient(role, self.address, rank=rank, timeout=LIMIT))
        return self._members[-1]

    def members(self) -> list[SchedulerClient]:
        """Register all workers and return their memberships in rank order."""
        return self.at_once(*[lambda rank=rank: self.member(rank) for rank in range(self._workers)])

    def stores(self, name: str = "dist_sync", **options: Any) -> list[DistStore]:
        """Create the stores of all workers in this process and return them in rank order."""
        host, _, port = self.address.removeprefix("tcp://").partition(":")
        counts = {"DMLC_NUM_WORKER": str(self._workers), "DMLC_NUM_SERVER": str(len(self._serving))}
        with patch.dict(os.environ, DMLC_PS_ROOT_URI=host, DMLC_PS_ROOT_PORT=port, **counts):
            stores = self.at_once(*[lambda: DistStore(name, **options)] * self._workers)
        self._stores = sorted(stores, key=lambda store: store.rank)
        return self._stores

    def server(self) -> Server:
        """Return the next server that has registered."""
        return self._servers.get(timeout=LIMIT)

    def at_once(self, *calls: Callable[[], Any]) -> list[Any]:
        """Run calls concurrently and return their results."""
        return [call.result(LIMIT) for call in [self._pool.submit(call) for call in calls]]

    def each(self, workers: Iterable[Worker], call: Callable[[Worker], Any]) -> list[Any]:
        """Make a call with each store or membership concurrently and return the results."""
        return self.at_once(*[partial(call, worker) for worker in workers])

    def later(self, call: Callable[[], Any]) -> Any:
        """Run a call in the background and return its Future."""
        return self._pool.submit(call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the workers' stores and memberships, and wait for scheduler and servers to end."""
        try:
            if error is None:
                self.each(self._stores, DistStore.close)
            for member in self._members:
                member.close()
            for one in [self.ending, *self._serving] if error is None else ():
                with suppress(*self.expected, *([StallError] if self.gives_up else [])):
                    one.result(LIMIT)
        finally:
            self._pool.shutdown()
            _closed_jobs.clear()  # a later job of this process may get the same port


class RawClient:
    """Connection to a server or the scheduler for arbitrary messages; a context manager."""

    def __init__(self, address: str, identity: bytes = b"") -> None:
        self.address = address
        self._identity = identity or os.urandom(8)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = Poller()
        endpoint = address if "unix://" in address else scheduler_address(address)
        self._channel = open_channel(endpoint, self._context, self._identity, self._poller)
        self._received: deque[list[memoryview]] = deque()
        self._last_read = 0

    @classmethod
    def of_worker(
        cls, member: SchedulerClient, mode: str = "sync", staleness: int = -1, handle: bytes = b"", server: int = 0
    ) -> RawClient:
        """Connect to a server as a worker and send Hello."""
        client = cls(member.servers[server], member.identity)
        client._greet(member, mode, staleness, handle)
        return client

    def _greet(self, member: SchedulerClient, mode: str, staleness: int = -1, handle: bytes = b"") -> None:
        word = 8 * member.rank if handle else 0
        answer = self.request(Hello(member.rank, member.view, mode, staleness, handle, word))
        assert isinstance(answer, Welcome), answer

    def send(self, message: Message | bytes, *frames: bytes) -> None:
        if isinstance(message, Push):
            message.last_read = self._last_read
        self._channel.send([message if isinstance(message, bytes) else protocol.pack(message), *frames])

    def receive(self, *, heartbeats: bool = False) -> tuple[Any, list[bytes]]:
        while True:
            self._poll(LIMIT)
            header, *frames = map(bytes, self._received.popleft())
            message = protocol.unpack(header)
            if isinstance(message, Values):
                self._last_read = message.number
            if not isinstance(message, Heartbeat) or heartbeats:
                return message, frames

    def _poll(self, seconds: float) -> None:
        """Wait for messages."""
        ends = time.monotonic() + seconds
        while not self._received:
            left = ends - time.monotonic()
            events = self._poller.wait(max(0, int(1000 * left)))
            self._received.extend(self._channel.receive(events))
            if left < 0:
                assert not seconds, f"no message within {seconds:g} s"
                return

    def wait_until_closed(self) -> None:
        """Receive until the other side has closed the connection."""
        while not self._channel.disconnected_at:
            self._received.extend(self._channel.receive(self._poller.wait(int(1000 * LIMIT))))

    def has_nothing(self) -> bool:
        """Return whether no message has arrived; call it after the answer to a later message."""
        self._poll(0)
        return not self._received

    def request(self, message: Message | bytes, *frames: bytes) -> Any:
        """Send a message and return the header of the answer."""
        self.send(message, *frames)
        return self.receive()[0]

    def define(self, sequence: int, shard: int, shape: Sequence[int], data: bytes, **options: Any) -> None:
        """Define a key as `definition` does."""
        assert self.request(definition(sequence, shard, shape, **options), data) == Ack([sequence])

    def push(self, sequence: int, shard: int, number: int, data: bytes, kind: int = DENSE) -> None:
        """Send a push of one shard to a round."""
        self.send(Push(sequence, [(shard, number, kind, len(data))], None, None, False, None), data)

    def pull(self, sequence: int, shard: int, number: int) -> None:
        """Request the value of one shard after a round."""
        self.send(Pull(sequence, [(shard, number, DENSE, 0)], False, None))

    def refusal(self, message: Message | bytes, *frames: bytes) -> str:
        """Send a message that fails; return the class and the text of the error."""
        answer = self.request(message, *frames)
        assert isinstance(answer, Failed), answer
        return f"{answer.error}: {answer.text}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect without leaving. Idempotent."""
        if not self._context.closed:
            self._channel.close()
            self._poller.close()
            self._context.term()

    def reconnect_as(self, member: SchedulerClient, mode: str) -> None:
        """Reconnect and send Hello."""
        self.reconnect()
        self._greet(member, mode)

    def reconnect(self) -> None:
        """Reconnect; messages that were not received are lost."""
        self.close()
        self.__init__(self.address, self._identity)  # type: ignore[misc]


def definition(sequence: int, shard: int, shape: Sequence[int], width: int = 1, key: Any = "key") -> Define:
    """Return the definition of a key of float32 values that is one shard."""
    return Define(sequence, [(shard, "float32", list(shape), width, msgpack.packb(key), 0, True)], None)


class RawWorkers:
    """All workers of a job, connected to its first server, and numbers for their messages; a context manager."""

    def __init__(self, job: Job, **options: Any) -> None:
        self.members = job.members()
        self.clients = [RawClient.of_worker(member, **options) for member in self.members]
        self._sequence = 0

    def next(self) -> int:
        self._sequence += 1
        return self._sequence

    def define(self, shard: int, shape: Sequence[int], data: bytes, **options: Any) -> None:
        self.clients[0].define(self.next(), shard, shape, data, **options)

    def push(self, rank: int, number: int, data: bytes, kind: int = DENSE, shard: int = 5, sequence: int = 0) -> int:
        """Push to a round and return the sequence number."""
        sequence = sequence or self.next()
        self.clients[rank].push(sequence, shard, number, data, kind)
        return sequence

    def push_and_confirm(self, rank: int, *arguments: Any, **options: Any) -> None:
        """Push as `push` does, and check that the server acknowledges it."""
        sequence = self.push(rank, *arguments, **options)
        assert self.clients[rank].receive()[0] == Ack([sequence])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
