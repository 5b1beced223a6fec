"""Errors that end the threads of a worker's clients: they fail what is pending, and later calls, with the cause."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zmq

from gangline.collectives.errors import DeadNodeError, GanglineError
from gangline.collectives.work import Work
from gangline.kvstore.parameter_server.client import server_client
from gangline.kvstore.parameter_server.client.pending import PendingRequests
from gangline.kvstore.parameter_server.client.request import Request
from gangline.kvstore.parameter_server.protocol import Command
from tests.kvstore.parameter_server.in_process import LIMIT, Job

pytestmark = pytest.mark.timeout(110)
FULL = OSError(errno.EMFILE, "Too many open files")


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_a_worker_that_cannot_open_shared_memory_uses_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "open_offered", raising(FULL))
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
            monkeypatch.setattr(connection.channel, "receive", raising(error))
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


def test_a_request_that_cannot_be_packed_fails_alone() -> None:
    with Job(1) as job, job.stores(timeout=LIMIT)[0] as kv:
        works = [Work("odd"), Work("even")]
        for work, payload in zip(works, [object(), b""], strict=True):
            with PendingRequests(work, "command") as pending:
                request = Request(
                    0,
                    lambda sequence, payload=payload: Command(sequence, "norms", payload),  # type: ignore[misc]
                    "command",
                    wants_values=True,
                )
                pending.submit([request], kv._servers)
        with pytest.raises(TypeError, match="object"):
            works[0].wait(LIMIT)
        kv._servers.wait(works[1].is_completed)
        with pytest.raises(RuntimeError, match="no optimizer"):
            works[1].wait(LIMIT)


def test_a_work_ends_whose_requests_are_submitted_after_close() -> None:
    with Job(1) as job, job.stores(timeout=LIMIT)[0] as kv:
        kv._servers.close()
        work = Work("late")
        with PendingRequests(work, "late") as pending:
            pending.submit([Request(0, lambda sequence: Command(sequence, "norms", b""), "late")] * 3, kv._servers)
        with pytest.raises(RuntimeError, match="the store is closed"):
            work.wait(LIMIT)


def test_an_error_of_the_schedulers_client_fails_waiting_and_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_HEARTBEAT_LIMIT", "1")  # the job ends when the worker that fails counts as dead
    monkeypatch.setenv("GANGLINE_HEARTBEAT", "0.1")
    with Job(2) as job:
        zero, _ = job.members()
        waiting = job.later(lambda: zero.exchange(b"", "barrier"))
        monkeypatch.setattr(zero, "_receive", raising(FULL))
        for call in (lambda: waiting.result(LIMIT), lambda: zero.exchange(b"", "barrier"), lambda: zero.join(b"")):
            with pytest.raises(DeadNodeError, match=r"the scheduler cannot be reached any more: OSError:.* Too many"):
                call()
        assert zero.lost
