"""`gangline launch --elastic` and `gangline resize`: workers of a running job come and go, as the launcher is told."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gangline.cli.main import app
from tests.kvstore.test_launch import Launch, launch
from tests.scripted_faults import script_processes

pytestmark = pytest.mark.timeout(110)

TRAIN = """\
import time, torch, gangline
torch.set_num_threads(1)
DATA = torch.randn(60, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABEL = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(2))
def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 400), torch.nn.Tanh(), torch.nn.Linear(400, 3)).double()
def shares(kv, samples, size, epochs):
    per_epoch = -(-samples // size)
    for step in range(kv.first_step, epochs * per_epoch):
        epoch, number = divmod(step, per_epoch)
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
        batch = order[number * size : (number + 1) * size]
        if (share := kv.share(len(batch), step)) is None:
            return
        yield step, batch[share]
def train(optimizer, kvstore, waits):
    model, mean = network(), torch.nn.CrossEntropyLoss()
    trainer = gangline.Trainer(model, *optimizer, kvstore=kvstore)
    kv, step = trainer.kvstore, 0
    for step, indices in shares(kv, len(DATA), 16, 4):
        if kv.rank == 0 and step in waits:
            print("at", step, flush=True)
            while sorted(kv._scheduler.views[-1][1]) != waits[step]:
                time.sleep(0.005)
        trainer.zero_grad()
        if len(indices):
            mean(model(DATA[indices]), LABEL[indices]).backward()
        trainer.step(len(indices))
    if kv.rank == 0:
        kv.pull(list(trainer._parameters), [one.data for one in trainer._parameters.values()])
    rank = kv.rank
    kv.close()
    return rank, step, [one.detach() for one in model.parameters()]
OPTIMIZER = "adam", {"learning_rate": 0.01}
rank, step, weights = train(OPTIMIZER, "dist_sync", WAITS)
if rank == 0:
    _, _, alone = train(OPTIMIZER, gangline.create("device"), {})
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(weights, alone))
    print(f"steps {step + 1}, relative difference {worst:.1e}", flush=True)
