"""Failures of workers, servers, the scheduler and connections."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gangline import kvstore
from gangline.collectives.errors import GanglineError
from gangline.collectives.processes.spawning import Outcome
from gangline.kvstore import KVStore
from gangline.kvstore.parameter_server.client import scheduler_client
from tests.collectives.stage import WAITS, Actor
from tests.kvstore.parameter_server.faults import DistStage, Waits
from tests.kvstore.test_launch import launch

pytestmark = pytest.mark.timeout(110)

SMALL, CUT = 8, 700_003


def push(kv: KVStore, key: str, numel: int) -> None:
    kv.push(key, torch.ones(numel))


def push_and_wait(kv: KVStore) -> None:
    """Push, then call barrier(), which raises the errors of the push."""
    push(kv, "cut", CUT)
    kv.barrier()


CALLS: dict[str, Callable[[KVStore], Any]] = {
    "pull": lambda kv: kv.pull("small", torch.empty(SMALL)),
    "pull of a cut key": lambda kv: kv.pull("cut", torch.empty(CUT)),
    "push": push_and_wait,
    "barrier": lambda kv: kv.barrier(),
    "init": lambda kv: kv.init("late", torch.zeros(SMALL)),
    "set_optimizer": lambda kv: kv.set_optimizer("sgd"),
    "join": lambda kv: kv.join(),
}


def play(path: str, pushes: list[int], options: dict[str, Any]) -> list[str]:
    """Run the calls that the test sends and report their results; ``pushes``: ranks that push before."""
    if "ON_ANOTHER_HOST" in os.environ:
        scheduler_client.this_process = lambda: ("another", 1, 1)
    kv = kvstore.create("dist_sync", **options)
    kv.init(["small", "cut"], [torch.zeros(SMALL), torch.zeros(CUT)])
    kv.pull("cut", torch.empty(CUT))
    if kv.rank in pushes:
        push(kv, "small", SMALL)
        push(kv, "cut", CUT)
    kv.barrier()
    actor = Actor(kv.rank, path)
    waits = Waits(actor)
    while True:
        match actor.hear():
            case "close":
                kv.close()
                return kv.dead_nodes()
            case "raise":
                raise ArithmeticError("as the test wants it")
            case "exit":
                sys.exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hold the GIL":
                ctypes.PyDLL(None).usleep(3_000_000)
                actor.tell("done")
            case "fork":
                child = os.fork()
                if not child:
                    signal.pause()
                    os._exit(0)
                actor.tell(child)
            case [call, announced]:
                waits.due = announced
                try:
                    CALLS[call](kv)
                    actor.tell("done")
                except GanglineError as error:
                    actor.tell([type(error).__name__, str(error)])


def ended_by_themselves(outcomes: list[Outcome], but: int = -1) -> list[Any]:
    """Check that all processes but one ended without an error; return their results."""
    problems = [str(outcome.error) for place, outcome in enumerate(outcomes) if outcome.error and place != but]
    assert problems == []
    return [outcome.value for outcome in outcomes]


def wait_in(stage: DistStage, *calls: str) -> None:
    """Make these calls on the first workers, and return when they wait in them."""
    for rank, call in enumerate(calls):
        stage.say(rank, [call, True])
    for rank in range(len(calls)):
        assert stage.heard(rank) == WAITS


def dead_node_error(stage: DistStage, rank: int, call: str = "") -> str:
    """Return the text of the DeadNodeError of a worker's pending call, or of a new one."""
    if call:
        stage.say(rank, [call, False])
    told = stage.heard(rank)
    assert isinstance(told, list), told
    assert told[0] == "DeadNodeError"
    return str(told[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_calls_that_wait_for_a_dead_worker_fail(how: str) -> None:
    limits = {} if how == "killed" else {"GANGLINE_HEARTBEAT_LIMIT": "2", "GANGLINE_HEARTBEAT": "0.2"}
    calls = ["set_optimizer", "pull", "pull of a cut key", "init", "init", "join"]
    victim = len(calls)
    why = "was killed or left: its process has ended" if how == "killed" else "gave no sign of life for 2 s"
    with DistStage(play, victim + 1, 2, list(range(victim)), {}, **limits) as stage:
        wait_in(stage, *calls)
        if how == "killed":
            stage.kill(victim)
        else:
            stage.stop(victim)
        for rank in range(victim):
            assert f"worker {victim} {why}" in dead_node_error(stage, rank)
        for rank in range(victim):  # later calls that need the dead worker fail too
            for call in ("barrier", "pull of a cut key"):
                assert f"worker {victim} {why}" in dead_node_error(stage, rank, call)
            stage.say(rank, "close")
        stage.kill(victim)
        outcomes = stage.outcomes()
        said = ended_by_themselves(outcomes, but=3 + victim)
        assert said[3 : 3 + victim] == [[f"worker {victim}"]] * victim
        assert "was killed by SIGKILL" in str(outcomes[3 + victim].error)


@pytest.mark.parametrize(
    "host",
    [
        pytest.param({}, id="here"),
        pytest.param({"GANGLINE_TRANSPORT": "tcp", "ON_ANOTHER_HOST": ""}, id="elsewhere", marks=pytest.mark.slow),
    ],
)
def test_a_worker_whose_interpreter_is_busy_is_alive_and_a_stopped_one_is_dead(host: dict[str, str]) -> None:
    limits = {"GANGLINE_HEARTBEAT_LIMIT": "1", "GANGLINE_HEARTBEAT": "0.2"}
    with DistStage(play, 2, 1, [], {}, **limits, **host) as stage:
        wait_in(stage, "barrier")
        stage.say(1, "hold the GIL")
        assert stage.heard(1) == "done"
        stage.say(1, ["barrier", False])
        assert (stage.heard(0), stage.heard(1)) == ("done", "done")
        wait_in(stage, "barrier")
        stage.stop(1)
        assert "worker 1 gave no sign of life for 1 s" in dead_node_error(stage, 0)
        stage.kill(1)
        stage.say(0, "close")
        ended_by_themselves(stage.outcomes(), but=3)


def test_a_killed_worker_is_noticed_though_its_forked_children_hold_its_connections() -> None:
    with DistStage(play, 2, 1, [0], {}, GANGLINE_HEARTBEAT_LIMIT="600") as stage:
        stage.say(1, "fork")
        child = stage.heard(1)
        wait_in(stage, "pull")
        stage.say(1, "kill")
        text = dead_node_error(stage, 0)
        os.kill(child, signal.SIGKILL)
        assert "worker 1 was killed or left: its process has ended" in text
        stage.say(0, "close")
        ended_by_themselves(stage.outcomes(), but=3)


@pytest.mark.parametrize("how", ["raise", pytest.param("exit", marks=pytest.mark.slow)])
def test_a_worker_that_leaves_is_named(how: str) -> None:
    with DistStage(play, 3, 1, [0, 1], {}) as stage:
        wait_in(stage, "pull", "barrier")
        stage.say(2, how)
        for rank in range(2):
            assert "worker 2" in dead_node_error(stage, rank)
            stage.say(rank, "close")
        outcomes = stage.outcomes()
        ended_by_themselves(outcomes, but=4)
        assert ("as the test wants it" if how == "raise" else "exited with code 3") in str(outcomes[4].error)


ENDS = """\
import os, signal, sys, torch, gangline
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from the launcher, which may stop a worker before it has raised
ends, victim, call = sys.argv[1:]
is_first = not (os.environ.get("GANGLINE_INCARNATION", "0") + os.environ.get("GANGLINE_RESTART", "0")).strip("0")
kv = gangline.create("dist_sync" if int(os.environ["DMLC_NUM_SERVER"]) else "allreduce")
def run():
    out = torch.zeros(4)
    kv.init(0, out)
    for step in range(kv.first_step, 4):
        kv.pushpull(0, out, out=out)
        if kv.rank == int(victim) and step and (ends == "always" or is_first):
            if ends == "leaves":
                return
            raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB\\nand more")
        if call == "barrier":
            kv.barrier()
    print("done", flush=True)
if call == "barrier":
    with kv:
        run()
else:
    run()
"""
MEMORY = "OutOfMemoryError: CUDA out of memory. Tried 2 GiB"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "words", "ends", "call", "text"),
    [
        (0, "-n 2 -s 1", "always", "pull", f"ended with an error: {MEMORY}"),
        (1, "-n 3 -s 1", "always", "barrier", f"ended with an error: {MEMORY}"),
        (1, "-n 2 -s 1", "leaves", "pull", "has left the job"),
        (1, "-n 2 -s 0", "always", "pull", f"closed its communicator after {MEMORY}"),
        (1, "-n 2 -s 1 --elastic 1:3", "always", "pull", f"ended with an error: {MEMORY}"),
        (1, "-n 2 -s 1 --restart-processes 1", "always", "pull", f"ended with an error: {MEMORY}"),
        (1, "-n 2 -s 1 --restart-processes 1", "once", "pull", f"ended with an error: {MEMORY}; the others wait"),
        (0, "-n 2 -s 1 --max-restarts 1", "once", "barrier", f"ended with an error: {MEMORY}"),
    ],
)
def test_others_name_the_error_that_has_ended_a_worker(
    victim: int, words: str, ends: str, call: str, text: str
) -> None:
    with launch(*words.split(), "--", sys.executable, "-c", ENDS, ends, str(victim), call) as run:
        status, out, errors = run.end(100)
    told = [line.partition("DeadNodeError: ")[2] for line in errors if "errors.DeadNodeError: " in line]
    for line in told:
        assert re.fullmatch(rf"(worker|rank) {victim} {text} \(.*\)", line), line
    if "elastic" in words or "processes" in words:  # the launcher stops the others, perhaps before they have raised
        assert any(f"WARNING: worker {victim} {text}" in line for line in errors), errors
    else:
        assert len(told) == int(words[3]) - 1, errors
    done = int(words[3]) if ends == "once" else 0
    assert (bool(status), sum("done" in line for line in out)) == (ends != "once", done), errors


