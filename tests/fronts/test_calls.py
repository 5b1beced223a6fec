"""Python calls of gangline in a training step, which are most of the time of a small one."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, spawn
from tests.models.unequal_jobs import join

PACKAGE = str(Path(gangline.__file__).parent)
STEPS, COUNTED = 30, 20  # the first steps form buckets, and look at labels and for writes
LIMITS = {"balance, step": 80, "balance, next": 30, "Trainer": 120, "Module": 350, "Module, auto": 360}
"""Calls of a step in all threads, with 6 parameters; 57, 30, 94, 248 and 354 when this was written."""
X, Y = torch.ones(8, 4), torch.arange(8) % 3


class Calls:
    """Records the functions of the package that the last steps run, in this thread and in those that start later."""

    def __init__(self) -> None:
        self.step = 0
        self.made: list[list[str]] = []

    def __enter__(self) -> Calls:
        gc.disable()  # other packages' callbacks are Python functions
        threading.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        gc.enable()

    def of(self, run: Callable[[], Any]) -> Any:
        self.step += 1
        if self.step <= STEPS - COUNTED:
            return run()
        self.made.append([])
        sys.setprofile(self._see)
        try:
            return run()
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self.made and frame.f_code.co_filename.startswith(PACKAGE):
            self.made[-1].append(frame.f_code.co_qualname)

    @property
    def fewest(self) -> list[str]:
        """Calls of that one of these steps in which no thread waited for another."""
        return min(self.made, key=len)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))


def balanced(comm: Communicator, path: str) -> dict[str, list[str]]:
    join(comm, path)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = gangline.balance(model, DataLoader(TensorDataset(X.repeat(99, 1), Y.repeat(99)), 4), loads=[3, 1])
    batches: Iterator[list[Tensor]] = iter(loader)
    with Calls() as of_next, Calls() as of_step:
        for _ in range(STEPS):
            x, y = of_next.of(lambda: next(batches))
            loss = nn.functional.cross_entropy(model(x), y)
            of_step.of(lambda loss=loss: (loss.backward(), optimizer.step()))
    loader.close()
    dist.destroy_process_group()
    return {"balance, step": of_step.fewest, "balance, next": of_next.fewest}


def of_trainer() -> list[str]:
    model = network()
    trainer = gangline.Trainer(model, "sgd", {"lr": 0.1}, "local")
    with Calls() as calls:
        for _ in range(STEPS):
            trainer.zero_grad()
            loss = nn.functional.cross_entropy(model(X), Y)
            calls.of(lambda loss=loss: (loss.backward(), trainer.step(8)))  # type: ignore[misc]
    return calls.fewest


def of_module(work_load_list: Any) -> list[str]:
    with (
        Calls() as calls,
        gangline.Module(network(), nn.CrossEntropyLoss(), ["cpu(0)", "cpu(1)"], work_load_list) as module,
    ):
        module.init_optimizer("device", "sgd", {"lr": 0.1})
        for _ in range(STEPS):
            calls.of(lambda: module.forward_backward_update(X, Y))
    return calls.fewest


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    return spawn(balanced, 2, str(tmp_path_factory.mktemp("job") / "store"), threads=1)


@pytest.mark.parametrize("name", LIMITS)
def test_a_step_makes_few_python_calls(
    name: str, of_ranks: list[dict[str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gangline.models.balance.speed_model._MIN_SECONDS", 0.0)  # each step may change the split
    if name.startswith("balance"):
        calls = min((each[name] for each in of_ranks), key=len)
    elif name == "Trainer":
        calls = of_trainer()
    else:
        calls = of_module([3, 1] if name == "Module" else "auto")
    assert 20 < len(calls) <= LIMITS[name], calls
