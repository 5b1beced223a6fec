"""A worker that is far ahead of the others fills neither its servers' memory nor its own."""

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
    DENSE,
    Ack,
    Answer,
    Command,
    Define,
    Done,
    Failed,
    Message,
    Pull,
    Push,
    Values,
)
from gangline.kvstore.parameter_server.server import sessions
from gangline.kvstore.parameter_server.store import DistStore
from tests.kvstore.dist_job import run_job
from tests.kvstore.dist_threads import Job, of_ranks

pytestmark = pytest.mark.timeout(60)
KIB = 1 << 10
MIB = 1 << 20
FLOATS = 16 * KIB
"""Of the part that the server holds: 64 KiB."""


class Two:
    """Two workers by hand, one server that stores 64 KiB, and so takes 128 KiB of each for rounds that are open."""

    def __init__(self, job: Job) -> None:
        self.members = job.members()
        self.lines = of_ranks(self.members)
        self._sequence = 0
        definition = Define(self.next(), [[5, "float32", [FLOATS], 1, msgpack.packb("key"), 0, True]], None)
        assert self.lines[0].ask(definition, bytes(4 * FLOATS)) == Ack([1])

    def next(self) -> int:
        self._sequence += 1
        return self._sequence

    def push(self, rank: int, number: int, kind: int = DENSE, data: bytes = bytes(4 * FLOATS)) -> int:
        """Give to a round; the message's sequence number."""
        sequence = self.next()
        self.lines[rank].say(Push(sequence, [[5, number, kind, len(data)]], None, None, False, None), data)
        return sequence

    def has_said(self, rank: int) -> list[Message]:
        """What has come of a worker's line, all that was caused by what was sent before."""
        self.lines[rank].say(Pull(self.next(), [[5, 0, DENSE, 0]], False, None))
        said: list[Message] = []
        while True:
            message, _ = self.lines[rank].hear()
            if isinstance(message, Values):
                self.lines[rank].say(Done([message.number]))
                return said
            said.append(message)

    def has_acknowledged(self, rank: int) -> list[int]:
        return [number for message in self.has_said(rank) if isinstance(message, Ack) for number in message.sequences]

    def waits_for_acks(self, rank: int, count: int) -> list[int]:
        """So many, which the server may give when it has nothing else to do."""
        acks: list[int] = []
        while len(acks) < count:
            message, _ = self.lines[rank].hear()
            assert isinstance(message, Ack)
            acks += message.sequences
        return acks


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setattr(sessions, "_AHEAD", 0)
    with Job(2) as job:
        two = Two(job)
        yield two
        for line in two.lines:
            line.close()


def test_who_is_too_far_ahead_is_acknowledged_when_the_others_have_come_closer(two: Two) -> None:
    pushes = [two.push(0, number) for number in range(1, 6)]
    assert two.has_acknowledged(0) == pushes[:2]
    theirs = [two.push(1, number) for number in (1, 2)]
    assert two.has_acknowledged(1) == theirs
    assert two.has_acknowledged(0) == []  # three rounds are open still
    two.push(1, 3)
    assert two.waits_for_acks(0, 3) == pushes[2:]


def test_what_is_decoded_counts_by_what_it_takes(two: Two) -> None:
    sequence = two.next()
    two.lines[0].say(Command(sequence, "compression", msgpack.packb({"type": "2bit", "threshold": 0.5})))
    assert two.lines[0].hear()[0] == Answer(sequence, b"")
    pushes = [two.push(0, number, CODED, bytes(FLOATS // 4)) for number in range(1, 5)]  # each decoded to 64 KiB
    assert two.waits_for_acks(0, 2) == pushes[:2]
    assert two.has_acknowledged(0) == []
    for number in range(1, 5):
        two.push(1, number, CODED, bytes(FLOATS // 4))
    assert two.waits_for_acks(0, 2) == pushes[2:]


def test_a_push_that_comes_again_counts_once(two: Two) -> None:
    pushes = [two.push(0, 1), two.push(0, 1), two.push(0, 1), two.push(0, 2)]
    assert two.has_acknowledged(0) == pushes


def test_nothing_is_withheld_for_a_worker_that_will_never_come(two: Two) -> None:
    pushes = [two.push(0, number) for number in range(1, 6)]
    assert two.has_acknowledged(0) == pushes[:2]
    two.members[1].close()
    assert two.waits_for_acks(0, 3) == pushes[2:]
    sequence = two.push(0, 6)  # and who pushes on is told that it is for nothing
    failed, _ = two.lines[0].hear()
    assert failed == Failed(sequence, "DeadNodeError", "worker 1 has left the job")


def test_who_is_ahead_but_waited_for_is_let_on(two: Two) -> None:
    definition = Define(two.next(), [[6, "float32", [FLOATS], 1, msgpack.packb("other"), 0, True]], None)
    assert two.lines[0].ask(definition, bytes(4 * FLOATS)) == Ack([definition.sequence])
    pushes = [two.push(0, number) for number in range(1, 9)]
    assert two.has_acknowledged(0) == pushes[:4]  # twice as much is stored now
    two.lines[1].say(Pull(two.next(), [[6, 1, DENSE, 0]], False, None))  # which the first has yet to give to
    assert two.waits_for_acks(0, 4) == pushes[4:]


def test_a_small_pushpull_is_acknowledged_though_its_value_is_to_come(two: Two) -> None:
    definition = Define(two.next(), [[6, "float32", [1], 1, msgpack.packb("small"), 0, True]], None)
    assert two.lines[0].ask(definition, bytes(4)) == Ack([definition.sequence])
    sequence = two.next()
    two.lines[0].say(Push(sequence, [[6, 1, DENSE, 4]], None, None, True, None), bytes(4))
    assert two.waits_for_acks(0, 1) == [sequence]


def _run_ahead(there: str) -> int:
    """Worker 0 gives to 320 rounds of a mebibyte, and worker 1 begins when no more is taken; its most memory."""
    kv = create("dist_sync")
    assert isinstance(kv, DistStore)
    kv.init("key", torch.zeros(MIB // 4))
    most = 0
    if kv.rank == 0:
        arena = kv._arena
        assert arena is not None
        server_client._MOST_QUEUED = 16 * MIB
        given = torch.full((MIB // 4,), 2.0)
        works = [kv.push("key", given, async_op=True) for _ in range(320)]
        kv._wire.wait(lambda: kv._wire._queued > server_client._MOST_QUEUED)
        Path(there).touch()
        while not works[-1].is_completed():
            most = max(most, arena.in_use)
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
def test_a_worker_that_runs_ahead_holds_as_much_as_servers_take_and_may_wait(tmp_path: Path) -> None:
    most, _ = run_job(_run_ahead, 2, 1, str(tmp_path / "there"))
    # taken for open rounds (twice what is stored, 256 more, and the one beyond), under way, and waiting
    assert most <= 259 + 16 + 17