def test_a_dead_scheduler_ends_the_job() -> None:
    with DistStage(play, 2, 1, [0], {}) as stage:
        wait_in(stage, "pull", "barrier")
        stage.kill_scheduler()
        for rank in range(2):
            assert "the scheduler was killed or left" in dead_node_error(stage, rank)
            dead_node_error(stage, rank, "push")
            stage.say(rank, "close")
        said = ended_by_themselves(stage.outcomes(), but=0)
        assert said[2:] == [["scheduler"]] * 2


@pytest.mark.slow
def test_a_late_worker_causes_a_warning_and_then_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with DistStage(play, 3, 1, [0, 2], {"timeout": 1.5}, GANGLINE_STALL_WARN="0.3") as stage:
        stage.say(0, ["pull", True])
        stage.say(2, ["barrier", True])
        assert stage.heard(0) == stage.heard(2) == WAITS
        name, text = stage.heard(0)
        assert name == "StallError"
        waited = re.search(r"pull of key 'small' has waited ([\d.]+) s", text)
        assert waited is not None, text
        assert float(waited[1]) >= 1.5  # the limit, and more on a busy machine
        name, text = stage.heard(2)
        assert (name, text) == ("StallError", "barrier of worker 2 has waited 1.5 s for ranks 0, 1")
        for rank in range(3):
            stage.say(rank, "close")
        ended_by_themselves(stage.outcomes())
    said = capfd.readouterr().err
    assert "key 'small', round 1, waits for rank 1; present: ranks 0, 2 (worker 1 is at " in said
    assert re.search(r"barrier waits for ranks 0, 1 \(worker 0 is at .+; worker 1 is at .+\); present: rank 2", said)
