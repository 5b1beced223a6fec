"""Backlog of a worker that is far ahead of the others: bounded on the servers and on the worker."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import torch

from gangline.kvstore import create
from gangline.kvstore.parameter_server.client import server_client
from gangline.kvstore.parameter_server.protocol import (
    CODED,
    Ack,
    Command,
    CommandResult,
    Failed,
    Message,
    Values,
)
from gangline.kvstore.parameter_server.server import sessions
from gangline.kvstore.parameter_server.store import DistStore
from tests.kvstore.parameter_server.in_process import Job, RawWorkers
from tests.kvstore.parameter_server.processes import run_job

pytestmark = pytest.mark.timeout(60)
KIB = 1 << 10
MIB = 1 << 20
FLOATS = 16 * KIB
"""Elements of the shard: 64 KiB."""
DATA = bytes(4 * FLOATS)


class Two(RawWorkers):
    """Two raw workers and one server that stores 64 KiB, so that 128 KiB of open rounds are allowed per worker."""

    def messages_to(self, rank: int) -> list[Message]:
        """Return all messages that a worker's earlier messages have caused."""
        self.clients[rank].pull(self.next(), 5, 0)
        said: list[Message] = []
        while True:
            message, _ = self.clients[rank].receive()
            if isinstance(message, Values):
                return said
            said.append(message)

    def acknowledged(self, rank: int) -> list[int]:
        return [
            number for message in self.messages_to(rank) if isinstance(message, Ack) for number in message.sequences
        ]

    def receive_acks(self, rank: int, count: int) -> list[int]:
        """Receive a number of acknowledgements, which may arrive when the server is idle."""
        acks: list[int] = []
        while len(acks) < count:
            message, _ = self.clients[rank].receive()
            assert isinstance(message, Ack)
            acks += message.sequences
        return acks


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setattr(sessions, "_BACKLOG_BYTES", 0)
    with Job(2) as job, Two(job) as two:
        two.define(5, [FLOATS], DATA)
        yield two


def test_pushes_of_a_worker_too_far_ahead_are_acknowledged_when_others_catch_up(two: Two) -> None:
    pushes = [two.push(0, number, DATA) for number in range(1, 6)]
    assert two.acknowledged(0) == pushes[:2]
    theirs = [two.push(1, number, DATA) for number in (1, 2)]
    assert two.acknowledged(1) == theirs
    assert two.acknowledged(0) == []  # three rounds are open still
    two.push(1, 3, DATA)
    assert two.receive_acks(0, 3) == pushes[2:]


def test_compressed_pushes_count_with_their_decoded_size(two: Two) -> None:
    sequence = two.next()
    two.clients[0].send(Command(sequence, "compression", msgpack.packb({"type": "2bit", "threshold": 0.5})))
    assert two.clients[0].receive()[0] == CommandResult(sequence, b"")
    pushes = [two.push(0, number, bytes(FLOATS // 4), CODED) for number in range(1, 5)]  # each decoded to 64 KiB
    assert two.receive_acks(0, 2) == pushes[:2]
    assert two.acknowledged(0) == []
    for number in range(1, 5):
        two.push(1, number, bytes(FLOATS // 4), CODED)
    assert two.receive_acks(0, 2) == pushes[2:]


def test_nothing_is_withheld_after_a_worker_has_left(two: Two) -> None:
    pushes = [two.push(0, number, DATA) for number in range(1, 6)]
    assert two.acknowledged(0) == pushes[:2]
    two.members[1].close()
    assert two.receive_acks(0, 3) == pushes[2:]
    sequence = two.push(0, 6, DATA)  # later pushes fail
    failed, _ = two.clients[0].receive()
    assert failed == Failed(sequence, "DeadNodeError", "worker 1 has left the job")


def test_an_async_worker_that_dies_while_it_waits_does_not_count_as_reader() -> None:
    ones = torch.ones(FLOATS).numpy().tobytes()  # large enough to be read in place
    with Job(2) as job, Two(job, mode="async", staleness=0) as two:
        slow, fast = two.clients
        two.define(5, [FLOATS], DATA)
        two.push_and_confirm(1, 1, ones)
        fast.pull(two.next(), 5, 1)  # it is ahead and waits
        two.push_and_confirm(1, 2, ones)
        two.members[1].close()
        for number in (1, 2, 3):  # a dead reader would block these
            two.push_and_confirm(0, number, ones)
            slow.pull(two.next(), 5, number)
            values, (data,) = slow.receive()
            assert isinstance(values, Values)
            assert torch.frombuffer(bytearray(data), dtype=torch.float32).eq(2 + number).all()


def _run_ahead(there: str) -> int:
    """Push 320 rounds of 1 MiB on worker 0 before worker 1 begins; return the peak of shared memory in MiB."""
    kv = create("dist_sync")
    assert isinstance(kv, DistStore)
    kv.init("key", torch.zeros(MIB // 4))
    most = 0
    if kv.rank == 0:
        pool = kv._pool
        assert pool is not None
        server_client._MAX_QUEUED = 16 * MIB
        given = torch.full((MIB // 4,), 2.0)
        works = [kv.push("key", given, async_op=True) for _ in range(320)]
        kv._servers.wait(lambda: kv._servers._queued > server_client._MAX_QUEUED)
        Path(there).touch()
        while not works[-1].is_completed():
            most = max(most, pool.in_use)
            os.sched_yield()
    else:
        while not Path(there).exists():
            os.sched_yield()
        for _ in range(320):
            kv.push("key", torch.ones(MIB // 4))
    out = torch.empty(MIB // 4)
    kv.pull("key", out)
    assert out.eq(3).all()
    kv.close()
    return most // MIB


@pytest.mark.slow
def test_memory_of_a_worker_that_runs_ahead_is_bounded(tmp_path: Path) -> None:
    most, _ = run_job(_run_ahead, 2, 1, str(tmp_path / "there"))
    # open rounds (twice what is stored, 256 MiB, one more), in flight, queued
    assert most <= 259 + 16 + 17
