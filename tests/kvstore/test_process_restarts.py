"""Restart of single processes by the launcher: which ones, how often, and when the whole job fails instead."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.kvstore.test_launch import PYTHON, Launch, launch
from tests.scripted_faults import script_processes

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


@pytest.mark.slow
def test_a_worker_that_is_killed_or_fails_starts_again_with_its_number() -> None:
    code = "print(f'{rank} {k}', flush=True)\nif rank == 1 and k < 2: os.kill(os.getpid(), 9) if k else sys.exit(4)\n"
    with workers(code, "--restart-processes", "3") as run:
        status, out, errors = run.end()
    assert sorted(out) == ["[worker 0] 0 0", "[worker 1] 1 0", "[worker 1] 1 1", "[worker 1] 1 2"]
    own = [re.sub(r"pid \d+", "pid", line) for line in errors if line.startswith("gangline: worker")]
    assert own == [
        "gangline: worker 1 (pid) exited with code 4; it starts again (restart 1 of 3 of single processes)",
        "gangline: worker 1 (pid) was killed by SIGKILL; it starts again (restart 2 of 3 of single processes)",
    ]
    assert status == 0


def test_an_end_that_would_come_again_starts_no_process_again() -> None:
    with workers("sys.exit(75 * rank)", "--restart-processes", "3") as run:
        status, _, errors = run.end()
    assert status == 75
    assert not any("starts again" in line for line in errors)


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


TRAIN = """\
import torch, gangline, signal
torch.set_num_threads(1)
with gangline.create("dist_sync") as kv:
    kv.init("w", torch.zeros(4, dtype=torch.float64))
    kv.set_optimizer(("sgd", {"learning_rate": 1.0}))
    out = torch.zeros(4, dtype=torch.float64)
    for step in range(kv.first_step, 6):
        kv.push("w", torch.full_like(out, 10.0 ** (2 * step + rank)))
        fail(step)
        kv.pull("w", out)
    kv.barrier()
    kv.pull("w", out)
    print(f"rank {rank}, start {k}: {int(-out[0])}", flush=True)
"""
FAILURES = {
    "worker 0 raises": "if step == 2 and not rank and not k: raise ValueError('a bug')",
    "worker 1 is stopped for 8 s": "if step == 3 and rank and not k:\n"
    "  import subprocess; subprocess.Popen(['sh', '-c', f'sleep 8; kill -CONT {os.getpid()}'])\n"
    "  os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
def test_a_loop_goes_on_in_the_restarted_worker(failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_HEARTBEAT_LIMIT", "4")
    body = "\n".join(f" {line}" for line in FAILURES[failure].splitlines())
    with workers(f"def fail(step):\n{body}\n" + TRAIN, "--restart-processes", "2") as run:
        status, out, errors = run.end(60)
    assert (status, len(out)) == (0, 2), errors
    assert {line.rpartition(" ")[2] for line in out} == {"1" * 12}
    assert sum("it starts again (restart" in line for line in errors) == 1


PAUSES = {
    "server": ("server 0 stop for 5 s at update 3", "server 0 gave no sign of life for 2 s; the others wait", 1),
    "scheduler": ("scheduler stop for 5 s at barrier 1", "", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("role", PAUSES)
def test_a_loop_goes_on_after_a_pause_of_a_server_or_the_scheduler(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, warning, restarts = PAUSES[role]
    script_processes(monkeypatch, script)
    monkeypatch.setenv("GANGLINE_HEARTBEAT", "0.5")
    monkeypatch.setenv("GANGLINE_HEARTBEAT_LIMIT", "2")
    monkeypatch.setenv("GANGLINE_RESTART_LIMIT", "30")
    with workers("fail = lambda step: None\n" + TRAIN, "--restart-processes", "2") as run:
        status, out, errors = run.end(90)
    assert (status, {line.rpartition(" ")[2] for line in out}) == (0, {"1" * 12}), errors
    assert any(warning in line for line in errors)
    assert sum("it starts again (restart" in line for line in errors) == restarts


LATE = """\
import pathlib, time
pid, closed = pathlib.Path(sys.argv[1], "pid"), pathlib.Path(sys.argv[1], "closed")
if rank == 1:
    kv.close()
    pid.write_text(str(os.getpid()))
    while sys.argv[2] == "True" and not closed.exists(): time.sleep(0.01)
    os.kill(os.getpid(), 9)
