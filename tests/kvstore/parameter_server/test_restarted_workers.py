"""Workers that are killed and started again under their rank: every push counts once, and nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest

from gangline.collectives.errors import GanglineError
from gangline.collectives.processes.spawning import Outcome
from gangline.kvstore.parameter_server.store import DistStore
from tests.collectives.stage import Actor
from tests.kvstore.parameter_server import digits
from tests.kvstore.parameter_server.faults import DistStage

pytestmark = pytest.mark.timeout(110)

STEPS = 8
WORKERS = 2
ALL = digits.every_push(STEPS, WORKERS)
LIMITS = {**digits.LIMITS, "GANGLINE_RESTART_LIMIT": "20"}


def play(path: str, victim: int, name: str, body: str) -> Any:
    """Train as a worker, or as the successor of ``victim`` once the test says that it has died."""
    number = int(os.environ["DMLC_WORKER_ID"])
    actor = Actor(number, path)
    if number >= WORKERS:
        actor.hear()
        os.environ.update(DMLC_WORKER_ID=str(victim), GANGLINE_INCARNATION=str(number - WORKERS + 1))
    try:
        return train(name, body, actor if number >= WORKERS else None)
    except (GanglineError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def train(name: str, body: str, successor: Actor | None = None) -> Any:
    """Return the digits of the sums and the first step."""
    with DistStore(name) as kv:
        outs = digits.init(kv)
        kv.pull(list(outs), list(outs.values()))
        first = kv.first_step
        if successor is not None and "waits" in body:
            successor.tell(first)
            successor.hear()
        digits.train(kv, outs, STEPS, body)
        return digits.sums(kv, outs), first, kv.is_restarted


class RestartStage(DistStage):
    """Job in which a successor takes the place of a worker that a script kills."""

    successors = 1

    def __init__(
        self, script: str, victim: int = 1, name: str = "dist_sync", body: str = "", servers: int = 1, **more: str
    ) -> None:
        self._servers = servers
        environment = {**LIMITS, "GANGLINE_RESTART_PROCESSES": "1", "GANGLINE_FAULT": script, **more}
        super().__init__(play, WORKERS, servers, victim, name, body, **environment)

    def end(self) -> dict[str, Outcome]:
        """Wait for all processes and return their outcomes."""
        names = ["scheduler", *(f"server {rank}" for rank in range(self._servers))]
        names += [*(f"worker {rank}" for rank in range(WORKERS)), "successor"]
        return dict(zip(names, self.outcomes(), strict=True))


def check(
    script: str, victim: int = 1, name: str = "dist_sync", body: str = "pull", servers: int = 1, **more: str
) -> int:
    """Kill a worker, start its successor, and check that every push counts once; return the successor's first step."""
    with RestartStage(f"worker {victim} kill at {script}", victim, name, body, servers, **more) as stage:
        stage.wait_for_end(victim)
        stage.say(WORKERS)
        ended = stage.end()
    assert "was killed by SIGKILL" in str(ended.pop(f"worker {victim}").error)
    assert {role: outcome.error for role, outcome in ended.items()} == dict.fromkeys(ended)
    other = ended[f"worker {1 - victim}"].value
    found, first, is_restarted = ended["successor"].value
    assert other == (ALL, 0, False)
    assert (found, is_restarted) == (ALL, True)
    return int(first)


@pytest.mark.parametrize(
    ("script", "victim", "body"),
    [
        pytest.param("push-sent 5", 1, "pull", marks=pytest.mark.slow),
        ("push-sent 6", 0, "pushpull barrier last"),  # worker 0 defines no values again
    ],
)
def test_a_killed_worker_goes_on_where_it_was(script: str, victim: int, body: str) -> None:
    assert check(script, victim, body=body) == 2


def test_a_worker_that_dies_too_often_fails_the_others() -> None:
    with RestartStage("worker 1 kill at push-sent 5; worker 1.1 kill at push-sent 2", body="pull") as stage:
        stage.wait_for_end(1)
        stage.say(WORKERS)
        ended = stage.end()
    for rank in (1, WORKERS):
        assert "was killed by SIGKILL" in str(ended["successor" if rank == WORKERS else "worker 1"].error)
    assert ended["worker 0"].value.startswith("DeadNodeError: worker 1 was killed or left: its process has ended (")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("point", ["push-sent 5", "pull 4", "barrier 1"])
def test_a_stopped_worker_that_goes_on_after_its_successor_came_changes_nothing(point: str, name: str) -> None:
    limits: dict[str, Any] = {"GANGLINE_HEARTBEAT_LIMIT": "1"}
    with RestartStage(f"worker 1 stop at {point}", name=name, body="pull, waits", **limits) as stage:
        stage.wait_for_stop(1)
        stage.say(WORKERS)
        stage.heard(WORKERS)
        stage.signal(1, signal.SIGCONT)
        stage.wait_for_end(1)
        stage.say(WORKERS)
        ended = stage.end()
    assert re.match(
        "DeadNodeError: (the scheduler counts this process|this process counts) as dead", ended["worker 1"].value
    )
    for role in ("worker 0", "successor"):
        assert ended[role].value[0] == ALL


_START = "hello 1, meet 1, meet 3, met 2, met 4"
_OF_WORKER_1 = {
    "pull": f"{_START}, push-sent 5, push-sent 6, push-sent 7, pull 4, values 4, done 2, ack 2",
    "async pull": "push-sent 5, push-sent 6, push-sent 7, pull 4, values 4",
    "async": "push-sent 5, push-sent 6, ack 2, barrier 1, leave 1",
    "pushpull": "push-sent 5, push-sent 6, values 5, values 6",
    "barrier first": "barrier 3, barrier 4, push-sent 5, push-sent 6",
    "pull barrier last": "barrier 3, met 7, met 8, push-sent 5, push-sent 6, pull 4, values 6",
    "barrier first pushpull barrier last": "barrier 5, barrier 6, barrier 7, push-sent 5, push-sent 6, values 5",
}
_OF_WORKER_0 = "define 1, command 1, meet 2, meet 4, push-sent 1, push-sent 5, barrier 1"
_ASYNC = "push-sent 5, push-sent 6, ack 2, pull 4, values 4, barrier 1, meet 2"
_TWO_SERVERS = "push-sent 5, push-sent 6, push-sent 7, pull 6, values 5, hello 2"
_KILLS: list[tuple[str, dict[str, Any]]] = [
    *((points, {"body": body}) for body, points in _OF_WORKER_1.items()),
    (_OF_WORKER_0, {"victim": 0}),
    (_ASYNC, {"name": "dist_async"}),
    *((_TWO_SERVERS, {"body": "async pull", "servers": 2, "GANGLINE_TRANSPORT": name}) for name in ("auto", "tcp")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "options"), [(point, options) for points, options in _KILLS for point in points.split(", ")], ids=str
)
def test_every_push_counts_once_wherever_a_worker_is_killed(point: str, options: dict[str, Any]) -> None:
    check(point, **options)
