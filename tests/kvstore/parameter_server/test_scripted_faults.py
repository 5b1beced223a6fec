"""Scripted faults (GANGLINE_FAULT) in real jobs: what each one ends in, and that no push is lost or counted twice."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from gangline import spawn
from gangline.collectives.communicator import Communicator
from gangline.collectives.errors import DeadNodeError, GanglineError
from gangline.collectives.processes.spawning import Outcome
from gangline.kvstore.optimizer.spec import Key
from gangline.kvstore.parameter_server.store import DistStore
from tests import scripted_faults as faults
from tests.collectives.stage import Actor
from tests.kvstore.parameter_server import digits
from tests.kvstore.parameter_server.faults import DistStage

pytestmark = pytest.mark.timeout(110)

STEPS = 5
WORKERS = 2


def play(path: str) -> dict[Key, list[int]] | str:
    """Return the digits of the sums, or the error of the first call."""
    Actor(int(os.environ["DMLC_WORKER_ID"]), path)
    try:
        with DistStore("dist_sync") as kv:
            outs = digits.init(kv)
            digits.train(kv, outs, STEPS)
            return digits.sums(kv, outs)
    except GanglineError as error:
        return f"{type(error).__name__}: {error}"


def outcomes(script: str, **environment: str) -> dict[str, Outcome]:
    """Run a job with a script and return the outcome of each process; nothing may be left."""
    with DistStage(play, WORKERS, 1, GANGLINE_FAULT=script, **digits.LIMITS, **environment) as stage:
        names = ["scheduler", "server 0", *(f"worker {rank}" for rank in range(WORKERS))]
        return dict(zip(names, stage.outcomes(), strict=True))


def check_digits(script: str, **environment: str) -> None:
    """Check that all processes end without an error, and that every push counts once."""
    ended = outcomes(script, **environment)
    assert {name: outcome.error for name, outcome in ended.items()} == dict.fromkeys(ended)
    for rank in range(WORKERS):
        assert ended[f"worker {rank}"].value == digits.every_push(STEPS, WORKERS)


def check_death(script: str, victim: str, **environment: str) -> None:
    """Check that one process is killed and all workers get an error that names it, before a timeout could end them."""
    ended = outcomes(script, **environment)
    assert "was killed by SIGKILL" in str(ended[victim].error)
    for name, outcome in ended.items():
        if name != victim:
            told = outcome.value if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"
            if name.startswith("worker") or told is not None:  # a server has nothing to say once the job runs
                assert isinstance(told, str), f"{name} has got {told}"
                assert told.startswith("DeadNodeError: ")
                assert f"{'the ' * (victim == 'scheduler')}{victim} was killed or left" in told


# Scripts


def test_messages_are_broken_repeated_and_swapped() -> None:
    script = faults.Script(
        faults.parse(
            "worker 1 swap at pull 1; worker 1 break at pull 3; worker 1 repeat at ack 1; worker 0 kill at ack 1"
        ),
        "worker",
        1,
    )
    seen: list[str] = []
    for number, points in enumerate([["pull"], ["ack"], ["pull"], ["pull"], []]):
        script.pass_on(points, ("line",), lambda number=number: seen.append(str(number)), lambda: seen.append("cut"))  # type: ignore[misc]
    assert seen == ["1", "1", "0", "2", "cut", "4"]


def test_a_message_without_a_next_one_is_sent_in_the_end() -> None:
    script = faults.Script(faults.parse("worker 0 swap at pull 1"), "worker", 0)
    seen: list[str] = []
    script.pass_on(["pull"], ("line",), lambda: seen.append("pull"), lambda: None)
    script.release("another, which another thread may use")
    assert seen == []
    script.release("line")
    assert seen == ["pull"]


# Jobs


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_faults_of_connections_and_messages_lose_nothing(transport: str) -> None:
    check_digits(
        "worker 1 break at push-sent 3; server 0 break at values 2; worker 0 repeat at push-sent 2; "
        "server 0 swap at push-taken 3; worker 1 swap at push-sent 6; scheduler break at barrier 1; "
        "server 0 repeat at push-taken 8; worker 0 break at values 1",
        GANGLINE_TRANSPORT=transport,
    )


@pytest.mark.slow
def test_a_process_that_is_stopped_for_a_while_loses_nothing() -> None:
    check_digits("server 0 stop for 0.5 s at update 4; worker 1 stop for 0.5 s at pull 2")


# Points of each role, with events that every run has.

_KILLS = {
    "worker 1": "hello 1, meet 1, met 1, barrier 1, push-sent 1, pull 1, ack 1, values 1",
    "server 0": "hello 2, define 1, command 1, push-taken 4, update 5, close 7, ack 3, values 2, pull 2",
    "scheduler": "join 3, meet 2, met 3, barrier 1",
}
_DATA = "hello 1, define 1, command 1, pull 2, ack 2, values 2"
_MESSAGES = {
    "worker 0": f"{_DATA}, push-sent 4, meet 2, met 2, barrier 1, leave 1",
    "server 0": f"{_DATA}, push-taken 6",
    "scheduler": "meet 3, met 2, barrier 1, leave 1",
}


def _pairs(points: dict[str, str]) -> list[tuple[str, str]]:
    return [(role, point) for role, texts in points.items() for point in texts.split(", ")]


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        ("server 0", "update 3"),
        pytest.param("worker 1", "push-sent 5", marks=pytest.mark.slow),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in _pairs(_KILLS)),
    ],
)
def test_a_process_killed_at_a_point_is_named(victim: str, point: str) -> None:
    check_death(f"{victim} kill at {point}", victim)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("action", ["break", "repeat", "swap"])
@pytest.mark.parametrize(("role", "point"), _pairs(_MESSAGES))
def test_a_fault_of_one_message_loses_nothing(role: str, point: str, action: str, transport: str) -> None:
    check_digits(f"{role} {action} at {point}", GANGLINE_TRANSPORT=transport)


# Ranks of a communicator


def add(comm: Communicator) -> Any:
    for _ in range(3):
        result = comm.all_reduce(torch.ones(4))
    return result


def test_a_rank_is_killed_at_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "rank 1 kill at collective 2")
    with pytest.raises(DeadNodeError, match="rank 1 of 2 was killed by SIGKILL"):
        spawn(add, 2)
