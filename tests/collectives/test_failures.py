"""Errors of the other ranks when one is killed, stopped or interrupted, closes, is late or busy."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from gangline import Communicator, spawn
from gangline.collectives.communicator import in_process
from gangline.collectives.errors import StallError
from gangline.collectives.liveness import status_socket
from gangline.collectives.transports.shm.slots import SlotExchange
from gangline.collectives.transports.shm.transport import SharedMemoryTransport
from gangline.collectives.transports.zmq.transport import ZmqTransport
from tests.collectives.situations import EVERY_CALL, SITUATIONS, Said, all_reduce, error_of, expect, ramp
from tests.collectives.stage import WAITS, Actor, Stage

pytestmark = pytest.mark.timeout(110)

TRANSPORTS = ("shared_memory", "ipc", "tcp")
_slow = partial(pytest.param, marks=pytest.mark.slow)
POSITIONS = [(size, rank) for size in (2, 3, 4) for rank in range(size)]

WAYS = ("absent", "alone", "midway")
"""State of the lost rank: not in the call that the others wait in; in it before the others; or all are in it."""


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
    return [first, *(error_of(partial(call, comm)) for call in EVERY_CALL)]


def _signal_oneself_midway(number: int) -> None:
    """Send a signal to this process at the second call of a transport that waits for others or progresses."""
    times = iter((False, True))

    def signalling(method: Callable[..., Any]) -> Callable[..., Any]:
        def signalled(*arguments: Any, **options: Any) -> Any:
            if next(times, False):
                os.kill(os.getpid(), number)
            return method(*arguments, **options)

        return signalled

    for owner, name in (
        *product((SharedMemoryTransport, ZmqTransport), ("receive", "progress")),
        (SlotExchange, "publish_and_wait"),
        *product((Communicator,), ("all_reduce", "broadcast", "all_to_all", "barrier")),
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
    assert later == [first] * len(EVERY_CALL)


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


@pytest.mark.parametrize("transport", [_slow("shared_memory"), "tcp"])
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


@pytest.mark.parametrize("transport", ["shared_memory", _slow("ipc"), _slow("tcp")])
def test_a_rank_that_stops_for_less_than_the_limit_continues(transport: str) -> None:
    with Stage(stop_for_a_while, 3, 1, transport=transport) as stage:
        stage.wait_for_stop(1)
        assert [stage.heard(rank) for rank in (0, 2) for _ in range(20)] == [WAITS] * 40
        stage.signal(1, signal.SIGCONT)
        assert [outcome.value for outcome in stage.outcomes()] == [None] * 3


def hold_the_gil(comm: Communicator, victim: int) -> Said | None:
    comm.barrier()
    if comm.rank == victim:
        ctypes.PyDLL(None).usleep(3_000_000)
    return error_of(partial(all_reduce, 1 << 20, comm, victim))


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", _slow("ipc")])
def test_a_rank_whose_interpreter_is_busy_for_longer_than_the_limit_is_alive(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GANGLINE_HEARTBEAT_LIMIT", "1")
    assert spawn(hold_the_gil, 3, 1, transport=transport) == [None] * 3


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
        _slow("shared_memory", 3, 2, "large all_reduce"),
        _slow("ipc", 4, 1, "large all_reduce"),
        _slow("tcp", 2, 1, "large all_reduce"),
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


# Names on this host that are no text


def _wait_among_strange_names(comm: Communicator) -> float:
    Path("/proc/self/comm").write_bytes(b"x" * 14 + "é".encode())  # the kernel keeps 15 bytes
    names = (b"\xff\xfe", f"{status_socket.PREFIX}x-".encode(), f"{status_socket.PREFIX}1-\xe9".encode("latin-1"))
    with ExitStack() as stack:
        for name in names:
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
            stranger.bind(b"\0" + name + str(os.getpid()).encode())
            stranger.listen()
        if comm.rank == 1:
            time.sleep(0.5)
        values = torch.ones(3)
        comm.all_reduce(values)
        group = comm.split(0)  # looks for the ranks' common ancestor
        group.close()
        comm.barrier()
    return float(values.sum())


def test_names_of_other_sockets_and_cut_names_of_processes_end_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_STALL_WARN", "0.1")
    monkeypatch.setenv("GANGLINE_HEARTBEAT_LIMIT", "1")  # states of processes are read each 50 ms
    assert spawn(_wait_among_strange_names, 2, transport="shared_memory", timeout=20) == [6, 6]


# Ranks that close


def leave_two_behind(comm: Communicator, path: str) -> None:
    actor = Actor(comm.rank, path)
    pair = comm.split(0 if comm.rank < 2 else None)
    comm.barrier()
    if pair is None:
        return
    actor.hear()  # the third is gone
    all_reduce(100, pair, 0)
    all_reduce(1 << 19, pair, 0)
    other = 1 - comm.rank
    came = torch.empty(1 << 19)
    sending = comm.send(ramp(1 << 19, comm.rank), other, async_op=True)
    comm.recv(came, other)
    sending.wait()
    expect(came, ramp(1 << 19, other))


@pytest.mark.parametrize("transport", ["shared_memory", _slow("ipc"), _slow("tcp")])
def test_a_rank_that_closes_does_not_disturb_ranks_that_do_not_need_it(transport: str) -> None:
    with Stage(leave_two_behind, 3, transport=transport) as stage:
        stage.wait_for_end(2)
        for rank in (0, 1):
            stage.say(rank)
        assert [outcome.error for outcome in stage.outcomes()] == [None] * 3


def leave_a_group_open(comm: Communicator, path: str) -> None:
    actor = Actor(comm.rank, path)
    group = comm.split(0)
    if comm.rank == 0:
        group.send(ramp(1 << 19, 0), 1)
        return
    actor.hear()  # rank 0 is gone; it closed its communicator but not its group
    came = torch.empty(1 << 19)
    if comm.rank == 2:
        group.send(ramp(1 << 19, 2), 1)
    else:
        actor.announce_waits()
        group.recv(came, 2)
        expect(came, ramp(1 << 19, 2))
        group.recv(came, 0)
        expect(came, ramp(1 << 19, 0))


@pytest.mark.parametrize("transport", ["ipc", _slow("tcp")])
def test_a_rank_may_close_with_a_group_still_open(transport: str) -> None:
    with Stage(leave_a_group_open, 3, transport=transport) as stage:
        stage.wait_for_end(0)
        stage.say(1)
        assert stage.heard(1) == WAITS
        stage.say(2)
        assert [outcome.error for outcome in stage.outcomes()] == [None] * 3


# Late ranks


def _pass_on(comm: Communicator, late: int) -> None:
    if comm.rank == late:
        for rank in set(range(comm.size)) - {late}:
            comm.send(ramp(100, rank), rank)
    else:
        came = torch.empty(100)
        comm.recv(came, late)
        expect(came, ramp(100, comm.rank))


WAITED_FOR: dict[str, tuple[Callable[[Communicator, int], None], str]] = {
    "small": (partial(all_reduce, 100), r"all_reduce\(100 x float32, sum\), call 1, has waited \S+ s: {who}"),
    "large": (partial(all_reduce, 1 << 19), r"all_reduce\(524288 x float32, sum\), call 1, has waited \S+ s: {who}"),
    "recv": (_pass_on, r"recv\(100 x float32\) on rank \d has waited \S+ s for rank {late} \(rank {late} is at .+\)"),
}


class _Telling(logging.Handler):
    """Handler that sends each log record to the test, and `WAITS` for only ten further checks."""

    def __init__(self, actor: Actor) -> None:
        super().__init__()
        self._actor = actor

    def emit(self, record: logging.LogRecord) -> None:
        self._actor.tell({"warns": record.getMessage()})
        self._actor.announce_waits(10)


def come_late(comm: Communicator, path: str, late: int, variable: str) -> list[Said | None]:
    actor = Actor(comm.rank, path)
    logging.getLogger("gangline").addHandler(_Telling(actor))
    errors = []
    for call, _ in WAITED_FOR.values():
        os.environ[variable] = "0.5"
        child = comm.split(0)
        del os.environ[variable]
        if comm.rank == late:
            actor.hear()
        errors.append(error_of(partial(call, child, late)) or error_of(child.barrier))
        actor.announce_waits(0)
        actor.tell("over")
        comm.barrier()
        child.close()
    return errors


def _who(size: int, late: int) -> str:
    """Return a pattern for the ranks that came, and the late one with the line that it is at."""
    came = [str(rank) for rank in range(size) if rank != late]
    place = rf" \(rank {late} is at \S+stage.py:\d+ in hear\)"
    return f"rank{'s' if size > 2 else ''} {', '.join(came)} arrived, rank {late} did not{place}"


@pytest.mark.parametrize(
    ("transport", "size", "late"), [("shared_memory", 3, 1), _slow("ipc", 2, 0), _slow("tcp", 4, 3)]
)
def test_a_late_rank_is_named_in_one_warning_and_the_call_succeeds(transport: str, size: int, late: int) -> None:
    others = [rank for rank in range(size) if rank != late]
    with Stage(come_late, size, late, "GANGLINE_STALL_WARN", transport=transport) as stage:
        for _, text in WAITED_FOR.values():
            for rank in others:
                warning = stage.heard(rank)
                assert re.fullmatch(text.format(who=_who(size, late), late=late), warning["warns"]), warning
                assert [stage.heard(rank) for _ in range(10)] == [WAITS] * 10
            stage.say(late)
            for rank in range(size):
                assert next(word for word in iter(partial(stage.heard, rank), None) if word != WAITS) == "over"
        assert [outcome.value for outcome in stage.outcomes()] == [[None] * len(WAITED_FOR)] * size


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "size", "late"), [("shared_memory", 2, 1), ("ipc", 4, 2), ("tcp", 3, 0)])
def test_a_rank_beyond_the_timeout_gets_the_same_error_itself(transport: str, size: int, late: int) -> None:
    others = [rank for rank in range(size) if rank != late]
    with Stage(come_late, size, late, "GANGLINE_TIMEOUT", transport=transport) as stage:
        for _ in WAITED_FOR:
            for rank in others:
                assert next(word for word in iter(partial(stage.heard, rank), None) if word != WAITS) == "over"
            stage.say(late)
            assert stage.heard(late) == "over"
        outcomes = stage.outcomes()
    assert [outcome.error for outcome in outcomes] == [None] * size
    for index, (_, text) in enumerate(WAITED_FOR.values()):
        errors = [outcome.value[index] for outcome in outcomes]
        for rank in others:
            assert errors[rank].kind == "StallError"
            expected = text.format(who=_who(size, late), late=late) + r"; the timeout is \S+ s"
            assert re.fullmatch(expected, errors[rank].text), errors[rank]
        assert errors[late] in [errors[rank] for rank in others]


def test_the_timeout_of_a_communicator_can_be_given() -> None:
    comm, other = in_process(2, timeout=0.2)
    with pytest.raises(StallError, match=r"barrier\(\), call 1, has waited \S+ s: rank 0 arrived, rank 1 did not"):
        comm.barrier()
    with pytest.raises(StallError, match="rank 0 arrived, rank 1 did not"):
        _twice(other.barrier)  # the last rank to reach a call waits for none


def _twice(call: Callable[[], object]) -> None:
    call()
    call()
