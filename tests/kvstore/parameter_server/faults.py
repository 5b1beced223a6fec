"""Parameter-server jobs whose workers report to the test, and proxies that break connections to servers."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import pytest

from gangline.collectives.processes.spawning import Outcome
from gangline.collectives.transports import unix_sockets
from gangline.collectives.transports.base import BootstrapAllGather
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.client.server_client import ServerClient
from gangline.kvstore.parameter_server.server import server
from tests.collectives.stage import LIMIT, WAITS, Actor, Audience
from tests.hosts import Hosts, enter
from tests.kvstore.parameter_server.processes import DistJob, RoleProcess

_SERVER, _SCHEDULER = 100, 200
"""Offsets of server and scheduler numbers among the processes of a stage."""


class DistStage(Audience):
    """Job whose workers run ``play(path, *arguments)`` and connect to the stage once the job has started."""

    opener: type[RoleProcess] = RoleProcess
    successors = 0
    """Number of processes that wait until a worker has died, and then take its place."""

    def __init__(self, play: Callable[..., Any], workers: int, servers: int, *arguments: Any, **more: str) -> None:
        super().__init__()
        try:
            cache = str(Path(self.path).with_name("cache"))  # caches of libraries do not count as files left behind
            with patch.dict(
                os.environ, {**self.environment, "XDG_CACHE_HOME": cache, "XDG_CONFIG_HOME": cache, **more}
            ):
                job = DistJob(
                    play, workers, servers, self.path, *arguments, opener=self.opener, successors=self.successors
                )
                self._job = self._stack.enter_context(job)
            self._ending = self._stack.enter_context(ThreadPoolExecutor(1)).submit(self._job.outcomes)
            workers += self.successors
            places = [("worker", rank, rank) for rank in range(workers)]
            places += [("server", rank, _SERVER + rank) for rank in range(servers)]
            for role, rank, number in [*places, ("scheduler", 0, _SCHEDULER)]:
                self._know(number, self._job.pid(role, rank))
                self._stack.callback(self.signal, number, signal.SIGKILL)
            self.admit(workers, self._ending.done)
        except BaseException:
            self.close()
            raise

    def kill_server(self, rank: int) -> None:
        self.kill(_SERVER + rank)

    def kill_scheduler(self) -> None:
        self.kill(_SCHEDULER)

    def outcomes(self) -> list[Outcome]:
        """Wait for all processes; return the outcomes of scheduler, servers and workers in this order."""
        return self._ending.result(LIMIT)

    def _last_words(self) -> str:
        for number in self._processes:
            self.signal(number, signal.SIGKILL)
        return "; ".join(str(outcome.error) for outcome in self.outcomes())


class Waits:
    """Reports to the stage, once `due` is set, that a worker waits inside a call."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.due = False
        self._tell_before(SchedulerClient, "_wait")
        self._tell_before(ServerClient, "wait")

    def _tell_before(self, cls: Any, name: str) -> None:
        inner = getattr(cls, name)

        def waits(own: Any, *args: Any) -> Any:
            if self.due:
                self.due = False
                self._actor.tell(WAITS)
            return inner(own, *args)

        setattr(cls, name, waits)


class HostProcess(RoleProcess):
    """Process of a job with one server, which runs on a host of its own; its link to workers can be cut."""

    def __init__(self, rank: int, size: int, exchange: BootstrapAllGather, **more: object) -> None:
        super().__init__(rank, size, exchange, **more)
        is_server = rank == 1
        enter(os.environ["GANGLINE_TEST_HOSTS"].split()[is_server])
        if is_server:
            os.environ["DMLC_INTERFACE"] = CuttableHosts.interface


class CuttableHosts(Hosts):
    """A host for the scheduler and workers and one for a server, which workers reach at a second address."""

    interface = "eth0:1"

    def __init__(self) -> None:
        super().__init__(2)
        self._address = f"{self.addresses[1]}00"
        self._cuts: list[tuple[int, str]] = []
        self.environment = {
            "GANGLINE_TEST_HOSTS": " ".join(self.names),
            "GANGLINE_TEST_SCHEDULER": self.addresses[0],
            "GANGLINE_INSECURE": "1",
        }

    def __enter__(self) -> Self:
        super().__enter__()
        self.run(1, ["ip", "address", "add", f"{self._address}/24", "dev", "eth0", "label", self.interface])
        return self

    def cut_server(self) -> None:
        """Lose all packets from workers to the server, as behind a dead switch; both still reach the scheduler."""
        self._cut(0, self._address)

    def cut_hosts(self) -> None:
        """Lose all packets from the server's host to the other one."""
        self._cut(1, self.addresses[0])

    def mend(self) -> None:
        """Lose no packets any more."""
        for host, address in self._cuts:
            self.run(host, ["ip", "neigh", "delete", address, "dev", "eth0"])
        self._cuts.clear()

    def _cut(self, host: int, address: str) -> None:
        wrong = "02:00:00:00:00:99"
        self.run(host, ["ip", "neigh", "replace", address, "lladdr", wrong, "dev", "eth0", "nud", "permanent"])
        self._cuts.append((host, address))


class BreakingProxy:
    """Proxy between a server and its workers that breaks each connection after a number of bytes.

    Args:
        listener: accepts the workers.
        connect: connects to the server.
        breaks: bytes after which each connection breaks, in order; later connections do not break.
    """

    def __init__(self, listener: socket.socket, connect: Callable[[], socket.socket], breaks: Sequence[int]) -> None:
        self._listener = listener
        self._connect = connect
        self._breaks = list(breaks)
        self._allowed: list[list[int]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = self._connect()
            allowed = [self._breaks.pop(0)] if self._breaks else []
            self._allowed.append(allowed)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(*pair, allowed), daemon=True).start()

    def break_at_next_byte(self) -> None:
        """Break all connections when the next bytes arrive, which are lost."""
        for allowed in self._allowed:
            allowed[:] = [0]

    def _forward(self, source: socket.socket, target: socket.socket, allowed: list[int]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                if allowed:
                    allowed[0] -= len(data)
                    if allowed[0] < 0:
                        break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def announce_proxies(monkeypatch: pytest.MonkeyPatch, breaks: Sequence[int] = ()) -> list[BreakingProxy]:
    """Make servers of this process announce proxies for their sockets, which break connections after so many bytes.

    Returns:
        List to which the proxies are added.
    """
    proxies: list[BreakingProxy] = []

    def scheduler_client(role: str, scheduler: str, *, address: str, **options: Any) -> SchedulerClient:
        return SchedulerClient(role, scheduler, address=proxied(address, breaks, proxies), **options)

    monkeypatch.setattr(server, "SchedulerClient", scheduler_client)
    return proxies


def proxied(address: str, breaks: Sequence[int], proxies: list[BreakingProxy]) -> str:
    """Add proxies for a server's sockets and return their address."""
    found = []
    for word in address.split():
        scheme, _, name = word.partition("://")
        if scheme == "process":
            found.append(word)
            continue
        if scheme == "tcp":
            host, _, port = name.rpartition(":")
            listener = socket.create_server((host, 0))
            connect = partial(socket.create_connection, (host, int(port)))
            found.append(f"tcp://{host}:{listener.getsockname()[1]}")
        else:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"\0{name}-broken")
            listener.listen()
            connect = partial(unix_sockets.connect, name)
            found.append(f"{word}-broken")
        proxies.append(BreakingProxy(listener, connect, breaks))
    return " ".join(found)
