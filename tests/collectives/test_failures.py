"""Errors of the other ranks when one is killed, stopped or interrupted."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import pytest

from gangline import Communicator
from gangline.collectives.transports.shm.slots import CompiledSlotExchange, SharedSlotExchange
from gangline.collectives.transports.shm.transport import SharedMemoryTransport
from gangline.collectives.transports.zmq.transport import ZmqTransport
from tests.collectives.situations import SITUATIONS, Said, all_reduce, error_of, ramp
from tests.collectives.stage import WAITS, Actor, Stage

pytestmark = pytest.mark.timeout(110)

TRANSPORTS = ("shared_memory", "ipc", "tcp")
POSITIONS = [(size, rank) for size in (2, 3, 4) for rank in range(size)]

WAYS = ("absent", "alone", "midway")
"""State of the lost rank: not in the call that the others wait in; in it before the others; or all are in it."""

LATER: tuple[Callable[[Communicator], object], ...] = (
    lambda comm: comm.all_reduce(ramp(100, comm.rank)),
    lambda comm: comm.all_reduce(ramp(1 << 19, comm.rank)),
    lambda comm: comm.broadcast(ramp(10, comm.rank)),
    lambda comm: comm.all_gather(ramp(10, comm.rank), async_op=True),
    lambda comm: comm.barrier(),
    lambda comm: comm.split(0),
    lambda comm: comm.empty(8),
    lambda comm: comm.send(ramp(10, comm.rank), (comm.rank + 1) % comm.size),
    lambda comm: comm.recv(ramp(10, comm.rank), (comm.rank + 1) % comm.size),
)


def _until_it_fails(comm: Communicator, situation: str, victim: int) -> Said | None:
    """Return a rank's error in a call, or after it if the call succeeded without the lost rank."""
    call = partial(SITUATIONS[situation].call, comm, victim)
    return next(filter(None, map(error_of, [call, *[comm.barrier] * 3])), None)


def lose_one(comm: Communicator, path: str, situation: str, way: str, victim: int, number: int) -> list[Said | None]:
    actor = Actor(comm.rank, path)
    began = error_of(comm.barrier)  # unsent messages are lost when a rank kills itself
    if comm.rank == victim and way == "absent":
        actor.hear()  # never returns
    elif comm.rank == victim and way == "midway":
        _signal_oneself_midway(number)
    elif comm.rank != victim and way == "alone":
        actor.hear()
    actor.announce_waits()
    first = began or _until_it_fails(comm, situation, victim)
    return [first, *(error_of(partial(call, comm)) for call in LATER)]


def _signal_oneself_midway(number: int) -> None:
    """Send a signal to this process at the second call of a transport that waits for others or progresses."""
    times = iter((False, True))

    def signalling(method: Callable[..., Any]) -> Callable[..., Any]:
        def signalled(*arguments: Any) -> Any:
            if next(times, False):
                os.kill(os.getpid(), number)
            return method(*arguments)

        return signalled

    for owner, name in (
        *product((SharedMemoryTransport, ZmqTransport), ("receive", "progress")),
        *((one, "publish_and_wait") for one in (SharedSlotExchange, CompiledSlotExchange)),
        (Communicator, "_run_compiled"),
    ):
        setattr(owner, name, signalling(getattr(owner, name)))


def _check_errors(errors: list[Said | None], size: int, victim: int, situation: str, way: str, why: str) -> None:
    first, *later = errors
    expected = SITUATIONS[situation].text.format(victim=victim, next=(victim + 1) % size)
    calls = [re.escape(expected)]
    if way != "absent" or not SITUATIONS[situation].needs_all:
        calls.append(re.escape("barrier()"))
    assert first.kind == "DeadNodeError", first
    assert re.fullmatch(rf"rank {victim} {why} \(rank \d waited in ({'|'.join(calls)})\)", first.text), first
    assert later == [first] * len(LATER)


CASES = [
    (transport, size, victim, situation, way)
    for transport, (size, victim), situation, way in product(TRANSPORTS, POSITIONS, SITUATIONS, WAYS)
    if not (situation == "recv from each other" and (size < 3 or way != "absent"))
]


