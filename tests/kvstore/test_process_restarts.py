"""Restart of single processes by the launcher: which ones, how often, and when the whole job fails instead."""

from __future__ import annotations

import re
import sys

import pytest

from tests.kvstore.test_launch import PYTHON, Launch, launch

pytestmark = pytest.mark.timeout(110)

HEAD = """\
import os, sys
rank, k = int(os.environ["RANK"]), int(os.environ.get("GANGLINE_INCARNATION", 0))
"""
LOOP = """\
import torch, gangline
kv = gangline.create("dist_sync")
kv.init("w", torch.zeros(4))
out = torch.zeros(4)
"""


def workers(code: str, *words: str) -> Launch:
    python = (sys.executable, "-c") if "gangline" in code else PYTHON
    return launch("-n", "2", "-s", "1", *words, "--", *python, HEAD + code)


def test_a_worker_that_is_killed_or_fails_starts_again_with_its_number() -> None:
    code = "print(f'{rank} {k}', flush=True)\nif rank == 1 and k < 2: os.kill(os.getpid(), 9) if k else sys.exit(3)\n"
    with workers(code, "--restart-processes", "3") as run:
        status, out, errors = run.end()
    assert sorted(out) == ["[worker 0] 0 0", "[worker 1] 1 0", "[worker 1] 1 1", "[worker 1] 1 2"]
    own = [re.sub(r"pid \d+", "pid", line) for line in errors if line.startswith("gangline: worker")]
    assert own == [
        "gangline: worker 1 (pid) exited with code 3; it starts again (restart 1 of 3 of single processes)",
        "gangline: worker 1 (pid) was killed by SIGKILL; it starts again (restart 2 of 3 of single processes)",
    ]
    assert status == 0


@pytest.mark.parametrize("code", [2, 75, 127])
def test_an_end_that_would_come_again_starts_no_process_again(code: int) -> None:
    with workers(f"sys.exit({code} * rank)", "--restart-processes", "3") as run:
        status, _, errors = run.end()
    assert status == code
    assert not any("starts again" in line for line in errors)


def test_restarts_of_single_processes_need_servers() -> None:
    with launch("-n", "2", "-s", "0", "--restart-processes", "1", "--", "train") as run:
        status, _, errors = run.end()
    assert (status, len(errors)) == (2, 1)
    assert "--restart-processes needs servers" in errors[0]


@pytest.mark.slow
def test_when_the_restarts_are_used_up_the_job_fails_with_the_worker() -> None:
    code = LOOP + "kv.pushpull('w', out, out) if rank == 0 else os.kill(os.getpid(), 9)"
    with workers(code, "--restart-processes", "1") as run:
        status, _, errors = run.end()
    assert status == 128 + 9
    assert any("worker 1 was killed or left: its process has ended; the others wait" in line for line in errors)
    assert any(re.search(r"worker 1 \(pid \d+\) was killed by SIGKILL; stopping the other", line) for line in errors)


@pytest.mark.slow
def test_a_process_that_does_not_come_back_in_time_fails_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_RESTART_LIMIT", "1")
    code = (
        "import time; k and time.sleep(100)\n"
        + LOOP
        + "kv.pushpull('w', out, out) if not rank else os.kill(os.getpid(), 9)"
    )
    with workers(code, "--restart-processes", "2") as run:
        status, out, errors = run.end()
    text = "worker 1 was killed or left: its process has ended and was not started again within 1 s"
    assert any(f"DeadNodeError: {text}" in line for line in [*out, *errors])
    assert status == 1
    assert sum("starts again" in line for line in errors) == 1
