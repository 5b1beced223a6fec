"""Elastic jobs: workers leave and join between rounds; sums are exact, and every sample is read once an epoch."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gangline.kvstore.parameter_server.store import DistStore
from tests.kvstore.parameter_server.digits import digits_of
from tests.kvstore.parameter_server.processes import DistJob, run_job

pytestmark = pytest.mark.timeout(110)

NUMEL = {"small": 4, "large": 200_003}
LIMITS = {"GANGLINE_TIMEOUT": "30", "GANGLINE_HEARTBEAT": "0.2", "GANGLINE_HEARTBEAT_LIMIT": "5"}
BATCH = 24
Plan = dict[tuple[int, int], str]
"""Action of a worker before a step, by rank and step: "leave", "start RANK", "until RANK+RANK"."""


def until(condition: Callable[[], object], what: object) -> None:
    """Wait for a condition."""
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends, what
        time.sleep(0.005)


def play(folder: str, workers: int, name: str, body: Callable[..., Any], steps: int, plan: Plan) -> Any:
    """Run the body as a worker of the start, or as one that comes when a file says so."""
    rank = int(os.environ["DMLC_WORKER_ID"])
    if rank >= workers:
        until(Path(folder, f"start-{rank}").exists, rank)
    with DistStore(name) as kv:
        return body(kv, Path(folder), steps, plan)


def train(kv: DistStore, folder: Path, steps: int, plan: Plan) -> list[tuple[int, slice, list[int] | None]]:
    """Push digit `rank` in each step; return step, share, and the digits of the sum over the step's number.

    There are none for the last step of a worker that leaves: its pull may bring values of a later round of the others.
    """
    kv.init(list(NUMEL), [torch.zeros(numel, dtype=torch.float64) for numel in NUMEL.values()])
    outs = {key: torch.empty(numel, dtype=torch.float64) for key, numel in NUMEL.items()}
    kv.pull(list(outs), list(outs.values()))
    done: list[tuple[int, slice, set[float]]] = []
    has_left = False
    for step in range(kv.first_step, steps):
        for words in plan.get((kv.rank, step), "").split(", "):
            act(kv, folder, words)
        share = kv.share(BATCH, step)
        if share is None:
            has_left = True
            with suppress(RuntimeError):
                kv.barrier()  # for which nobody would come
                raise AssertionError("it took part in a barrier")
            break
        if "barrier" in os.environ:
            kv.barrier()
            sizes = kv.group.all_gather(share.stop - share.start, "shares")
            assert sum(size or 0 for size in sizes) == BATCH
        for key, out in outs.items():
            kv.push(key, torch.full_like(out, (step + 1) * 4.0**kv.rank))
        kv.pull(list(outs), list(outs.values()))
        done.append((step, share, {float(one) for out in outs.values() for one in out.unique()}))
        if "barrier" in os.environ:
            kv.barrier()
    else:
        kv.barrier()
    last = done[-1][0] if has_left and done else None
    return [(step, share, None if step == last else digits_in(step, values)) for step, share, values in done]


def digits_in(step: int, values: set[float]) -> list[int]:
    (value,) = values
    sums, rest = divmod(value, step + 1)
    assert rest == 0
    return digits_of(sums)


def act(kv: DistStore, folder: Path, words: str) -> None:
    verb, _, number = words.partition(" ")
    if verb == "leave":
        kv.leave()
    elif verb == "start":
        Path(folder, f"start-{number}").touch()
    elif verb == "until":
        until(lambda: "+".join(map(str, sorted(kv._scheduler.views[-1][1]))) == number, number)


def run(
    tmp_path: Path,
    workers: int,
    late: int,
    plan: Plan,
    steps: int = 8,
    servers: int = 1,
    name: str = "dist_sync",
    body: Callable[..., Any] = train,
    **more: str,
) -> list[Any]:
    """Run a job; return the results of its workers."""
    folder = tempfile.mkdtemp(dir=tmp_path)
    with (
        patch.dict(os.environ, {**LIMITS, "GANGLINE_ELASTIC": "1:4", **more}),
        DistJob(play, workers, servers, folder, workers, name, body, steps, plan, successors=late) as job,
    ):
        return job.results()


def check(told: Sequence[Any], steps: int) -> list[list[int]]:
    """Check that in each step the shares are the whole batch, and the sums those of its workers; return these."""
    found = []
    for step in range(steps):
        of_step = {rank: one for rank, done in enumerate(told) for one in done if one[0] == step}
        ranks = sorted(of_step)
        shares = [of_step[rank][1] for rank in ranks]
        assert [index for share in shares for index in range(share.start, share.stop)] == list(range(BATCH))
        expected = [int(rank in ranks) for rank in range(max(ranks) + 1)]
        assert all(digits in (None, expected) for _, _, digits in of_step.values()), step
        found.append(ranks)
    return found


def test_a_worker_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    ranks = check(run(tmp_path, 2, 0, {(1, 3): "leave"}), 8)
    assert ranks[:3] == [[0, 1]] * 3
    assert ranks[4:] == [[0]] * 4 or ranks[5:] == [[0]] * 3


def test_a_new_worker_takes_part_from_the_round_that_all_know(tmp_path: Path) -> None:
    ranks = check(run(tmp_path, 2, 1, {(0, 3): "start 2, until 0+1+2"}), 8)
    assert ranks[:3] == [[0, 1]] * 3
    assert ranks[5:] == [[0, 1, 2]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
def test_workers_leave_and_join_in_one_change(tmp_path: Path, servers: int) -> None:
    plan = {(0, 2): "start 2, start 3, until 0+2+3", (1, 2): "leave", (2, 6): "leave", (3, 6): "leave"}
    plan[0, 11] = "until 0"
    ranks = check(run(tmp_path, 2, 2, plan, 14, servers), 14)
    assert (ranks[1], ranks[5], ranks[13]) == ([0, 1], [0, 2, 3], [0])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "ipc", "tcp"])
def test_one_worker_then_three_then_two(tmp_path: Path, transport: str) -> None:
    plan = {(0, 3): "start 1, start 2, until 0+1+2", (1, 8): "leave", (0, 10): "until 0+2"}
    ranks = check(run(tmp_path, 1, 2, plan, 14, 2, GANGLINE_TRANSPORT=transport), 14)
    assert (ranks[2], ranks[6], ranks[13]) == ([0], [0, 1, 2], [0, 2])


@pytest.mark.slow
def test_collectives_in_a_step_are_of_its_workers(tmp_path: Path) -> None:
    plan = {(0, 0): "start 2", (0, 3): "until 0+1+2", (1, 5): "leave", (0, 8): "start 3", (2, 9): "leave"}
    plan |= {(0, 10): "until 0+3"}
    for _ in range(3):
        ranks = check(run(tmp_path, 2, 2, plan, 14, 2, barrier=""), 14)
        assert ranks[13] == [0, 3]


def count(kv: DistStore, folder: Path, steps: int, plan: Plan) -> Any:
    """Push digits in a store without rounds; return the steps, the shares and the digits of all pushes."""
    done: list[tuple[int, slice]] = []
    out = torch.zeros(100_003, dtype=torch.float64)
    kv.init("w", out)
    for step in range(kv.first_step, steps):
        for words in plan.get((kv.rank, step), "").split(", "):
            act(kv, folder, words)
        share = kv.share(BATCH, step)
        if share is None:
            break
        kv.pushpull("w", torch.full_like(out, 64.0**kv.rank), out)
        done.append((step, share))
    Path(folder, f"left-{kv.rank}").touch()
    if kv.rank:
        return done, []
    until(lambda: all(Path(folder, f"left-{rank}").exists() for rank in (1, 2)), "the others")
    kv.pull("w", out)
    (value,) = out.unique().tolist()
    return done, [int(value) // 64**rank % 64 for rank in range(3)]


@pytest.mark.slow
def test_async_pushes_count_once_and_every_sample_is_read_once(tmp_path: Path) -> None:
    plan = {(0, 3): "start 2", (1, 4): "leave", (0, 12): "until 0+2"}
    told = run(tmp_path, 2, 1, plan, 30, 2, "dist_async", count)
    for step in range(30):
        shares = [share for done, _ in told for number, share in done if number == step]
        assert sorted(index for share in shares for index in range(share.start, share.stop)) == list(range(BATCH))
    assert told[0][1] == [len(done) for done, _ in told]
    assert 0 < len(told[1][0]) < 30


_CHANGES: dict[str, tuple[Plan, list[int]]] = {
    "leave": ({(1, 3): "leave", (0, 6): "until 0"}, [0]),
    "join": ({(0, 3): "start 2, until 0+1+2"}, [0, 1, 2]),
    "both": ({(0, 3): "start 2, until 0+2", (1, 3): "leave"}, [0, 2]),
    "three": (
        {(0, 3): "start 2, until 0+1+2", (1, 5): "leave", (0, 8): "until 0+2", (2, 9): "leave", (0, 13): "until 0"},
        [0],
    ),
}
"""Plans and the workers in the end."""
_BREAKS = "worker 0: hello 2, worker 1: push-sent 5, worker 2: push-sent 5, scheduler: meet 2, server 0: pull 5"
_ROLES = ("worker 0", "worker 1", "worker 2", "scheduler", "server 0")
_FAULTS: list[tuple[str, str, str]] = [
    *(  # a slow server delays the change for all
        (change, f"server 1 stop for 1.5 s at {point}", "auto")
        for change in ("leave", "join", "both")
        for point in ("push-taken 9", "push-taken 10", "ack 5", "pull 7")
    ),
    *(  # the last push of a leaving worker; there are two or three messages a step
        ("leave", f"worker 1 {action} at push-sent {number}", transport)
        for action in ("break", "repeat")
        for transport in ("auto", "tcp")
        for number in range(7, 13)
    ),
    ("leave", "worker 1 stop for 1 s at pull 10", "auto"),  # the last one of a leaving worker
    *(("three", one.replace(":", " break at"), "auto") for one in _BREAKS.split(", ")),
    *(  # messages about views that are lost, doubled or late
        ("three", f"{role} {action} at view {number}", "auto")
        for role in _ROLES
        for action, interval in (("break", 1), ("repeat", 3), ("stop for 0.5 s", 3))
        for number in range(1, 19 if role == "scheduler" else 7, interval)
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "script", "transport"), _FAULTS)
def test_a_fault_while_workers_leave_and_join_loses_nothing(
    tmp_path: Path, change: str, script: str, transport: str
) -> None:
    plan, last = _CHANGES[change]
    more = {"GANGLINE_FAULT": script, "GANGLINE_TRANSPORT": transport}
    ranks = check(run(tmp_path, 2, int("start" in str(plan)), plan, 16, 2, **more), 16)
    assert (ranks[2], ranks[15]) == ([0, 1], last)


def one_key(kv: DistStore) -> None:
    kv.init("w", torch.zeros(4))


LEAVE = [
    "worker 0 cannot leave: it defines the values and sets the learning rate",
    "worker 1 cannot leave: the job needs 2 workers or more, and has 2",
]
CLIPPED = ("sgd", {"learning_rate": 0.1, "clip_global_norm": 1.0})


def refused_calls(kv: DistStore) -> None:
    """Check each call's error, in an order in which a refused call leaves the others as they were."""
    one_key(kv)
    kv.init("v", torch.zeros(4))
    kv.share(BATCH, 0)
    for call, words in (
        (kv.leave, LEAVE[kv.rank]),
        (kv.join, "join() is not possible in an elastic job; use gangline launch --max-restarts"),
        (lambda: kv.set_optimizer(CLIPPED), "an optimizer with clip_global_norm is not possible in an elastic job"),
        (lambda: kv.set_gradient_compression({"type": "fp16"}), "compression is not possible in an elastic job"),
        (lambda: kv.share(BATCH, 1), f"worker {kv.rank} begins step 1, but has pushed 0 rounds; expected one push of"),
        (lambda: kv.push(["v", "w"], [torch.ones(4)] * 2), ""),
        (lambda: kv.init("u", torch.zeros(4)), "init() comes after the first push or pull; expected it before, in an"),
        (lambda: kv.push("v", torch.ones(4)), ""),
        (lambda: kv.push("v", torch.ones(4)), "key 'w' was pushed 1 times before step 2; expected one push of each"),
    ):
        text = ""
        try:
            call()
        except RuntimeError as error:
            text = str(error)
        assert (text.startswith(words), bool(text)) == (True, bool(words)), text


