"""Fronts of a job over servers of which a worker is killed and started again, enters or leaves."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gangline import Module
from gangline.kvstore import create
from gangline.kvstore.parameter_server.store import DistStore
from gangline.models.loop.callbacks import BatchEndParam
from tests.fronts.fronts import FRONTS, SITUATIONS, Batch, Options, Place, Plain, Step, batch, play
from tests.kvstore.parameter_server import test_elastic, test_restarted_servers

pytestmark = pytest.mark.timeout(110)
STEPS = 6
PLAIN = play(Plain, SITUATIONS["first start"], Place())
ALONE = "was started again alone, and {} cannot be continued by one worker"
RESTARTED = {
    ("Trainer", "kept"): "",
    ("Trainer.backward", "kept"): "",
    ("gluon", "kept"): "",
    ("Module", "kept"): "",
    ("Module, 2 contexts", "kept"): "",
    ("KVStore", "kept"): "",
    ("Trainer", "not kept"): ALONE.format("training by a Trainer whose loop does not call kept()"),
    ("Trainer", "kept nothing"): ALONE.format("training of which nothing was kept"),
    ("gluon", "not kept"): ALONE.format("training by a Trainer whose loop does not call kept()"),
    ("Module", "not kept"): ALONE.format("training by a Module without fit"),
    ("DistributedOptimizer", "not kept"): ALONE.format("a DistributedOptimizer"),
}
"""Errors of fronts whose worker 1 is killed in step 3; without one it goes on as if nothing had happened."""
FAST = [("Trainer", "not kept"), ("DistributedOptimizer", "not kept"), ("Module", "kept")]


def is_close(weights: Any) -> bool:
    assert PLAIN is not None
    return max(abs(found - plain) for found, plain in zip(weights, PLAIN, strict=True)) <= 1e-12


def restarted(name: str, keeps: str) -> list[float] | str | None:
    rank = int(os.environ["DMLC_WORKER_ID"])
    with create("dist_sync") as store:
        try:
            front = FRONTS[name](Options(), Place(rank, 2, lambda: store))
            for step in range(0 if keeps == "not kept" else front.kept(), STEPS):
                if keeps == "kept":
                    front.keep(step)
                if (rank, step, os.environ.get("GANGLINE_INCARNATION")) == (1, 3, "0"):
                    os.kill(os.getpid(), signal.SIGKILL)
                front.step(Step((batch(step),)))
            return front.weights()
        except Exception as error:  # noqa: BLE001  the table says which
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("front", "keeps"),
    [pytest.param(*cell, marks=[] if cell in FAST else pytest.mark.slow) for cell in RESTARTED],
)
def test_a_restarted_worker_goes_on_or_fails_the_job_by_name(front: str, keeps: str, tmp_path: Path) -> None:
    text = RESTARTED[front, keeps]
    run = partial(test_restarted_servers.run, victim="worker 1", keeps=True)
    found = run(tmp_path, ["leave 99"], restarted, front, keeps)
    for outcome in found:
        if text:
            assert isinstance(outcome, str), outcome
            assert re.match(rf"(RuntimeError|DeadNodeError): .*{re.escape(text)}", outcome), outcome
        else:
            assert isinstance(outcome, list), outcome
            assert is_close(outcome), outcome


def fitted(kvstore: str = "dist_sync") -> tuple[list[tuple[int, int]], list[float]]:
    """Return epoch and number of each batch that this worker has trained since its last start, and the weights."""
    rank, is_first_start = os.environ.get("DMLC_WORKER_ID"), os.environ.get("GANGLINE_INCARNATION") == "0"
    data = torch.arange(48, device="cpu").reshape(24, 2).double() / 48
    trained: list[tuple[int, int]] = []

    def follow(param: BatchEndParam) -> None:
        trained.append((param.epoch, param.nbatch))
        if is_first_start and (rank, *trained[-1]) == ("1", 1, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    with create(kvstore) as store, Module(nn.Linear(2, 1).double(), nn.MSELoss()) as module:
        module.fit((data, data[:, :1]), num_epoch=3, batch_size=8, seed=1, kvstore=store, batch_end_callback=follow)
        return trained, module.get_params()["weight"].flatten().tolist()


def test_a_restarted_worker_goes_on_in_fit_where_it_was_killed(tmp_path: Path) -> None:
    """Each epoch has 3 batches; worker 1 is killed after the second one of the second epoch."""
    whole, goes_on = test_restarted_servers.run(tmp_path, ["leave 99"], fitted, victim="worker 1", keeps=True)
    batches, weights = fitted("local")
    assert whole == (batches, goes_on[1])
    assert goes_on[0] == batches[4:]  # it repeats the batch, whose gradient counts once
    assert goes_on[1] == pytest.approx(weights, abs=1e-12)


NOT_ELASTIC = "is not possible in an elastic job; use gangline launch --max-restarts without --elastic"
ELASTIC = {"Trainer": "", "DistributedOptimizer": NOT_ELASTIC, "Module": NOT_ELASTIC}


def elastic(store: DistStore, folder: Path, steps: int, plan: test_elastic.Plan, name: str = "") -> Any:
    try:
        front = FRONTS[os.environ["FRONT"]](Options(), Place(0, 2, lambda: store))
        for number in range(store.first_step, steps):
            for words in plan.get((store.rank, number), "").split(", "):
                test_elastic.act(store, folder, words)
            share = store.share(4, number)
            if share is None:
                return None
            data, label, _ = batch(number)
            front.step(Step((Batch(data[share], label[share], (share.stop - share.start, 0)),)))
        return front.weights()
    except Exception as error:  # noqa: BLE001  the table says which
        return f"{type(error).__name__}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize("front", ELASTIC)
def test_workers_enter_and_leave_or_the_job_is_refused_by_name(front: str, tmp_path: Path) -> None:
    plan = {} if ELASTIC[front] else {(0, 2): "start 2, until 0+1+2", (1, 4): "leave"}
    for outcome in test_elastic.run(tmp_path, 2, len(plan) // 2, plan, STEPS, body=elastic, FRONT=front):
        if ELASTIC[front]:
            assert isinstance(outcome, str), outcome
            assert re.search(ELASTIC[front], outcome), outcome
        else:
            assert not isinstance(outcome, str), outcome
            assert outcome is None or is_close(outcome), outcome