def _always_or_slow(index: int, case: tuple[Any, ...]) -> Any:
    return pytest.param(*case, id="-".join(map(str, case)), marks=() if index % 97 == 0 else pytest.mark.slow)


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


def _lose_one_with_a_child(comm: Communicator, path: str) -> Said | None:
    actor = Actor(comm.rank, path)
    comm.barrier()
    if comm.rank == 1:
        child = os.fork()
        while not child:
            signal.pause()  # as a worker of a DataLoader that waits for its next batch
        actor.tell(child)
        actor.hear()  # never returns
    actor.announce_waits()
    return error_of(comm.barrier)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
def test_a_killed_rank_whose_forked_child_runs_is_an_error(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_TIMEOUT", "10")
    with Stage(_lose_one_with_a_child, 2, transport=transport) as stage:
        child = stage.heard(1)
        try:
            assert stage.heard(0) == WAITS
            stage.kill(1)
            stage.wait_for_end(0)
        finally:
            os.kill(child, signal.SIGKILL)
        outcome, _ = stage.outcomes()
    text = "rank 1 was killed or left: connection lost (rank 0 waited in barrier())"
    assert outcome.value == Said("DeadNodeError", text)


# Stopped ranks


SOME_THAT_STOP = [
    ("shared_memory", 2, 0, "small all_reduce", "absent"),
    ("shared_memory", 3, 1, "large all_reduce", "midway"),
    ("ipc", 3, 2, "large all_reduce", "absent"),
    ("tcp", 2, 1, "recv from it", "absent"),
    ("tcp", 4, 0, "large all_reduce", "midway"),
]
ALL_THAT_STOP = [case for case in CASES if case[1:3] == (3, 0) and case[3] != "broadcast to it" and case[4] != "alone"]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SOME_THAT_STOP, id="some"),
        *(pytest.param([case], id="-".join(map(str, case)), marks=pytest.mark.slow) for case in ALL_THAT_STOP),
    ],
)
def test_a_stopped_rank_counts_as_dead_after_the_limit_and_gets_an_error_when_it_continues(
    cases: list[tuple[str, int, int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_HEARTBEAT_LIMIT", "1")
    with ExitStack() as stack:  # in parallel, as all of them wait
        stages = []
        for transport, size, victim, situation, way in cases:
            stage = Stage(lose_one, size, situation, way, victim, signal.SIGSTOP, transport=transport)
            stages.append(stack.enter_context(stage))
            others = [rank for rank in range(size) if rank != victim]
            if way == "absent":
                assert [stage.heard(rank) for rank in others] == [WAITS] * len(others)
                stage.stop(victim)
        for (transport, size, victim, situation, way), stage in zip(cases, stages, strict=True):
            seconds = 2 if transport == "tcp" else 1
            others = [rank for rank in range(size) if rank != victim]
            for rank in others:
                stage.wait_for_end(rank)
            stage.say(victim)
            stage.signal(victim, signal.SIGCONT)
            outcomes = stage.outcomes()
            for rank in others:
                _check_errors(
                    outcomes[rank].value, size, victim, situation, way, f"gave no sign of life for {seconds} s"
                )
            assert outcomes[victim].value[0].kind == "DeadNodeError"


def stop_for_a_while(comm: Communicator, path: str, victim: int) -> Said | None:
    actor = Actor(comm.rank, path)
    comm.barrier()
    if comm.rank == victim:
        _signal_oneself_midway(signal.SIGSTOP)
    else:
        actor.announce_waits(20)
    return error_of(partial(all_reduce, 1 << 20, comm, victim))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_stops_for_less_than_the_limit_continues(transport: str) -> None:
    with Stage(stop_for_a_while, 3, 1, transport=transport) as stage:
        stage.wait_for_stop(1)
        assert [stage.heard(rank) for rank in (0, 2) for _ in range(20)] == [WAITS] * 40
        stage.signal(1, signal.SIGCONT)
        assert [outcome.value for outcome in stage.outcomes()] == [None] * 3


# Interrupted ranks


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
    return [error_of(call), error_of(comm.barrier)]


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
        assert during in (None, expected)  # None: it had already sent everything that the others needed
        assert after == expected
    assert outcomes[victim].value[0] == expected
