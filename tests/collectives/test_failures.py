"""What becomes of the others when a rank is killed, stopped, late, busy, elsewhere, or leaves."""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from collectives import Communicator
from collectives.errors import GanglineError, StallError
from collectives.opening import in_process
from collectives.transports.board import SharedBoard
from collectives.transports.shared_memory import SharedMemory
from collectives.transports.zeromq import ZeroMQ
from tests.collectives.stage import LIMIT, WAITS, Actor, Audience, Stage

pytestmark = pytest.mark.timeout(110)

TRANSPORTS = ("shared_memory", "ipc", "tcp")
POSITIONS = [(size, rank) for size in (2, 3, 4) for rank in range(size)]


@pytest.fixture(autouse=True)
def _temporary_files_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no table of this machine's user
    yield
    assert list(tmp_path.iterdir()) == []


# What ranks do when one of them is lost. Each call returns only if what came is right.


def _ramp(count: int, rank: int) -> Tensor:
    return torch.arange(count, dtype=torch.float32).remainder(1000) * 4 + rank


def _expect(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected), f"{found} came, expected {expected}"


def _all_reduce(count: int, comm: Communicator, _victim: int) -> None:
    values = _ramp(count, comm.rank)
    comm.all_reduce(values)
    _expect(values, _ramp(count, 0) * comm.size + comm.size * (comm.size - 1) // 2)


def _all_reduce_in_the_background(count: int, comm: Communicator, _victim: int) -> None:
    first, second = _ramp(count, comm.rank), _ramp(count, 2 * comm.rank)
    works = [comm.all_reduce(values, async_op=True) for values in (first, second)]
    for work in works:
        work.wait()
    _expect(second, _ramp(count, 0) * comm.size + comm.size * (comm.size - 1))


def _broadcast(count: int, step: int, comm: Communicator, victim: int) -> None:
    root = (victim + step) % comm.size
    values = _ramp(count, comm.rank)
    comm.broadcast(values, root)
    _expect(values, _ramp(count, root))


def _all_to_all(count: int, comm: Communicator, _victim: int) -> None:
    rows = torch.stack([_ramp(count, 10 * to + comm.rank) for to in range(comm.size)])
    came = comm.all_to_all(rows)
    _expect(came, torch.stack([_ramp(count, 10 * comm.rank + source) for source in range(comm.size)]))


def _barrier(comm: Communicator, _victim: int) -> None:
    comm.barrier()


def _receive_from_it(count: int, comm: Communicator, victim: int) -> None:
    comm.recv(torch.empty(count), victim if comm.rank != victim else (victim + 1) % comm.size)


def _send_to_it(count: int, comm: Communicator, victim: int) -> None:
    comm.send(_ramp(count, comm.rank), victim if comm.rank != victim else (victim + 1) % comm.size)


def _receive_from_each_other(count: int, comm: Communicator, victim: int) -> None:
    others = [rank for rank in range(comm.size) if rank != victim]
    place = others.index(comm.rank) if comm.rank != victim else 0
    comm.recv(torch.empty(count), others[(place + 1) % len(others)])


class Situation(NamedTuple):
    call: Callable[[Communicator, int], None]
    text: str
    """How an error names the call."""
    needs_all: bool = True
    """Whether no rank can get through it without the lost one."""


SITUATIONS = {
    "small all_reduce": Situation(partial(_all_reduce, 100), "all_reduce(100 x float32, sum)"),
    "large all_reduce": Situation(partial(_all_reduce, 1 << 20), "all_reduce(1048576 x float32, sum)"),
    "async all_reduce": Situation(partial(_all_reduce_in_the_background, 1 << 18), "all_reduce(262144 x float32, sum)"),
    "broadcast from it": Situation(partial(_broadcast, 1 << 18, 0), "broadcast(262144 x float32, root {victim})"),
    "broadcast to it": Situation(partial(_broadcast, 1 << 18, 1), "broadcast(262144 x float32, root {next})", False),
    "all_to_all": Situation(partial(_all_to_all, 1 << 16), "all_to_all(65536 x float32)"),
    "barrier": Situation(_barrier, "barrier()"),
    "recv from it": Situation(partial(_receive_from_it, 1 << 14), "recv(16384 x float32)"),
    "send to it": Situation(partial(_send_to_it, 1 << 20), "send(1048576 x float32)", False),
    "recv from each other": Situation(partial(_receive_from_each_other, 100), "recv(100 x float32)"),
}

WAYS = ("absent", "alone", "midway")
"""Where the lost rank is: not in the call that the others wait in, in it before the others come, or all are in it."""

LATER: tuple[Callable[[Communicator], object], ...] = (
    lambda comm: comm.all_reduce(_ramp(100, comm.rank)),
    lambda comm: comm.all_reduce(_ramp(1 << 18, comm.rank)),
    lambda comm: comm.broadcast(_ramp(10, comm.rank)),
    lambda comm: comm.all_gather(_ramp(10, comm.rank), async_op=True),
    lambda comm: comm.barrier(),
    lambda comm: comm.split(0),
    lambda comm: comm.empty(8),
    lambda comm: comm.send(_ramp(10, comm.rank), (comm.rank + 1) % comm.size),
    lambda comm: comm.recv(_ramp(10, comm.rank), (comm.rank + 1) % comm.size),
)


class Said(NamedTuple):
    """An error as a rank saw it."""

    kind: str
    text: str


def _error_of(call: Callable[[], object]) -> Said | None:
    try:
        call()
    except (GanglineError, AssertionError, OSError) as error:
        return Said(type(error).__name__, str(error))
    return None


def _until_it_fails(comm: Communicator, situation: str, victim: int) -> Said | None:
    """The error that a rank gets in a call, or behind it where it got through without the lost one."""
    call = partial(SITUATIONS[situation].call, comm, victim)
    return next(filter(None, map(_error_of, [call, *[comm.barrier] * 3])), None)


def lose_one(comm: Communicator, path: str, situation: str, way: str, victim: int, number: int) -> list[Said | None]:
    actor = Actor(comm.rank, path)
    comm.barrier()
    if comm.rank == victim and way == "absent":
        actor.hear()  # nothing, ever
    elif comm.rank == victim and way == "midway":
        _signal_oneself_midway(number)
    elif comm.rank != victim and way == "alone":
        actor.hear()
    actor.announce_waits()
    first = _until_it_fails(comm, situation, victim)
    return [first, *(_error_of(partial(call, comm)) for call in LATER)]


def _signal_oneself_midway(number: int) -> None:
    """Have this process send itself a signal when it has sent something and asks for the second time for more."""
    times = iter((False, True))

    def signalling(method: Callable[..., Any]) -> Callable[..., Any]:
        def signalled(*arguments: Any) -> Any:
            if next(times, False):
                os.kill(os.getpid(), number)
            return method(*arguments)

        return signalled

    for owner, name in product((SharedMemory, ZeroMQ), ("receive", "progress")):
        setattr(owner, name, signalling(getattr(owner, name)))
    SharedBoard.meet = signalling(SharedBoard.meet)  # type: ignore[method-assign]


def _check_errors(errors: list[Said | None], size: int, victim: int, situation: str, way: str, why: str) -> None:
    first, *later = errors
    expected = SITUATIONS[situation].text.format(victim=victim, next=(victim + 1) % size)
    calls = [re.escape(expected)]
    if way != "absent" or not SITUATIONS[situation].needs_all:
        calls.append(re.escape("barrier()"))
    assert first is not None
    assert first.kind == "DeadNodeError", first
    assert re.fullmatch(rf"rank {victim} {why} \(rank \d waited in ({'|'.join(calls)})\)", first.text), first
    assert later == [first] * len(LATER)


CASES = [
    (transport, size, victim, situation, way)
    for transport, (size, victim), situation, way in product(TRANSPORTS, POSITIONS, SITUATIONS, WAYS)
    if not (situation == "recv from each other" and (size < 3 or way != "absent"))
]


def _always_or_slow(index: int, case: tuple[Any, ...]) -> Any:
    return pytest.param(*case, id="-".join(map(str, case)), marks=() if index % 13 == 0 else pytest.mark.slow)


@pytest.mark.parametrize(
    ("transport", "size", "victim", "situation", "way"), [_always_or_slow(*case) for case in enumerate(CASES)]
)
def test_a_killed_rank_is_an_error_that_names_it(
    transport: str, size: int, victim: int, situation: str, way: str
) -> None:
    others = [rank for rank in range(size) if rank != victim]
    with Stage(lose_one, size, situation, way, victim, signal.SIGKILL, transport=transport) as stage:
        if way == "absent":
            assert [stage.heard(rank) for rank in others] == [WAITS] * len(others)
            stage.kill(victim)
        elif way == "alone":
            assert stage.heard(victim) == WAITS
            stage.kill(victim)
            for rank in others:
                stage.say(rank)
        outcomes = stage.outcomes()
    assert str(outcomes[victim].error) == f"rank {victim} of {size} was killed by SIGKILL"
    for rank in others:
        assert outcomes[rank].error is None
        _check_errors(outcomes[rank].value, size, victim, situation, way, "was killed or left: connection lost")


# A rank that is stopped


@pytest.mark.parametrize(
    ("transport", "size", "victim", "situation", "way"),
    [
        ("shared_memory", 2, 0, "small all_reduce", "absent"),
        ("shared_memory", 3, 1, "large all_reduce", "midway"),
        ("ipc", 3, 2, "large all_reduce", "absent"),
        ("tcp", 2, 1, "recv from it", "absent"),
        ("tcp", 4, 0, "large all_reduce", "midway"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in CASES
            if case[1:3] in ((2, 1), (3, 0), (4, 2)) and case[3] != "broadcast to it" and case[4] != "alone"
        ),
    ],
)
def test_a_stopped_rank_is_dead_after_the_limit_and_learns_of_it_when_it_goes_on(
    transport: str, size: int, victim: int, situation: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_HEARTBEAT_LIMIT", "1")
    others = [rank for rank in range(size) if rank != victim]
    with Stage(lose_one, size, situation, way, victim, signal.SIGSTOP, transport=transport) as stage:
        if way == "absent":
            assert [stage.heard(rank) for rank in others] == [WAITS] * len(others)
            stage.stop(victim)
        for rank in others:
            stage.wait_for_end(rank)
        stage.say(victim)
        stage.signal(victim, signal.SIGCONT)
        outcomes = stage.outcomes()
    for rank in others:
        _check_errors(outcomes[rank].value, size, victim, situation, way, "gave no sign of life for 1 s")
    assert outcomes[victim].value[0].kind == "DeadNodeError"


def stop_for_a_while(comm: Communicator, path: str, situation: str, victim: int) -> Said | None:
    actor = Actor(comm.rank, path)
    comm.barrier()
    if comm.rank == victim:
        _signal_oneself_midway(signal.SIGSTOP)
    else:
        actor.announce_waits(20)
    return _error_of(partial(SITUATIONS[situation].call, comm, victim))


@pytest.mark.parametrize(
    ("transport", "situation"),
    [
        ("shared_memory", "all_to_all"),
        ("ipc", "large all_reduce"),
        ("tcp", "large all_reduce"),
        pytest.param("shared_memory", "large all_reduce", marks=pytest.mark.slow),
        pytest.param("ipc", "all_to_all", marks=pytest.mark.slow),
        pytest.param("tcp", "all_to_all", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_stops_for_less_than_the_limit_goes_on(transport: str, situation: str) -> None:
    with Stage(stop_for_a_while, 3, situation, 1, transport=transport) as stage:
        stage.wait_for_stop(1)
        assert [stage.heard(rank) for rank in (0, 2) for _ in range(20)] == [WAITS] * 40
        stage.signal(1, signal.SIGCONT)
        assert [outcome.value for outcome in stage.outcomes()] == [None] * 3


# A rank that leaves


def leave_with_an_error(comm: Communicator, path: str, leaver: int) -> list[Said | None]:
    Actor(comm.rank, path)
    comm.barrier()
    if comm.rank == leaver:
        raise LookupError(f"sample {comm.rank} is missing")
    return [_error_of(comm.barrier), _error_of(comm.barrier)]


@pytest.mark.parametrize(("transport", "size", "leaver"), [("shared_memory", 3, 1), ("ipc", 2, 0), ("tcp", 4, 3)])
def test_a_rank_that_leaves_by_its_own_error_is_missed_by_name(transport: str, size: int, leaver: int) -> None:
    with Stage(leave_with_an_error, size, leaver, transport=transport) as stage:
        outcomes = stage.outcomes()
    assert isinstance(outcomes[leaver].error, LookupError)
    for rank in set(range(size)) - {leaver}:
        first, second = outcomes[rank].value
        assert first.kind == "DeadNodeError"
        assert re.fullmatch(rf"rank {leaver} closed its communicator \(rank \d waited in barrier\(\)\)", first.text), (
            first
        )
        assert second == first


def leave_two_behind(comm: Communicator, path: str) -> None:
    actor = Actor(comm.rank, path)
    pair = comm.split(0 if comm.rank < 2 else None)
    comm.barrier()
    if pair is None:
        return
    actor.hear()  # the third is gone
    _all_reduce(100, pair, 0)
    _all_reduce(1 << 18, pair, 0)
    other = 1 - comm.rank
    came = torch.empty(1 << 18)
    sending = comm.send(_ramp(1 << 18, comm.rank), other, async_op=True)
    comm.recv(came, other)
    sending.wait()
    _expect(came, _ramp(1 << 18, other))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_leaves_does_not_disturb_those_who_do_not_need_it(transport: str) -> None:
    with Stage(leave_two_behind, 3, transport=transport) as stage:
        stage.wait_for_end(2)
        for rank in (0, 1):
            stage.say(rank)
        assert [(outcome.value, outcome.error) for outcome in stage.outcomes()] == [(None, None)] * 3


def close_at_once(comm: Communicator, path: str, rounds: int) -> None:
    Actor(comm.rank, path)
    for index in range(rounds):
        with comm.split(0) as child:
            _broadcast(1 << (index % 20), 0, child, index % comm.size)
        with comm.split(0) as child:
            _all_reduce(1 << (index % 20), child, 0)


@pytest.mark.parametrize(("transport", "size"), [("shared_memory", 4), ("ipc", 3), ("tcp", 2), ("tcp", 4)])
def test_what_was_sent_before_a_goodbye_arrives(transport: str, size: int) -> None:
    with Stage(close_at_once, size, 6, transport=transport) as stage:
        assert [(outcome.value, outcome.error) for outcome in stage.outcomes()] == [(None, None)] * size


# A rank that is late, or busy


def _pass_on(comm: Communicator, late: int) -> None:
    if comm.rank == late:
        for rank in set(range(comm.size)) - {late}:
            comm.send(_ramp(100, rank), rank)
    else:
        came = torch.empty(100)
        comm.recv(came, late)
        _expect(came, _ramp(100, comm.rank))


WAITED_FOR: dict[str, tuple[Callable[[Communicator, int], None], str]] = {
    "small": (partial(_all_reduce, 100), r"all_reduce\(100 x float32, sum\), call 1, has waited \S+ s: {who}"),
    "large": (partial(_all_reduce, 1 << 18), r"all_reduce\(262144 x float32, sum\), call 1, has waited \S+ s: {who}"),
    "recv": (_pass_on, r"recv\(100 x float32\) on rank \d has waited \S+ s for rank {late}"),
}


class _Telling(logging.Handler):
    """Tells the test what is logged."""

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self._actor = actor

    def emit(self, record: logging.LogRecord) -> None:
        self._actor.tell({"warns": record.getMessage()})


def come_late(comm: Communicator, path: str, late: int, variable: str) -> list[Said | None]:
    actor = Actor(comm.rank, path)
    logging.getLogger("gangline").addHandler(_Telling(actor))
    errors = []
    for call, _ in WAITED_FOR.values():
        os.environ[variable] = "0.5"
        child = comm.split(0)
        assert child is not None
        del os.environ[variable]
        if comm.rank == late:
            actor.hear()
        else:
            actor.announce_waits(1 << 30)
        errors.append(_error_of(partial(call, child, late)) or _error_of(child.barrier))
        actor.announce_waits(0)
        actor.tell("over")
        comm.barrier()
        child.close()
    return errors


def _who(size: int, late: int) -> str:
    came = [str(rank) for rank in range(size) if rank != late]
    return f"rank{'s' if size > 2 else ''} {', '.join(came)} came, rank {late} did not"


@pytest.mark.parametrize(("transport", "size", "late"), [("shared_memory", 3, 1), ("ipc", 2, 0), ("tcp", 4, 3)])
def test_a_late_rank_is_named_in_one_warning_and_then_all_goes_well(transport: str, size: int, late: int) -> None:
    others = [rank for rank in range(size) if rank != late]
    with Stage(come_late, size, late, "GANGLINE_STALL_WARN", transport=transport) as stage:
        for _, text in WAITED_FOR.values():
            for rank in others:
                warning = next(word for word in iter(partial(stage.heard, rank), None) if word != WAITS)
                assert re.fullmatch(text.format(who=_who(size, late), late=late), warning["warns"]), warning
                assert [stage.heard(rank) for _ in range(10)] == [WAITS] * 10
            stage.say(late)
            for rank in range(size):
                assert next(word for word in iter(partial(stage.heard, rank), None) if word != WAITS) == "over"
        assert [outcome.value for outcome in stage.outcomes()] == [[None] * len(WAITED_FOR)] * size


@pytest.mark.parametrize(("transport", "size", "late"), [("shared_memory", 2, 1), ("ipc", 4, 2), ("tcp", 3, 0)])
def test_a_rank_that_does_not_come_in_time_is_the_same_error_for_it_too(transport: str, size: int, late: int) -> None:
    others = [rank for rank in range(size) if rank != late]
    with Stage(come_late, size, late, "GANGLINE_TIMEOUT", transport=transport) as stage:
        for _ in WAITED_FOR:
            for rank in others:
                assert next(word for word in iter(partial(stage.heard, rank), None) if word != WAITS) == "over"
            stage.say(late)
            assert stage.heard(late) == "over"
        outcomes = stage.outcomes()
    for index, (_, text) in enumerate(WAITED_FOR.values()):
        errors = [outcome.value[index] for outcome in outcomes]
        for rank in others:
            assert errors[rank].kind == "StallError"
            assert re.fullmatch(text.format(who=_who(size, late), late=late), errors[rank].text), errors[rank]
        assert errors[late] in [errors[rank] for rank in others]


def test_the_timeout_of_a_communicator_can_be_given() -> None:
    comm, other = in_process(2, timeout=0.2)
    with pytest.raises(StallError, match=r"barrier\(\), call 1, has waited \S+ s: rank 0 came, rank 1 did not"):
        comm.barrier()
    with pytest.raises(StallError, match="rank 0 came, rank 1 did not"):
        _twice(other.barrier)  # who comes last to a call misses nobody in it


def _twice(call: Callable[[], object]) -> None:
    call()
    call()


def be_busy(comm: Communicator, path: str, busy: int, limit: float) -> None:
    actor = Actor(comm.rank, path)
    os.environ["GANGLINE_HEARTBEAT_LIMIT"] = str(limit)
    child = comm.split(0)
    assert child is not None
    for occupation in (_hold_the_interpreter, _make_one_long_call):
        child.barrier()
        if comm.rank == busy:
            occupation(3 * limit)
        else:
            actor.announce_waits()
        _all_reduce(100, child, 0)
        _all_reduce(1 << 18, child, 0)
    child.close()


def _hold_the_interpreter(seconds: float) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    sys.setswitchinterval(interval)


def _make_one_long_call(seconds: float) -> None:
    matrix = torch.arange(1 << 20).view(1 << 10, 1 << 10)  # products of integers are slow
    rows, lasted = 16, 0.0
    while lasted < seconds:
        begin = time.monotonic()
        matrix.repeat(-(-rows // len(matrix)), 1)[:rows] @ matrix
        lasted = time.monotonic() - begin
        rows = int(rows * min(100.0, max(1.2, 1.2 * seconds / lasted)))


@pytest.mark.parametrize(("transport", "size", "busy"), [("shared_memory", 2, 1), ("tcp", 3, 0), ("ipc", 2, 0)])
def test_a_busy_rank_is_not_taken_for_dead(transport: str, size: int, busy: int) -> None:
    with Stage(be_busy, size, busy, 0.5, transport=transport) as stage:
        for rank in set(range(size)) - {busy}:
            assert [stage.heard(rank), stage.heard(rank)] == [WAITS, WAITS]
        assert [(outcome.value, outcome.error) for outcome in stage.outcomes()] == [(None, None)] * size


# A rank at another call


DISAGREEMENTS: tuple[tuple[Callable[[Communicator], object], str, Callable[[Communicator], object], str], ...] = (
    (
        lambda comm: comm.all_reduce(_ramp(10, comm.rank)),
        "all_reduce(10 x float32, sum)",
        lambda comm: comm.all_gather(_ramp(10, comm.rank)),
        "all_gather(10 x float32)",
    ),
    (
        lambda comm: comm.all_reduce(_ramp(10, comm.rank)),
        "all_reduce(10 x float32, sum)",
        lambda comm: comm.all_reduce(_ramp(11, comm.rank)),
        "all_reduce(11 x float32, sum)",
    ),
    (
        lambda comm: comm.all_reduce(_ramp(1 << 18, comm.rank)),
        "all_reduce(262144 x float32, sum)",
        lambda comm: comm.all_reduce(_ramp(1 << 18, comm.rank).long()),
        "all_reduce(262144 x int64, sum)",
    ),
    (
        lambda comm: comm.all_reduce(_ramp(1 << 18, comm.rank)),
        "all_reduce(262144 x float32, sum)",
        lambda comm: comm.all_reduce(_ramp(1 << 18, comm.rank), "max"),
        "all_reduce(262144 x float32, max)",
    ),
    (
        lambda comm: comm.all_reduce(_ramp(1 << 18, comm.rank)),
        "all_reduce(262144 x float32, sum)",
        lambda comm: comm.barrier(),
        "barrier()",
    ),
)


def disagree(comm: Communicator, path: str) -> list[list[Said | None]]:
    Actor(comm.rank, path)
    errors = []
    for index, (usual, _, odd, _) in enumerate(DISAGREEMENTS):
        with comm.split(0) as child:
            call = odd if comm.rank == index % comm.size else usual
            errors.append([_error_of(partial(call, child)), _error_of(child.barrier)])
            comm.barrier()
    return errors


@pytest.mark.parametrize(("transport", "size"), [("shared_memory", 3), ("ipc", 4), ("tcp", 2), ("tcp", 3)])
def test_ranks_at_different_calls_all_get_the_same_error(transport: str, size: int) -> None:
    with Stage(disagree, size, transport=transport) as stage:
        outcomes = stage.outcomes()
    for index, (_, usual, _, odd) in enumerate(DISAGREEMENTS):
        others = [rank for rank in range(size) if rank != index % size]
        groups = [(others, usual), ([index % size], odd)]
        words = [
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {call}"
            for ranks, call in sorted(groups, key=lambda group: group[0][0])
        ]
        expected = Said("MismatchError", f"ranks are at different calls: {'; '.join(words)}")
        assert [outcome.value[index] for outcome in outcomes] == [[expected] * 2] * size


# A rank that is interrupted, a program that is killed


def interrupt_one(comm: Communicator, path: str, situation: str, victim: int) -> list[Said | None]:
    actor = Actor(comm.rank, path)
    comm.barrier()
    call = partial(SITUATIONS[situation].call, comm, victim)
    if comm.rank == victim:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ranks leave Ctrl-C to their program
        actor.announce_waits()
        with pytest.raises(KeyboardInterrupt):
            call()
        actor.tell("interrupted")
    elif comm.rank == (victim + 1) % comm.size:
        actor.hear()
    return [_error_of(call), _error_of(comm.barrier)]


@pytest.mark.parametrize(
    ("transport", "size", "victim", "situation"),
    [
        ("shared_memory", 2, 0, "small all_reduce"),
        ("shared_memory", 3, 2, "large all_reduce"),
        ("ipc", 4, 1, "large all_reduce"),
        ("tcp", 2, 1, "large all_reduce"),
        ("tcp", 3, 1, "barrier"),
    ],
)
def test_an_interrupted_rank_is_an_error_that_names_it(transport: str, size: int, victim: int, situation: str) -> None:
    with Stage(interrupt_one, size, situation, victim, transport=transport) as stage:
        assert stage.heard(victim) == WAITS
        stage.signal(victim, signal.SIGINT)
        assert stage.heard(victim) == "interrupted"
        stage.say((victim + 1) % size)
        outcomes = stage.outcomes()
    expected = Said("GanglineError", f"rank {victim} left {SITUATIONS[situation].text} by KeyboardInterrupt")
    for outcome in outcomes:
        during, after = outcome.value
        assert during in (None, expected)  # None: what it had sent by then was all that was needed of it
        assert after == expected
    assert outcomes[victim].value[0] == expected


def wait_for_ever(comm: Communicator, path: str) -> None:
    actor = Actor(comm.rank, path)
    actor.announce_waits()
    if comm.rank == 0:
        actor.hear()
    comm.barrier()


PROGRAM = """
import sys
from collectives.spawning import spawn
from tests.collectives.test_failures import wait_for_ever

if __name__ == "__main__":
    spawn(wait_for_ever, 3, sys.argv[1], transport=sys.argv[2])
"""


@pytest.mark.parametrize(
    "transport",
    ["shared_memory", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ipc", "tcp"))],
)
def test_no_rank_outlives_its_program(transport: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with Audience() as audience:
        command = [sys.executable, str(script), audience.path, transport]
        with subprocess.Popen(command, env=environment) as program:
            try:
                audience.admit(3, lambda: program.poll() is not None)
                assert [audience.heard(rank) for rank in (1, 2)] == [WAITS] * 2
                server = audience.parent(0)
            finally:
                program.kill()
        for rank in range(3):
            audience.wait_for_end(rank)
        ended, _, _ = select.select([server], [], [], LIMIT)
        os.close(server)
        assert ended
    script.unlink()
