"""Ranks as processes that exchange messages with the test and are always killed at its end."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import torch
import torch.distributed as dist

from gangline.collectives.processes.process_pool import ProcessPool
from gangline.collectives.processes.spawning import Outcome, Ranks
from gangline.collectives.transports.base import BootstrapAllGather


class Bare:
    """Stands in for a communicator as the opener of `Ranks`: the bootstrap exchange only."""

    def __init__(self, rank: int, size: int, exchange: BootstrapAllGather, **_options: Any) -> None:
        self.rank, self.size, self.exchange = rank, size, exchange

    def close(self) -> None:
        pass


class Rank:
    """Rank's side of the pipe between a rank and the test."""

    def __init__(self, rank: int, size: int, pipe: Connection) -> None:
        self.rank = rank
        self.size = size
        self._pipe = pipe

    def exchange(self, data: bytes) -> list[bytes]:
        self._pipe.send_bytes(msgpack.packb(["exchange", data]))
        return msgpack.unpackb(self._pipe.recv_bytes())

    def tell(self, value: Any) -> None:
        self._pipe.send_bytes(msgpack.packb(["told", value]))

    def hear(self) -> Any:
        return msgpack.unpackb(self._pipe.recv_bytes())


def run_until_one_fails(calls: Iterable[tuple[str, Callable[[], None]]]) -> dict[str, str]:
    """Run named calls up to the first that fails; return its traceback, and an empty text for those before it."""
    outcomes = {}
    for name, call in calls:
        try:
            call()
            outcomes[name] = ""
        except BaseException:  # noqa: BLE001  the test shows it
            outcomes[name] = traceback.format_exc()
            break
    return outcomes


bare_ranks = partial(Ranks, opener=Bare, timeout=20)


def results_of(*arguments: Any, **options: Any) -> list[Any]:
    """Run `bare_ranks` to their end and return their results, or raise their error."""
    with bare_ranks(*arguments, **options) as ranks:
        return ranks.results()


def outcomes_of(*arguments: Any) -> list[Outcome]:
    """Run `bare_ranks` to their end and return their outcomes."""
    with bare_ranks(*arguments) as ranks:
        return ranks.outcomes()


def join_group(rank: Rank, path: str, backend: str = "gangline", seconds: float = 50) -> None:
    """Open torch's default process group of the ranks, who meet at a file."""
    from gangline.collectives import torch_backend

    assert torch_backend.__all__  # it registers the backend
    place = {"rank": rank.rank, "world_size": rank.size}
    dist.init_process_group(backend, init_method=f"file://{path}", timeout=timedelta(seconds=seconds), **place)


class Processes:
    """Processes that run ``function(rank, *arguments)``; `heard` returns what they `tell`."""

    def __init__(self, function: Callable[..., None], size: int, *arguments: Any, limit: float = 60) -> None:
        self._deadline = time.monotonic() + limit
        self._exchanged: dict[int, bytes] = {}
        self._told: list[list[Any]] = [[] for _ in range(size)]
        self._pool = ProcessPool(_main, size)
        for rank in range(size):
            self.say(rank, [function.__module__, function.__name__, rank, size, arguments])

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self._pool.pids[rank], number)

    def say(self, rank: int, value: Any) -> None:
        self._pool.connections[rank].send_bytes(msgpack.packb(value))

    def heard(self, rank: int) -> Any:
        """Return a rank's next message; all-gathers of the ranks are served meanwhile."""
        while not self._told[rank]:
            left = self._deadline - time.monotonic()
            assert left > 0, f"rank {rank} sent nothing in time"
            assert not self._pool.connections[rank].closed, f"rank {rank} ended and sent nothing; its error is above"
            for ready in self._pool.wait(left)[0]:
                self._serve(ready)
        return self._told[rank].pop(0)

    def all_heard(self) -> list[Any]:
        return [self.heard(rank) for rank in range(len(self._told))]

    def _serve(self, rank: int) -> None:
        connection = self._pool.connections[rank]
        try:
            kind, value = msgpack.unpackb(connection.recv_bytes(), strict_map_key=False)
        except (EOFError, ConnectionError):
            connection.close()
            return
        if kind == "told":
            self._told[rank].append(value)
            return
        self._exchanged[rank] = value
        if len(self._exchanged) == len(self._told):
            everybody = [self._exchanged.pop(other) for other in range(len(self._told))]
            for other in range(len(self._told)):
                self.say(other, everybody)


def in_processes(function: Callable[..., None], size: int, *arguments: Any) -> list[Any]:
    """Run ``function(rank, *arguments)`` in processes; return the message of each."""
    with Processes(function, size, *arguments) as ranks:
        return ranks.all_heard()


def _main(connection: Connection) -> None:
    torch.set_num_threads(1)  # several ranks share a core
    module, name, rank, size, arguments = msgpack.unpackb(connection.recv_bytes())
    getattr(import_module(module), name)(Rank(rank, size, connection), *arguments)
