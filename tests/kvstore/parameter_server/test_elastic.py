"""Elastic jobs: workers leave and join between rounds; sums are exact, and every sample is read once an epoch."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gangline import kvstore
from gangline.kvstore.parameter_server.store import DistStore
from tests.kvstore.parameter_server.processes import DistJob
from tests.kvstore.parameter_server.test_failures import digits_of

pytestmark = pytest.mark.timeout(110)

NUMEL = {"small": 4, "large": 200_003}
LIMITS = {"GANGLINE_TIMEOUT": "30", "GANGLINE_HEARTBEAT": "0.2", "GANGLINE_HEARTBEAT_LIMIT": "5"}
BATCH = 24
Plan = dict[tuple[int, int], str]
"""What a worker does before a step, by rank and step: "leave", "start RANK", "until RANK+RANK"."""


def wait_for(path: Path) -> None:
    ends = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < ends, path
        time.sleep(0.005)


def play(folder: str, workers: int, name: str, steps: int, plan: Plan) -> Any:
    """Train as a worker of the start, or as one that comes when a file says so."""
    rank = int(os.environ["DMLC_WORKER_ID"])
    if rank >= workers:
        wait_for(Path(folder, f"start-{rank}"))
    kv = kvstore.create(name)
    assert isinstance(kv, DistStore)
    try:
        return train(kv, Path(folder), steps, plan)
    finally:
        kv.close()


def train(kv: DistStore, folder: Path, steps: int, plan: Plan) -> list[tuple[int, slice, list[int]]]:
    """Push digit `rank` in each step; return step, share, and the digits of the sum over the step's number."""
    kv.init(list(NUMEL), [torch.zeros(numel, dtype=torch.float64) for numel in NUMEL.values()])
    outs = {key: torch.empty(numel, dtype=torch.float64) for key, numel in NUMEL.items()}
    kv.pull(list(outs), list(outs.values()))
    done = []
    for step in range(kv.first_step, steps):
        for words in plan.get((kv.rank, step), "").split(", "):
            act(kv, folder, words)
        share = kv.share(BATCH, step)
        if share is None:
            break
        for key, out in outs.items():
            kv.push(key, torch.full_like(out, (step + 1) * 4.0**kv.rank))
        kv.pull(list(outs), list(outs.values()))
        (value,) = {float(one) for out in outs.values() for one in out.unique()}
        sums, rest = divmod(value, step + 1)
        assert rest == 0
        done.append((step, share, digits_of(sums)))
    return done


def act(kv: DistStore, folder: Path, words: str) -> None:
    verb, _, number = words.partition(" ")
    if verb == "leave":
        kv.leave()
    elif verb == "start":
        Path(folder, f"start-{number}").touch()
    elif verb == "until":
        ends = time.monotonic() + 20
        while "+".join(map(str, sorted(kv._scheduler.views[-1][1]))) != number:
            assert time.monotonic() < ends, (number, kv._scheduler.views)
            time.sleep(0.005)


def run(
    tmp_path: Path,
    workers: int,
    late: int,
    plan: Plan,
    steps: int = 8,
    servers: int = 1,
    bounds: str = "1:4",
    **more: str,
) -> list[Any]:
    """Run a job; return the results of its workers."""
    with patch.dict(os.environ, {**LIMITS, "GANGLINE_ELASTIC": bounds, **more}):
        job = DistJob(play, workers, servers, str(tmp_path), workers, "dist_sync", steps, plan, successors=late)
        with job:
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
        assert [digits for _, _, digits in of_step.values()] == [expected] * len(ranks), step
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


_JOIN = {(0, 3): "start 2, until 0+1+2"}
_CHANGES: list[Plan] = [{(1, 3): "leave"}, _JOIN, {(0, 3): "start 2, until 0+2", (1, 3): "leave"}]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["push-taken 9", "push-taken 10", "ack 5", "pull 7"])
@pytest.mark.parametrize("plan", _CHANGES, ids=["leave", "join", "both"])
def test_a_slow_server_delays_the_change_for_all(tmp_path: Path, point: str, plan: Plan) -> None:
    late = int((0, 3) in plan)
    check(run(tmp_path, 2, late, plan, 10, 2, GANGLINE_FAULT=f"server 1 stop for 1.5 s at {point}"), 10)
