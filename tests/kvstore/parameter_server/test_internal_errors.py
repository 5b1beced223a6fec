"""Errors inside servers and clients: they reach workers with their cause, and end nothing in silence."""

from __future__ import annotations

import errno
import logging
import queue
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import msgpack
import pytest
import torch
import zmq

from gangline.collectives.errors import DeadNodeError, GanglineError, MismatchError
from gangline.kvstore.parameter_server.client import server_client
from gangline.kvstore.parameter_server.client.pending import RequestWork
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.protocol import Command
from gangline.kvstore.parameter_server.server.optimizer_shards import ShardOptimizers
from gangline.kvstore.parameter_server.server.server import Server
from gangline.kvstore.parameter_server.server.sessions import Sessions
from gangline.kvstore.parameter_server.store import DistStore
from gangline.kvstore.parameter_server.transport.listener import Listener
from tests.kvstore.parameter_server.in_process import LIMIT, Job

pytestmark = pytest.mark.timeout(110)


# Servers


LARGE = 1 << 17
"""Elements of a key that a thread of the pool updates."""


def divide_by_zero(*_: object) -> None:
    raise ZeroDivisionError("inside the server")


@pytest.mark.parametrize(
    ("owner", "method", "call"),
    [
        (ShardOptimizers, "apply", lambda kv: kv.pushpull("small", torch.ones(1))),
        (ShardOptimizers, "apply", lambda kv: kv.pushpull("large", torch.ones(LARGE))),
        (Server, "_run_command", lambda kv: kv.set_optimizer("sgd")),
    ],
    ids=["update", "update in a thread of the pool", "command"],
)
def test_an_error_in_a_server_carries_its_traceback(
    owner: type,
    method: str,
    call: Callable[[DistStore], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Job(1) as job, job.stores()[0] as kv:
        kv.init(["small", "large"], [torch.zeros(1), torch.zeros(LARGE)])
        kv.set_optimizer("sgd")
        monkeypatch.setattr(owner, method, divide_by_zero)
        with pytest.raises((MismatchError, RuntimeError)) as told:
            call(kv)
    if owner is Server:
        assert (type(told.value), str(told.value)) == (RuntimeError, "inside the server")
    else:
        assert isinstance(told.value, MismatchError)
        assert "ZeroDivisionError: inside the server" in str(told.value)
    (note,) = told.value.__notes__
    assert note.startswith("Traceback of the server")
    assert "in divide_by_zero" in note
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_a_server_that_fails_is_named_with_the_cause_on_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with Job(2) as job:
        stores = job.stores(timeout=10)
        job.each(stores, lambda kv: kv.init("key", torch.zeros(1)))
        job.expected = (ZeroDivisionError,)
        waiting = [job.later(lambda: stores[0].pushpull("key", torch.ones(1), torch.ones(1)))]
        monkeypatch.setattr(Sessions, "flush", divide_by_zero)
        waiting.append(job.later(lambda: stores[1].pushpull("key", torch.ones(1), torch.ones(1))))
        for rank, call in enumerate(waiting):
            error = call.exception(LIMIT)
            assert isinstance(error, DeadNodeError)
            assert "server 0 ended with an error: ZeroDivisionError: inside the server" in str(error)
            assert f"worker {rank} waited in pushpull of key 'key'" in str(error)


def test_a_server_without_free_descriptors_accepts_connections_later(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    gate.set()
    receive = Listener.receive

    def held(listener: Listener) -> Iterator[Any]:
        gate.wait(LIMIT)
        yield from receive(listener)

    monkeypatch.setattr(Listener, "receive", held)
    warnings: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(logging.getLogger("gangline"), "warning", lambda text, *rest, **_: warnings.put(text % rest))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with Job(1) as job, job.stores(timeout=10)[0] as kv, socket.socket(socket.AF_UNIX) as late:
            kv.init("key", torch.zeros(1))
            listener = job.server()._listener._unix_listener
            assert listener is not None
            gate.clear()
            late.settimeout(LIMIT)
            late.connect(f"\0{listener.name}")
            late.sendall(b"GET / HTTP/1.1\r\n\r\n")
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            gate.set()
            while "no process can connect at present: Too many open files" not in warnings.get(timeout=LIMIT):
                pass
            kv.pushpull("key", torch.ones(1), torch.empty(1))
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert late.recv(1) == b""  # it was accepted, and refused for what it sent
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Threads of a worker's clients: an error fails what is pending, and later calls


FULL = OSError(errno.EMFILE, "Too many open files")


def test_a_worker_that_cannot_open_shared_memory_uses_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "open_offered", Mock(side_effect=FULL))
    with Job(1) as job, job.stores(timeout=LIMIT)[0] as kv:
        kv.init("a", torch.zeros(20_000))
        assert kv._servers.shares_memory == [False]
        out = torch.empty(20_000)
        kv.pushpull("a", torch.ones(20_000), out=out)
        assert out.unique().tolist() == [1.0]


@pytest.mark.parametrize("error", [FULL, zmq.ZMQError(errno.ENOTSOCK), MemoryError("no memory for 8 MiB")], ids=repr)
def test_an_error_while_messages_are_received_fails_pending_and_later_calls(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Job(2) as job:
        kv, _ = stores = job.stores(timeout=LIMIT)
        job.each(stores, lambda kv: kv.init("a", torch.zeros(20_000)))
        kv.push("a", torch.ones(20_000))
        pending = kv.pull("a", torch.empty(20_000), async_op=True)  # the other worker does not push
        for connection in kv._servers._connections:
            monkeypatch.setattr(connection.channel, "receive", Mock(side_effect=error))
        for call in (
            lambda: pending.wait(LIMIT),
            lambda: kv.pull("a", torch.empty(20_000)),
            lambda: kv.push("a", torch.ones(20_000)),
            kv.barrier,
        ):
            with pytest.raises(GanglineError) as raised:
                call()
            assert "worker 0 cannot exchange messages with its servers any more" in str(raised.value)
            assert str(error) in str(raised.value)
        assert raised.value.__cause__ is error


def test_a_work_ends_whose_requests_are_submitted_after_close() -> None:
    with Job(1) as job, job.stores(timeout=LIMIT)[0] as kv:
        kv._servers.close()
        work = RequestWork("late")
        work.run(lambda work: work.submit([Request(0, Command(0, "norms", msgpack.packb(0)), "late")] * 3, kv._servers))
        with pytest.raises(RuntimeError, match="the store is closed"):
            work.wait(LIMIT)


def test_an_error_of_the_schedulers_client_fails_waiting_and_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_HEARTBEAT_LIMIT", "1")  # the job ends when the worker that fails counts as dead
    monkeypatch.setenv("GANGLINE_HEARTBEAT", "0.1")
    with Job(2) as job:
        zero, _ = job.members()
        waiting = job.later(lambda: zero.exchange(b"", "barrier"))
        monkeypatch.setattr(zero, "_receive", Mock(side_effect=FULL))
        for call in (lambda: waiting.result(LIMIT), lambda: zero.exchange(b"", "barrier"), lambda: zero.join(b"")):
            with pytest.raises(DeadNodeError, match=r"the scheduler cannot be reached any more: OSError:.* Too many"):
                call()
        assert zero.lost