if sys.argv[2] == "True":
    kv.close()
    closed.touch()
while not pid.exists() or pathlib.Path("/proc", pid.read_text()).exists(): time.sleep(0.01)  # the launcher has seen it
time.sleep(0.3)
kv.close()
print("written", flush=True)
"""


@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.slow
def test_a_worker_that_dies_after_it_has_left_ends_nothing(is_over: bool, tmp_path: Path) -> None:
    words = ("-n", "2", "-s", "1", "--restart-processes", "2", "--", sys.executable, "-c", HEAD + LOOP + LATE)
    with launch(*words, str(tmp_path), str(is_over)) as run:
        status, out, errors = run.end()
    text = r"gangline: worker 1 \(pid \d+\) was killed by SIGKILL after it had left the job; the others go on"
    assert out == ["[worker 0] written"], errors
    assert sum(bool(re.fullmatch(text, line)) for line in errors) == 1, errors
    assert not any("starts again" in line for line in errors)
    assert status == 128 + 9  # what it did after close() is lost


LATE_SERVER = """\
import pathlib, time
kv.push("w", torch.ones(4)); kv.pull("w", out)
kv.close()
time.sleep(LATER)
if rank == 0:
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try: variables = (entry / "environ").read_bytes().split(b"\\0")
        except OSError: continue
        if b"DMLC_ROLE=server" in variables and os.environb[b"GANGLINE_TEST_JOB"] in b"".join(variables):
            os.kill(int(entry.name), 9)
    time.sleep(1)
    print("written", flush=True)
"""


SLOW_EXIT = """\
import atexit, os, time
if os.environ.get("DMLC_ROLE") == "server": atexit.register(time.sleep, 20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("later", [0, 2])
def test_a_server_that_dies_after_all_have_left_ends_nothing(
    later: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if later:  # the server has left, and its process is there
        (tmp_path / "sitecustomize.py").write_text(SLOW_EXIT)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    code = HEAD + LOOP + LATE_SERVER.replace("LATER", str(later))
    with launch("-n", "2", "-s", "1", "--restart-processes", "2", "--", sys.executable, "-c", code) as run:
        status, out, errors = run.end(50)
    assert (status, out) == (0, ["[worker 0] written"]), errors
    assert sum("was killed by SIGKILL" in line for line in errors) == 1 or not later, errors


FIT = """\
import torch, gangline
torch.set_num_threads(1)
torch.manual_seed(0)
data, labels = torch.randn(64, 3), torch.randint(0, 2, (64,))
module = gangline.Module(torch.nn.Linear(3, 2), loss=torch.nn.CrossEntropyLoss(), context=gangline.cpu())
die = lambda param: rank == 1 and param.nbatch == 2 and restart == 0 and os.kill(os.getpid(), 9)
module.fit((data, labels), num_epoch=2, batch_size=8, kvstore="dist_async", batch_end_callback=die)
print(f"rank {rank}, start {restart} {k}", flush=True)
"""


@pytest.mark.slow
def test_an_asynchronous_fit_does_not_go_on_alone_and_is_restarted_as_a_whole() -> None:
    head = "restart = int(os.environ['GANGLINE_RESTART'])\n"
    with workers(head + FIT, "--restart-processes", "3", "--max-restarts", "1") as run:
        status, out, errors = run.end(90)
    text = "worker 1 was started again alone, and training by a Module cannot be continued by one worker"
    assert any(f"RuntimeError: {text}; use gangline launch --max-restarts" in line for line in errors)
    assert sum("it starts again (restart" in line for line in errors) == 1
    assert "gangline: restart 1 of 1: all processes of the job start again" in errors
    assert (status, sorted(line.partition("] ")[2] for line in out)) == (0, ["rank 0, start 1 0", "rank 1, start 1 0"])
