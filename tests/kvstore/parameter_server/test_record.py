"""Record of a scheduler: a restarted one is in the state that others know, and little is written for each message."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest

from gangline.kvstore.parameter_server.kept_state import KeptLog
from gangline.kvstore.parameter_server.protocol import ROUND, Collective, JoinResult, Register
from gangline.kvstore.parameter_server.scheduler.job_state import JobState, Member, MemberState
from gangline.kvstore.parameter_server.scheduler.record import Record
from gangline.kvstore.restart_variables import KEPT_MEMORY, PROCESS_RESTARTS
from tests.kvstore.parameter_server.in_process import Job

pytestmark = pytest.mark.timeout(110)


def new_state() -> JobState:
    return JobState(2, 1, restarts=5, bounds=(1, 4))


def register(role: str, rank: int, incarnation: int = 0) -> Register:
    return Register(role, rank, ("elsewhere", 1, 1), f"{role}:{rank}", "", incarnation)


def call(state: JobState, number: int, data: bytes = b"") -> None:
    """End a collective of the workers of its round; those that call different things fail it."""
    for rank in sorted(state.active(number)):
        name = f"call {rank}" if data == b"fails" else "call"
        state.add(rank, Collective(number, name, -1, data + b"%d" % rank, ""))
    assert state.complete() == [number]


def life(state: JobState) -> Iterator[None]:
    """Change the state of a job in every way, with an exchange of several MB; yield before messages about it."""
    for role, rank in (("worker", 0), ("server", 0), ("worker", 1)):
        state.enter(Member(f"{role} {rank}".encode(), register(role, rank)), None)
        yield
    assert state.assign_ranks()
    yield
    call(state, 1)
    yield
    call(state, 2, b"x" * 2_000_000)
    yield
    for number in (3, ROUND + 1, ROUND + 2):
        call(state, number)
        yield
    call(state, ROUND + 3, b"fails")
    yield
    old = state.members[b"worker 1"]
    old.state, old.why, old.away_since = MemberState.AWAY, "was killed", 7.5
    state.restarts -= 1
    yield
    state.enter(Member(b"again", register("worker", 1, 1)), old)
    state.members[b"again"].first_number = 2 * ROUND
    yield
    state.enter(Member(b"new", register("worker", 2)), None)
    state.views.enter(2)
    assert state.views.ask()
    state.views.answer("worker", 0, 1, 3)
    yield
    state.views.answer("worker", 1, 1, 4)
    assert state.views.make()
    assert state.views.refusal(1) == ""
    yield
    for number in range(2, 6):  # the first ones are forgotten
        call(state, number * ROUND + 1, bytes([number]) * 400_000)
        yield
    state.views.answer("server", 0, 1, 0)
    assert state.views.confirm([0])
    yield
    state.members[b"worker 0"].join_data, state.last_joined = b"joined", 0
    yield
    state.members[b"worker 0"].join_data = None
    state.number += 1
    state.join_result = JoinResult(0, state.number, [b"joined", b"", b""])
    yield
    del state.members[b"new"]
    state.members[b"again"].state = MemberState.LEFT
    yield


def snapshot(state: JobState) -> tuple[Any, ...]:
    return state.kept(), dict(state.outcomes), state.number


def restored(memory: int) -> tuple[Any, ...]:
    """Return the snapshot of a restarted scheduler, with the restart that it has used up."""
    state = new_state()
    kept, outcomes = Record(memory).read()
    if kept is not None:
        state.restore(kept, outcomes, 0.0)
        state.restarts += 1
    return snapshot(state)


def test_a_restarted_scheduler_is_in_the_recorded_state() -> None:
    memory = os.memfd_create("test")
    state, record = new_state(), Record(memory)
    for number, _ in enumerate(life(state)):
        record.write(state)
        assert restored(memory) == snapshot(state), number
        if number % 3 == 0:  # it continues in the same record
            record = Record(memory)
    assert os.fstat(memory).st_size < 20_000_000


def count_writes(function: Callable[..., int], counts: list[int], last: int, *, half: bool) -> Callable[..., int]:
    """Return a call that writes; the last one is killed before it or at half of its bytes."""

    def call(descriptor: int, content: Any, *more: Any) -> int:
        counts[0] += 1
        if counts[0] == last:
            if half:
                content = content[0] if isinstance(content, list) else content
                os.lseek(descriptor, more[0], os.SEEK_SET)
                os.write(descriptor, bytes(content)[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return function(descriptor, content, *more)

    return call


def live(memory: int, report: Callable[[], object], last: int = 0, *, half: bool = False) -> int:
    """Record the life of a job; return the number of writes."""
    counts, state, record = [0], new_state(), Record(memory)
    wrapped = {name: count_writes(getattr(os, name), counts, last, half=half) for name in ("pwrite", "pwritev")}
    with patch.multiple(os, **wrapped):
        for _ in life(state):
            record.write(state)
            report()
    return counts[0]


@pytest.mark.slow
def test_a_scheduler_that_is_killed_at_any_write_loses_nothing_that_others_know() -> None:
    state = new_state()
    known = [snapshot(state), *(snapshot(state) for _ in life(state))]
    writes = live(os.memfd_create("test"), lambda: None)
    assert writes >= 3 * (len(known) - 1)
    for last in range(1, writes + 1):
        for half in (False, True):
            memory = os.memfd_create("test")
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                live(memory, lambda writer=writer: os.write(writer, b"."), last, half=half)
                os._exit(0)
            os.close(writer)
            _, status = os.waitpid(child, 0)
            assert os.WTERMSIG(status) == signal.SIGKILL
            told = len(os.read(reader, 1000))
            assert restored(memory) in known[told : told + 2], (last, half)
            os.close(reader)
            os.close(memory)


def test_a_record_that_is_cut_at_any_byte_of_its_last_entry_is_in_the_state_before_it() -> None:
    memory = os.memfd_create("test")
    state, record = new_state(), Record(memory)
    for _ in zip(range(6), life(state), strict=False):
        record.write(state)
    before, head, begin = snapshot(state), os.pread(memory, 4096, 0), os.fstat(memory).st_size
    call(state, 9)
    record.write(state)
    end = os.fstat(memory).st_size
    assert 0 < end - begin < 200
    os.pwrite(memory, head, 0)  # it was killed before the entry counted
    for cut in range(end, begin - 1, -1):
        os.ftruncate(memory, cut)
        assert restored(memory) == before


def test_a_barrier_after_a_large_exchange_writes_some_hundred_bytes() -> None:
    memory, written = os.memfd_create("test"), [0]

    def counted(function: Callable[..., int]) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            written[0] += (nbytes := function(*arguments))
            return nbytes

        return call

    with patch.dict(os.environ, {KEPT_MEMORY: str(os.dup(memory)), PROCESS_RESTARTS: "1"}):
        job = Job(2, 0)
    with job, patch.multiple(os, pwrite=counted(os.pwrite), pwritev=counted(os.pwritev)):
        members = job.members()
        of_call = []
        for data in (b"", bytes(30_000_000), b"", b"", b""):
            before = written[0]
            job.each(members, lambda one, data=data: one.exchange(data, "call"))
            of_call.append(written[0] - before)
        assert 60_000_000 < of_call.pop(1) < 60_010_000
        assert max(of_call) < 300, of_call
    assert KeptLog(memory).nbytes < 60_010_000
