"""Elastic jobs with restarts of single processes: a server or a worker starts again while workers come and go."""

from __future__ import annotations

import re
import sys

import pytest

from tests.kvstore.test_launch import Launch, launch
from tests.kvstore.test_launch_elastic import resize

pytestmark = [pytest.mark.timeout(110), pytest.mark.slow]

TRAIN = """\
import time, torch, gangline
torch.set_num_threads(1)
DATA = torch.randn(60, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LABEL = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(2))
def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 400), torch.nn.Tanh(), torch.nn.Linear(400, 3)).double()
def train(optimizer, kvstore, waits):
    model, mean = network(), torch.nn.CrossEntropyLoss()
    trainer = gangline.Trainer(model, *optimizer, kvstore=kvstore)
    kv = trainer.kvstore
    batches = gangline.data.ElasticBatches(len(DATA), 16, kv, epochs=4)
    for indices in batches:
        if kv.rank == 0 and batches.step in waits:
            print("at", batches.step, flush=True)
            while sorted(kv._scheduler.views[-1][1]) != waits[batches.step]:
                time.sleep(0.005)
        trainer.zero_grad()
        if len(indices):
            mean(model(DATA[indices]), LABEL[indices]).backward()
        trainer.step(len(indices))
    if kv.rank == 0:
        kv.pull(list(trainer._parameters), [one.data for one in trainer._parameters.values()])
    rank = kv.rank
    kv.close()
    return rank, batches.step, [one.detach() for one in model.parameters()]
OPTIMIZER = "adam", {"learning_rate": 0.01}
rank, step, weights = train(OPTIMIZER, "dist_sync", WAITS)
if rank == 0:
    _, _, alone = train(OPTIMIZER, gangline.create("device"), {})
    worst = max(float((a - b).norm() / b.norm()) for a, b in zip(weights, alone))
    print(f"steps {step + 1}, relative difference {worst:.1e}", flush=True)
"""
STEPS = 16


def job(waits: dict[int, list[int]], *words: str) -> Launch:
    return launch("-n", "2", "-s", "2", *words, "--", sys.executable, "-c", f"WAITS = {waits}\n{TRAIN}")


def check(out: list[str], errors: list[str]) -> None:
    (found,) = [re.search(r"steps (\d+), relative difference (\S+)", line) for line in out if "relative" in line]
    assert found is not None
    assert int(found[1]) == STEPS, errors
    assert float(found[2]) < 1e-11


@pytest.mark.parametrize(
    "script",
    [
        "",
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
    monkeypatch.setenv("GANGLINE_FAULT", script)
    words = ("--restart-processes", "3") if script else ()
    with job({4: [0, 1, 2], 9: [0, 1]}, "--elastic", "1:3", *words) as run:
        run.hear("at 4")
        assert resize(run, 3)[0] == 0
        run.hear("at 9")
        assert resize(run, 2)[0] == 0
        status, out, errors = run.end(90)
    assert status == 0, errors
    assert sum("it starts again" in line for line in errors) == script.count("kill")
    check(out, errors)