"""
STEPS = 16
HELD = "import time; time.sleep(100)"


def job(waits: dict[int, list[int]], *words: str) -> Launch:
    return launch("-n", "2", "-s", "2", *words, "--", sys.executable, "-c", f"WAITS = {waits}\n{TRAIN}")


def check(run: Launch, timeout: float = 60) -> list[str]:
    """Wait for the end; check that the weights are those of one process, which reads each sample once an epoch."""
    status, out, errors = run.end(timeout)
    assert status == 0, errors
    (found,) = [re.search(r"steps (\d+), relative difference (\S+)", line) for line in out if "relative" in line]
    assert found is not None
    assert int(found[1]) == STEPS, errors
    assert float(found[2]) < 1e-11
    return errors


def resize(run: Launch, workers: int, process: int | None = None) -> tuple[int, str]:
    words = (sys.executable, "-m", "gangline", "resize", str(process or run.process.pid), str(workers))
    ended = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return ended.returncode, (ended.stdout or ended.stderr).strip()


@pytest.mark.slow
@pytest.mark.parametrize("kill", [None, 1, 2, 4, 6])
def test_resize_adds_and_removes_workers_even_if_the_scheduler_is_killed_meanwhile(
    monkeypatch: pytest.MonkeyPatch, kill: int | None
) -> None:
    """Kill it at a message about a view, if at all."""
    script_processes(monkeypatch, f"scheduler kill at view {kill}" if kill else "")
    restarts = ("--restart-processes", "1") if kill else ()
    with job({3: [0, 1, 2], 8: [0]}, "--elastic", "1:4", *restarts) as run:
        run.hear("at 3")
        assert resize(run, 3) == (0, "2 to 3 workers: worker 2 starts")
        run.hear("at 8")
        code, text = resize(run, 1)
        assert (code, text) == (0, "3 to 1 workers: worker 1 is asked to leave, worker 2 is asked to leave")
        check(run)


@pytest.mark.slow
def test_a_worker_that_gets_sigterm_leaves_after_its_step() -> None:
    with job({5: [0]}, "--elastic", "1:2") as run:
        run.hear("at 5")
        ((pid, _),) = [(child, name) for child, name in workers_of(run) if name == "1"]
        subprocess.run(("kill", "-TERM", str(pid)), check=True)
        check(run)


@pytest.mark.slow
def test_a_new_worker_that_is_killed_before_it_takes_part_ends_nothing() -> None:
    with job({3: [0, 1, 3]}, "--elastic", "1:3") as run:
        run.hear("at 3")
        assert resize(run, 3) == (0, "2 to 3 workers: worker 2 starts")
        ((pid, _),) = [(child, name) for child, name in workers_of(run) if name == "2"]
        subprocess.run(("kill", "-KILL", str(pid)), check=True)
        while resize(run, 3)[1] != "2 to 3 workers: worker 3 starts":
            time.sleep(0.05)
        errors = check(run)
    assert f"gangline: worker 2 (pid {pid}) was killed by SIGKILL before it took part; the others go on" in errors


@pytest.mark.slow
@pytest.mark.parametrize("way", ["resize", "signal"])
def test_a_worker_that_gets_sigterm_before_it_can_handle_it_leaves_after_its_step(way: str) -> None:
    with job({5: [0]}, "--elastic", "1:2") as run:
        while len(found := [child for child, name in workers_of(run) if name == "1"]) < 1:
            time.sleep(0.01)
        if way == "resize":
            assert resize(run, 1) == (0, "2 to 1 workers: worker 1 is asked to leave")
        else:
            subprocess.run(("kill", "-TERM", str(found[0])), check=True)
        errors = check(run)
    assert any("worker 1" in line and "it starts again, and leaves after a round" in line for line in errors)


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
        ((worker, _),) = workers_of(run)
        assert resize(run, 3, worker) == (1, "gangline: '3' workers; expected 1 to 2")
        run.process.send_signal(signal.SIGTERM)
        code, _, errors = run.end()
    assert code == 128 + signal.SIGTERM
    assert errors[0] == f"gangline: `gangline resize {run.process.pid} N` changes the number of workers"


@pytest.mark.slow
def test_a_worker_that_comes_when_the_job_is_over_does_not_fail_it() -> None:
    late = "import os, time\nif os.environ['RANK'] == '2': time.sleep(4)\n"
    with launch(
        "-n", "2", "-s", "1", "--elastic", "1:3", "--", sys.executable, "-c", f"{late}WAITS = {{}}\n{TRAIN}"
    ) as run:
        while len(workers_of(run)) < 2:
            time.sleep(0.01)
        assert resize(run, 3)[0] == 0
        check(run)


def test_without_an_elastic_job_there_is_nothing_to_resize() -> None:
    ended = CliRunner().invoke(app, ["resize", "1", "2"])
    text = "no elastic job of yours has process 1; expected the id that `gangline launch` printed"
    assert str(ended.exception) == text


# Restarts of single processes meanwhile


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "server 0 kill at update 14",
        "server 0 kill at push-taken 9; server 1 kill at close 17",
        "server 1 kill at values 13; server 1.1 kill at update 3",
        "worker 1 kill at push-sent 11",
        "worker 1 kill at push-sent 13; server 0 kill at close 15",
        "server 0 kill at view 1; server 1 kill at view 2",
        "server 0 kill at view 4",
        "worker 1 kill at view 1; worker 1.1 kill at view 2",
        "worker 1 kill at view 3; server 1 kill at view 3",
        "worker 2 kill at view 1; worker 2.1 kill at push-sent 3",
        "worker 2 kill at view 2",
        "worker 2 kill at view 4",
    ],
)
def test_weights_are_those_of_one_process_though_workers_change(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script_processes(monkeypatch, script)
    with job({4: [0, 1, 2], 9: [0, 1]}, "--elastic", "1:3", "--restart-processes", "3") as run:
        run.hear("at 4")
        assert resize(run, 3)[0] == 0
        run.hear("at 9")
        assert resize(run, 2)[0] == 0
        errors = check(run, 90)
    assert sum("it starts again" in line for line in errors) == script.count("kill")
