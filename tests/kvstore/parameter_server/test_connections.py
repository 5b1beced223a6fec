"""Connections between workers and servers that break or are cut while nothing else is wrong."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Set
from contextlib import suppress
from typing import Any

import pytest
import torch

from gangline import kvstore
from gangline.collectives.errors import GanglineError
from gangline.collectives.transports import unix_sockets
from gangline.collectives.transports.base import BootstrapAllGather
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.parameter_server.server import server
from gangline.kvstore.parameter_server.server.rounds import ShardRounds
from gangline.kvstore.parameter_server.server.sessions import Sessions, WorkerSession
from gangline.kvstore.parameter_server.transport.client_channel import SocketChannel
from gangline.kvstore.parameter_server.transport.poller import Source
from tests.collectives.processes import Bare
from tests.collectives.stage import Actor
from tests.hosts import Hosts, enter, obstacle
from tests.kvstore.parameter_server.faults import DistStage
from tests.kvstore.parameter_server.in_process import LIMIT, Job

pytestmark = pytest.mark.timeout(60)


LARGE = 1_000_000
"""Elements of a key that fills the buffers of a cut connection."""


class BreakingProxies:
    """Proxies between servers of this process and their workers, which break connections when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._left: list[list[float]] = []
        """Bytes that each connection still passes on."""
        monkeypatch.setattr(server, "SchedulerClient", self._register)

    def _register(self, role: str, scheduler: str, *, address: str, **options: Any) -> SchedulerClient:
        """Register a server with the address of a proxy for its Unix socket."""
        name = next(word for word in address.split() if word.startswith("unix://")).removeprefix("unix://")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{name}-broken")
        listener.listen()
        threading.Thread(target=self._accept, args=(listener, name), daemon=True).start()
        return SchedulerClient(role, scheduler, address=address.replace(name, f"{name}-broken"), **options)

    def _accept(self, listener: socket.socket, name: str) -> None:
        while True:
            near, _ = listener.accept()
            far, left = unix_sockets.connect(name), [math.inf]
            self._left.append(left)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=(*pair, left), daemon=True).start()

    def break_after(self, nbytes: int = 0) -> None:
        """Break all connections after so many bytes; those that follow are lost."""
        for left in self._left:
            left[0] = nbytes

    def _forward(self, source: socket.socket, target: socket.socket, left: list[float]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                left[0] -= len(data)
                if left[0] < 0:
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> BreakingProxies:
    """Return the proxies of servers whose data are all sent over Unix streams."""
    monkeypatch.setenv("GANGLINE_TRANSPORT", "ipc")
    return BreakingProxies(monkeypatch)


@pytest.mark.parametrize(("numel", "nbytes"), [(3, 0), (LARGE, 700_000)])
def test_a_lost_push_is_repeated_while_its_worker_computes(proxies: BreakingProxies, numel: int, nbytes: int) -> None:
    with Job(2) as job:
        first, second = stores = job.stores(timeout=10)
        out = torch.empty(numel)
        job.each(stores, lambda kv: kv.init("key", torch.zeros(numel)))
        proxies.break_after(nbytes)
        first.push("key", torch.ones(numel))  # lost with the connection; worker 0 makes no further call
        second.pushpull("key", torch.full((numel,), 4.0), out)
        assert out.unique().tolist() == [5]


def test_values_that_are_lost_hold_up_no_push_that_comes_before_they_are_requested_again(
    proxies: BreakingProxies, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Job(2) as job:
        first, second = stores = job.stores("dist_async", timeout=10)
        out = torch.empty(LARGE)
        job.each(stores, lambda kv: kv.init("key", torch.zeros(LARGE)))
        lost, pushed = threading.Event(), threading.Event()
        send_values, push = Sessions._send_values, ShardRounds.push
        channel = first._servers._connections[0].channel
        reconnected = channel.reconnected

        def lose(sessions: Sessions, worker: WorkerSession, *args: Any) -> None:
            if worker.rank == 0 and not lost.is_set():
                proxies.break_after()
                lost.set()
            send_values(sessions, worker, *args)

        def report(rounds: ShardRounds, *args: Any) -> None:
            push(rounds, *args)
            pushed.set()

        monkeypatch.setattr(Sessions, "_send_values", lose)
        monkeypatch.setattr(ShardRounds, "push", report)
        monkeypatch.setattr(channel, "reconnected", lambda events: pushed.is_set() and reconnected(events))
        pulling = job.later(lambda: first.pull("key", out))
        assert lost.wait(LIMIT)
        second.push("key", torch.ones(LARGE))
        pulling.result(LIMIT)
        assert out.unique().tolist() == [1]  # as of the time when it was requested again
        first.pull("key", out)
        assert out.unique().tolist() == [1]


def play_over_a_cut_link(path: str) -> None:
    """Do a pushpull for each message of the test and report the result; report when the connection is lost."""
    kv = kvstore.create("dist_sync", timeout=20)
    kv.init("key", torch.zeros(LARGE))
    actor = Actor(kv.rank, path)
    reconnected = SocketChannel.reconnected

    def report_lost(channel: SocketChannel, events: Set[Source]) -> bool:
        was_lost = channel.disconnected_at
        is_new = reconnected(channel, events)
        if channel.disconnected_at and not was_lost:
            actor.tell("lost")
        return is_new

    SocketChannel.reconnected = report_lost  # type: ignore[method-assign]
    actor.tell("ready")
    out = torch.empty(LARGE)
    while (digit := actor.hear()) is not None:
        try:
            kv.pushpull("key", torch.full((LARGE,), float(digit) * 4**kv.rank), out)
            actor.tell(out.unique().tolist())
        except GanglineError as error:
            actor.tell(f"{type(error).__name__}: {error}")
    kv.close()


class HostProcess(Bare):
    """Process of a job with one server, which runs on a host of its own."""

    def __init__(self, rank: int, size: int, exchange: BootstrapAllGather, **more: object) -> None:
        super().__init__(rank, size, exchange, **more)
        enter(os.environ["GANGLINE_TEST_HOSTS"].split()[rank == 1])


@pytest.mark.slow
@pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
@pytest.mark.parametrize("heals", [True, False])
def test_a_cut_link_between_hosts_heals_or_is_named(heals: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistStage, "opener", HostProcess)
    limits = {"GANGLINE_HEARTBEAT_LIMIT": "30" if heals else "4", "GANGLINE_TRANSPORT": "tcp", "GANGLINE_INSECURE": "1"}
    with Hosts(2) as hosts:
        environment = {"GANGLINE_TEST_HOSTS": " ".join(hosts.names), "GANGLINE_TEST_SCHEDULER": hosts.addresses[0]}
        with DistStage(play_over_a_cut_link, 2, 1, **environment, **limits) as stage:
            assert [stage.heard(rank) for rank in range(2)] == ["ready"] * 2
            neighbour = [hosts.addresses[0], "dev", "eth0"]  # the server reaches neither the workers nor the scheduler
            hosts.run(1, ["ip", "neigh", "replace", *neighbour, "lladdr", "02:00:00:00:00:99", "nud", "permanent"])
            for rank in range(2):
                stage.say(rank, 1)
                assert stage.heard(rank) == "lost"
            if heals:
                hosts.run(1, ["ip", "neigh", "delete", *neighbour])
            told = [stage.heard(rank) for rank in range(2)]
            if heals:
                assert told == [[5.0]] * 2
            else:
                reasons = (  # the hosts share a kernel, so the scheduler may see first that the server has ended itself
                    "server 0 has had no connection to the scheduler for 4 s",
                    "has had no connection to server 0 for 4 s",
                    "server 0 was killed or left: its process has ended",
                )
                assert all(one.startswith("DeadNodeError: ") for one in told), told
                assert all(any(reason in one for reason in reasons) for one in told), told
            for rank in range(2):
                stage.say(rank)
            stage.outcomes()
