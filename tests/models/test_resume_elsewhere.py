"""Resume in mid-epoch with other contexts or workers: each sample is trained on exactly once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import distance, labelled, mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gangline import Module, cpu
from gangline.callback import Checkpoint
from gangline.collectives.communicator import Communicator
from gangline.collectives.processes.spawning import spawn
from gangline.kvstore import create
from gangline.models.checkpoint import checkpoint
from tests.kvstore.parameter_server.processes import run_job

SAMPLES, BATCH, EPOCHS = 23, 2, 2
BATCHES = 12
Params = dict[str, torch.Tensor]
network = partial(mlp, 4, 6, 3, seed=1)


class Recorded(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Dataset that records which samples are read."""

    def __init__(self) -> None:
        self.data, self.label = labelled(SAMPLES, 4, 3, dtype=torch.float64)
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(int(index))
        return self.data[index], self.label[index]


def part(
    prefix: str, resume: str | None, updates: int | None, contexts: int, store: Any, accumulate: int, loader: bool
) -> tuple[list[int], Params, str]:
    """Resume for a number of updates (None: to the end); return the samples read, in order, and the weights."""
    data, done = Recorded(), 0
    torch.manual_seed(5)  # a DataLoader draws from it

    def stop(_: Any) -> bool:
        nonlocal done
        done += 1
        return done == updates

    with Module(network(), nn.CrossEntropyLoss(), [cpu(i) for i in range(contexts)]) as module:
        reason = module.fit(
            DataLoader(data, batch_size=BATCH, shuffle=True) if loader else data,
            num_epoch=EPOCHS,
            batch_size=None if loader else BATCH,
            seed=3,
            eval_metric="loss",
            kvstore=store,
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
            batch_end_callback=stop,
            epoch_end_callback=Checkpoint(module, prefix, period=100),
            resume=resume,
            accumulate=accumulate,
        )
        return data.read, module.get_params(), reason


def part_of_a_worker(comm: Communicator, *arguments: Any) -> Any:
    with create("allreduce", communicator=comm) as store:
        prefix, resume, updates, contexts, _, *rest = arguments
        return part(prefix, resume, updates, contexts, store, *rest)


def parts(kind: str, *arguments: Any) -> list[Any]:
    """Return each worker's result: "2 workers" over collectives, "2 of servers", or "3 contexts" in this process."""
    number, _, what = kind.partition(" ")
    prefix, resume, updates, *rest = arguments
    if what == "workers":
        return spawn(part_of_a_worker, int(number), prefix, resume, updates, 1, None, *rest)
    if what == "of servers":
        return run_job(part, int(number), 1, prefix, resume, updates, 1, "dist_sync", *rest)
    return [part(prefix, resume, updates, int(number), "device", *rest)]


CHAINS = [
    ["1 contexts", "2 workers", "3 contexts"],
    ["3 contexts", "1 workers", "2 workers"],
    ["2 workers", "3 workers", "1 contexts"],
    ["1 contexts", "2 of servers", "2 workers"],
]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kinds", CHAINS, ids=", ".join)
def test_each_sample_of_an_epoch_is_trained_on_once(tmp_path: Path, kinds: list[str], accumulate: int) -> None:
    prefix = str(tmp_path / "net")
    first = parts(kinds[0], prefix, None, 1, accumulate, False)
    assert [found[2] for found in first] == ["callback"] * len(first)
    between = checkpoint.read(prefix, 0).position["batch"]
    second = parts(kinds[1], prefix, "auto", 1, accumulate, False)
    then = checkpoint.read(prefix, 0).position["batch"]
    assert 0 < between < then < BATCHES
    third = parts(kinds[2], prefix, "auto", None, accumulate, False)
    read, weights, _ = part(str(tmp_path / "whole"), None, None, 1, None, accumulate, False)
    for run, begin, end in ((first, 0, between), (second, between, then), (third, then, 2 * BATCHES)):
        of_run = [index for found in run for index in found[0]]
        expected = read[begin * BATCH : end * BATCH if end <= BATCHES else len(read)]
        assert sorted(of_run) == sorted(expected), (begin, end)
    assert sorted(read[:SAMPLES]) == list(range(SAMPLES))
    assert all(distance(found[1], weights) <= 1e-11 for found in third)


def test_a_shuffling_loader_resumes_with_other_contexts(tmp_path: Path) -> None:
    prefix = str(tmp_path / "net")
    [(first, _, _)] = parts("1 contexts", prefix, None, 2, 1, True)
    [(second, _, _)] = parts("3 contexts", prefix, "auto", 3, 1, True)
    [(third, weights, _)] = parts("2 contexts", prefix, "auto", None, 1, True)
    [(whole, expected, _)] = parts("1 contexts", str(tmp_path / "whole"), None, None, 1, True)
    assert first + second + third == whole
    assert sorted(whole[:SAMPLES]) == list(range(SAMPLES))
    assert distance(weights, expected) <= 1e-11


def refused(comm: Communicator, prefix: str) -> str:
    with pytest.raises(ValueError, match="2 batches into an epoch of 1 workers with batches of their own") as caught:
        part_of_a_worker(comm, prefix, "auto", None, 1, None, 1, True)
    return str(caught.value)


def test_loaders_of_workers_of_their_own_do_not_go_on_with_other_workers(tmp_path: Path) -> None:
    prefix = str(tmp_path / "net")
    parts("1 contexts", prefix, None, 2, 1, True)
    first, second = spawn(refused, 2, prefix)
    assert first == second
