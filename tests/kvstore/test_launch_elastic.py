"""`gangline launch --elastic` and `gangline resize`: workers of a running job come and go, as the launcher is told."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kvstore.test_launch import Launch, launch

pytestmark = pytest.mark.timeout(110)

TRAIN = """\
import os, sys, time, torch, gangline
torch.set_num_threads(1)
steps = 12
def until(*ranks):
    while sorted(kv._scheduler.views[-1][1]) != list(ranks):
        time.sleep(0.005)
trainer = gangline.Trainer({"w": torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64))}, "sgd",
                           {"learning_rate": 1.0}, kvstore="dist_sync")
kv, weight = trainer.kvstore, trainer._parameters["w"]
seen = []
for indices in (batches := gangline.data.ElasticBatches(48, 12, kv, epochs=3)):
    if kv.rank == 0 and batches.step in waits:
        print("at", batches.step, flush=True)
        until(*waits[batches.step])
    seen += [f"{batches.epoch}.{index}" for index in indices.tolist()]
    weight.grad = torch.full_like(weight, indices.double().mean() if len(indices) else 0.0)
    trainer.step(len(indices))
print(f"rank {kv.rank} read", *seen, flush=True)
if kv.rank == 0:
    print(f"weight {weight[0].item():.9f}", flush=True)
kv.close()
"""
HELD = "import time; time.sleep(100)"


def job(waits: dict[int, tuple[int, ...]], *words: str) -> Launch:
    return launch("-n", "2", "-s", "1", *words, "--", sys.executable, "-c", f"waits = {waits}\n{TRAIN}")


def resize(run: Launch, workers: int) -> tuple[int, str]:
    words = (sys.executable, "-m", "gangline", "resize", str(run.process.pid), str(workers))
    ended = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return ended.returncode, (ended.stdout or ended.stderr).strip()


def check(out: list[str], errors: list[str], ranks: set[int]) -> None:
    """Check that each sample was read once in each epoch, and that the weight is that of one process."""
    read = {int(found[1]): found[2].split() for line in out if (found := re.search(r"rank (\d+) read(.*)", line))}
    assert read.keys() == ranks, errors
    assert sorted(one for own in read.values() for one in own) == sorted(
        f"{e}.{i}" for e in range(3) for i in range(48)
    )
    (weight,) = [float(line.rpartition(" ")[2]) for line in out if "weight" in line]
    assert weight == pytest.approx(-3 * 4 * 23.5, rel=1e-11)


@pytest.mark.slow
def test_resize_adds_and_removes_workers() -> None:
    with job({3: (0, 1, 2), 8: (0,)}, "--elastic", "1:4") as run:
        run.hear("at 3")
        assert resize(run, 3) == (0, "2 to 3 workers: worker 2 starts")
        run.hear("at 8")
        code, text = resize(run, 1)
        assert (code, text) == (0, "3 to 1 workers: worker 1 is asked to leave, worker 2 is asked to leave")
        status, out, errors = run.end(60)
    assert status == 0, errors
    check(out, errors, {0, 1, 2})


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 4, 6])
def test_a_scheduler_killed_while_a_view_is_agreed_on_changes_no_sum(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setenv("GANGLINE_FAULT", f"scheduler kill at view {number}")
    with job({3: (0, 1, 2), 8: (0,)}, "--elastic", "1:4", "--restart-processes", "1") as run:
        run.hear("at 3")
        assert resize(run, 3)[0] == 0
        run.hear("at 8")
        assert resize(run, 1)[0] == 0
        status, out, errors = run.end(60)
    assert status == 0, errors
    check(out, errors, {0, 1, 2})


@pytest.mark.slow
def test_a_worker_that_gets_sigterm_leaves_after_its_step() -> None:
    with job({5: (0,)}, "--elastic", "1:2") as run:
        run.hear("at 5")
        ((pid, _),) = [(child, name) for child, name in workers_of(run) if name == "1"]
        subprocess.run(("kill", "-TERM", str(pid)), check=True)
        status, out, errors = run.end(60)
    assert status == 0, errors
    check(out, errors, {0, 1})


def workers_of(run: Launch) -> list[tuple[int, str]]:
    """Return process ids and ranks of the workers."""
    found = []
    for pid in run.running():
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        variables = dict(word.decode().split("=", 1) for word in words if b"=" in word)
        if variables.get("DMLC_ROLE") == "worker":
            found.append((pid, variables["DMLC_WORKER_ID"]))
    return found


@pytest.mark.slow
def test_a_number_out_of_bounds_is_refused_and_changes_nothing() -> None:
    with launch("-n", "1", "-s", "1", "--elastic", "1:2", "--", sys.executable, "-c", f"print('here')\n{HELD}") as run:
        run.hear("here")
        assert resize(run, 3) == (1, "gangline: '3' workers; expected 1 to 2")
        run.process.send_signal(signal.SIGTERM)
        assert run.end()[0] == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_worker_that_comes_when_the_job_is_over_does_not_fail_it() -> None:
    late = "import os, time\nif os.environ['RANK'] == '2': time.sleep(4)\n"
    with launch(
        "-n", "2", "-s", "1", "--elastic", "1:3", "--", sys.executable, "-c", f"{late}waits = {{}}\n{TRAIN}"
    ) as run:
        while len(workers_of(run)) < 2:
            time.sleep(0.01)
        assert resize(run, 3)[0] == 0
        status, out, errors = run.end(60)
    assert status == 0, errors
    check(out, errors, {0, 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("-n 2 --elastic 3:4", "-n is 2; expected 3 to 4 workers, by --elastic"),
        ("-n 2 --elastic 4", "--elastic is '4'; expected the least and the most workers, such as 1:4"),
        ("-n 2 -s 0 --elastic 1:4", "--elastic needs servers, -s 1 or more"),
        ("-n 2 --elastic 1:4 --work-load-list auto", "--work-load-list auto measures workers that stay"),
        ("-n 2 --elastic 1:4 --launcher mpi", "--elastic has no effect with --launcher mpi; expected --launcher local"),
    ],
)
def test_wrong_bounds_are_refused(words: str, text: str) -> None:
    with launch(*words.split(), "--", "train") as run:
        status, _, errors = run.end()
    assert status == 2
    assert text in errors[0]


def test_without_an_elastic_job_there_is_nothing_to_resize() -> None:
    words = (sys.executable, "-m", "gangline", "resize", "1", "2")
    ended = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr.strip()) == (
        2,
        "gangline: no elastic job of yours has the launcher 1; expected its process id",
    )