def outcome(body: Callable[[DistStore], object]) -> str:
    """Return the error of what a worker does with its store."""
    with DistStore("dist_sync") as kv:
        try:
            body(kv)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_calls_that_need_the_same_workers_are_refused_on_all() -> None:
    with patch.dict(os.environ, {**LIMITS, "GANGLINE_ELASTIC": "2:3"}):
        assert run_job(outcome, 2, 1, refused_calls) == ["", ""]


def die(kv: DistStore) -> None:
    one_key(kv)
    for _ in range(3):
        kv.pushpull("w", torch.ones(4), torch.empty(4))


@pytest.mark.slow
def test_a_worker_that_dies_without_having_left_fails_the_others_by_name() -> None:
    more = {"GANGLINE_ELASTIC": "1:3", "GANGLINE_FAULT": "worker 1 kill at push-sent 2"}
    with patch.dict(os.environ, {**LIMITS, **more}), DistJob(outcome, 2, 1, die) as job:
        _, _, first, second = job.outcomes()
    assert "worker 1 was killed or left: its process has ended" in str(first.value or first.error)
    assert "was killed by SIGKILL" in str(second.error)


@pytest.mark.slow
def test_no_worker_leaves_a_job_that_is_not_elastic() -> None:
    with patch.dict(os.environ, LIMITS):
        (text, _) = run_job(outcome, 2, 1, DistStore.leave)
    assert text.startswith("a worker cannot leave this 'dist_sync' store; expected a dist_* store, and")
