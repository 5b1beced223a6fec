"""Gathers of accelerate in loops over a balanced loader."""

from __future__ import annotations

import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gangline
from tests.integrations.trainers import told


def gathers(folder: str) -> list[Any]:
    del folder
    from accelerate import Accelerator
    from accelerate.utils import operations

    plain = operations._gpu_gather
    accelerator = Accelerator(cpu=True)
    numbers = TensorDataset(torch.arange(1.0, 26.0).reshape(-1, 1))
    model, train, whole = accelerator.prepare(nn.Linear(1, 1), DataLoader(numbers, 4), DataLoader(numbers, 13))
    found: list[Any] = []
    with gangline.balance(model, train, loads=[3, 1], global_batch=12) as loader:
        for (x,) in loader:
            own = x[: loader.samples].flatten().tolist()
            found.append([accelerator.gather_for_metrics(x).flatten().tolist(), own])
            loss = x.mean() if loader.samples else torch.tensor(torch.nan)
            found[-1].append(accelerator.reduce({"loss": loss}, "mean")["loss"].item())
            for (y,) in whole:
                found[-1].append(len(accelerator.gather(y)))  # an evaluation has no repeated samples
        found.append(len(accelerator.gather(torch.zeros(2 + accelerator.process_index))))
        assert accelerator.reduce(torch.tensor(1.0 + accelerator.process_index), "mean") == 1.5
    assert operations._gpu_gather is plain
    return found


def evaluations(folder: str) -> list[Any]:
    del folder
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    numbers = TensorDataset(torch.arange(1.0, 26.0).reshape(-1, 1))
    train_data, short = DataLoader(numbers, 4), DataLoader(TensorDataset(numbers.tensors[0][:9]), 2)
    model, train, whole, few = accelerator.prepare(nn.Linear(1, 1), train_data, DataLoader(numbers, 4), short)
    found: list[Any] = []

    def gathered(loader: Any) -> list[list[float]]:
        return [accelerator.gather_for_metrics(x).flatten().tolist() for (x,) in loader]

    with gangline.balance(model, train, loads=[3, 1]) as loader:
        for (x,) in loader:
            found.append([gathered(loader.evaluation(whole)), len(accelerator.gather(x))])
        found.append(gathered(loader.evaluation(whole, lengths=list(range(25)))))
        kept = loader.evaluation(few)
        found.append([gathered(kept), gathered(kept)])
        for wrong in (few, train):
            with pytest.raises(ValueError, match="the loader is balanced already; iterate what"):
                loader.evaluation(wrong)
    return [*found, gathered(whole)]


def test_evaluation_returns_each_sample_once_in_order(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    whole = [list(range(begin, min(begin + 8, 26))) for begin in (1, 9, 17)]
    whole[2:] = [[*range(17, 24)], [24, 25]]  # the last one has a sample for each rank
    few = [[1, 2, 3, 4], [5, 6, 7], [8, 9]]
    *steps, by_cost, kept, plain = told(evaluations, tmp_path)[1]
    assert steps == [[whole, 8], [whole, 8], [whole, 8], [whole, 1]]
    assert by_cost == whole
    assert kept == [few, few]
    assert sum(map(sum, plain)) == sum(range(1, 26))


def reductions(folder: str) -> list[Any]:
    """Return the reduced losses of three batches, by what loop divides its loss."""
    del folder
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    numbers, found = TensorDataset(torch.arange(1.0, 25.0).reshape(-1, 1)), []
    for options in (
        {"count": lambda batch: (batch[0] % 3 > 0).sum(), "accumulate": 2},
        {"loss_reduction": "normalized"},
    ):
        model, train = accelerator.prepare(nn.Linear(1, 1), DataLoader(numbers, 4))
        with gangline.balance(model, train, loads=[3, 1], **options) as loader:  # type: ignore[arg-type]
            for (x,) in loader:
                counts = (x % 3 > 0) if "count" in options else torch.ones_like(x)
                divisor = counts.sum() if "count" in options else torch.tensor(8.0) / 2  # of all ranks, averaged
                found.append(accelerator.reduce((x * counts).sum() / divisor, "mean").item())
    return found


def test_reduced_losses_are_means_over_the_global_batch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    expected = [27 / 6, 64 / 5, 101 / 5, 4.5, 12.5, 20.5]
    assert told(reductions, tmp_path) == [pytest.approx(expected)] * 2


def test_gathers_of_one_value_for_each_sample_return_the_global_batch(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    batches = [list(range(1, 13)), list(range(13, 25)), [25]]
    for ends, found in zip(([9, 9, 1], [0, 0, 0]), told(gathers, tmp_path), strict=True):
        for batch, end, (rows, own, mean, size) in zip(batches, ends, found[:-1], strict=True):
            assert rows == batch
            assert mean == sum(batch) / len(batch)
            assert own == (batch[:end] if ends[0] else batch[9:])
            assert size == 26
        assert found[-1] == 5


def reads_ahead(folder: str) -> dict[str, Any]:
    """Return what loops see over loaders of accelerate, which have read the next batch when a batch is trained."""
    del folder
    from accelerate import Accelerator

    accelerator, found = Accelerator(cpu=True), {}
    is_slow = accelerator.process_index == 1
    numbers = TensorDataset(torch.arange(1.0, 193.0).reshape(-1, 1))
    model, short, long = accelerator.prepare(nn.Linear(1, 1), DataLoader(numbers, 4), DataLoader(numbers, 4))
    with gangline.balance(model, short, loads=[3, 1]) as loader:
        found["trained"] = []
        for (x,) in loader:
            model(x).mean().backward()
            found["trained"].append(x[0].item())
            if is_slow and len(found["trained"]) == 3:
                loader.stop()
    accelerator.gradient_accumulation_steps = 2
    with gangline.balance(model, short, loads=[3, 1], lengths=[1] * 192) as loader:
        found["ends"] = [loader.ends_update for _ in loader]
    accelerator.gradient_accumulation_steps = 1
    found["measured"] = []
    with gangline.balance(model, long) as loader:
        balance = loader._balance

        def note(costs: Any, seconds: Any, record: Any = balance._speeds.record) -> bool:
            found["measured"].append([list(map(int, costs)), balance.split.counts(8)])
            is_new: bool = record(costs, seconds)
            return is_new

        balance._speeds.record = note  # type: ignore[method-assign]
        for (x,) in loader:
            time.sleep(len(x) * (0.033 if is_slow else 0.011))
            model(x).mean().backward()
    return found


def test_loops_of_loaders_that_read_one_batch_ahead(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    fast, slow = told(reads_ahead, tmp_path)
    assert fast["trained"] == [1, 9, 17]  # stop() ends the epoch after the current batch
    assert slow["trained"] == [7, 15, 23]
    assert fast["ends"] == slow["ends"] == [False, True] * 12  # accelerate accumulates 2 batches
    assert len([*groupby(split for _, split in fast["measured"])]) > 1, fast["measured"]
    for shares, split in fast["measured"]:  # no time of shares that were read before the split changed
        assert shares == split, fast["measured"]
