"""Workers that are killed and started again under their rank: every push counts once, and nothing stays behind."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from gangline import kvstore
from gangline.kvstore.parameter_server.store import DistStore
from tests.kvstore.parameter_server import digits
from tests.kvstore.parameter_server.test_restarted_servers import PATTERNS, SGD, WORKERS, check_equal, run, sync_with
from tests.kvstore.test_launch import launch
from tests.scripted_faults import script_processes

pytestmark = pytest.mark.timeout(110)

STEPS = 8
ALL = digits.every_push(STEPS, WORKERS)


def train(name: str, body: str) -> Any:
    """Return the digits of the sums and the first step."""
    with DistStore(name) as kv:
        outs = digits.init(kv)
        kv.pull(list(outs), list(outs.values()))
        first = kv.first_step
        digits.train(kv, outs, STEPS, body)
        return digits.sums(kv, outs), first, kv.is_restarted


def check(tmp_path: Path, point: str, victim: int = 1, name: str = "dist_sync", body: str = "pull", **more: Any) -> int:
    """Kill a worker, start its successor, and check that every push counts once; return the successor's first step."""
    found = run(tmp_path, [point], train, name, body, victim=f"worker {victim}", **more)
    assert found[1 - victim] == (ALL, 0, False)
    sums, first, is_restarted = found[victim]
    assert (sums, is_restarted) == (ALL, True)
    return int(first)


@pytest.mark.parametrize(
    ("point", "victim", "body"),
    [
        pytest.param("push-sent 5", 1, "pull", marks=pytest.mark.slow),
        ("push-sent 6", 0, "pushpull barrier last"),  # worker 0 defines no values again
    ],
)
def test_a_killed_worker_goes_on_where_it_was(tmp_path: Path, point: str, victim: int, body: str) -> None:
    assert check(tmp_path, point, victim, body=body) == 2


_START = "hello 1, meet 1, meet 3, met 2, met 4"
_OF_WORKER_1 = {
    "pull": f"{_START}, push-sent 5, push-sent 6, push-sent 7, pull 4, values 4, ack 2",
    "async pull": "push-sent 5, push-sent 6, push-sent 7, pull 4, values 4",
    "async": "push-sent 5, push-sent 6, ack 1, barrier 1, leave 1",  # a busy server acknowledges all pushes at once
    "pushpull": "push-sent 5, push-sent 6, values 5, values 6",
    "barrier first": "barrier 3, barrier 4, push-sent 5, push-sent 6",
    "pull barrier last": "barrier 3, met 7, met 8, push-sent 5, push-sent 6, pull 4, values 6",
    "barrier first pushpull barrier last": "barrier 5, barrier 6, barrier 7, push-sent 5, push-sent 6, values 5",
}
_OF_WORKER_0 = "define 1, command 1, meet 2, meet 4, push-sent 1, push-sent 5, barrier 1"
_ASYNC = "push-sent 5, push-sent 6, ack 1, pull 4, values 4, barrier 1, meet 2"
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
def test_every_push_counts_once_wherever_a_worker_is_killed(
    tmp_path: Path, point: str, options: dict[str, Any]
) -> None:
    check(tmp_path, point, **options)


def descend(steps: int, spec: Any = SGD) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train by gradients of the weights that are pulled, from `first_step` on; return the weights."""
    with kvstore.create("dist_sync") as kv:
        outs = sync_with(kv)
        kv.set_optimizer(spec)
        for step in range(kv.first_step, steps):
            kv.pull(list(outs), list(outs.values()))
            scale = sum(float(value.sum()) for value in outs.values())  # each gradient depends on all shards
            for key, value in outs.items():
                kv.push(key, (1 + step + kv.rank) * value.cos() * math.sin(scale))
        kv.barrier()
        kv.pull(list(outs), list(outs.values()))
        return outs, {}


@pytest.mark.parametrize(
    "point",
    ["push-sent 9", *(pytest.param(f"push-sent {at}", marks=pytest.mark.slow) for at in (2, 3, 7, 8, 10, 11, 12))],
)
def test_a_worker_goes_on_with_the_weights_of_its_first_step_though_some_shards_are_newer(
    tmp_path: Path, point: str
) -> None:
    check_equal(tmp_path, [point], descend, 5, victim="worker 1", servers=2)


@pytest.mark.slow
def test_a_worker_goes_on_with_optimizers_by_pattern(tmp_path: Path) -> None:
    check_equal(tmp_path, ["push-sent 9"], descend, 5, PATTERNS, victim="worker 1", servers=2)


# A job that starts again from a worker's checkpoint, by the script of docs/reliability.md


PAGE = Path(__file__).parents[3] / "docs" / "reliability.md"


def weights(folder: Path) -> tuple[set[str], list[str]]:
    """Run the script in a folder of its own; return the lines that workers print, and standard error."""
    found = re.search(r"```python\n# resumes.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found
    folder.mkdir()
    program = f"import os\nos.chdir({str(folder)!r})\n{found[1]}"
    with launch("-n", "2", "-s", "2", "--max-restarts", "1", "--", sys.executable, "-c", program) as job:
        status, out, errors = job.end(100)
    assert status == 0, "\n".join(errors)
    return {line.partition("] ")[2] for line in out}, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["server 1 kill at update 13", "server 0 kill at close 16", "worker 1 kill at push-sent 29"]
)
def test_a_killed_job_resumes_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    undisturbed, _ = weights(tmp_path / "undisturbed")
    script_processes(monkeypatch, script)
    killed, errors = weights(tmp_path / "killed")
    assert any("restart 1 of 1" in line for line in errors), errors
    assert len(undisturbed) == 1
    assert killed == undisturbed
