"""`gangline.balance(loads="auto")` in real jobs whose last rank has less CPU time than the others, and its limits."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, spawn, torch_backend
from gangline.bench.unequal.rank_program import network
from gangline.bench.unequal.slow_process import CrowdedProcess, SlowProcess, slow_process

CORES = sorted(os.sched_getaffinity(0))
BATCH = 16  # samples of each rank in the equal split

needs_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs a core for each of 2 ranks")


def join(comm: Communicator, path: str) -> None:
    assert torch_backend
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
    os.sched_setaffinity(0, {CORES[comm.rank % len(CORES)]})
    torch.manual_seed(3)


@contextmanager
def limited(comm: Communicator) -> Iterator[SlowProcess | None]:
    """Return the last rank's limit of CPU time; None on the others."""
    if comm.rank < comm.size - 1:
        yield None
        return
    process = slow_process(os.getpid(), CORES[comm.rank % len(CORES)])
    try:
        yield process
    finally:
        process.close()


def images(batches: int) -> TensorDataset:
    samples = 2 * BATCH * batches
    return TensorDataset(torch.rand(samples, 3, 16, 16), torch.arange(samples) % 10)


def wrapped(kind: str) -> nn.Module:
    if kind == "FSDP2":
        model = network()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.children():
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(network()) if kind == "DDP" else network()


def train(model: nn.Module, loader: Any, steps: int | None = None) -> list[list[int]]:
    """Train an epoch, or its first steps; return the split of each batch."""
    shares = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for data, label in loader:
        optimizer.zero_grad()
        cross_entropy(model(data), label).backward()
        if type(model) is nn.Sequential:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        shares.append(loader.shares)
        if len(shares) == steps:
            break
    return shares


def splits_of_kinds(comm: Communicator, path: str) -> dict[str, list[int]]:
    join(comm, path)
    found = {}
    models = {kind: wrapped(kind) for kind in ("DDP", "FSDP2", "plain")}
    for model in models.values():
        model(torch.rand(1, 3, 16, 16)).sum().backward()  # imports
    with limited(comm) as slow:
        if slow is not None:
            slow.slow_down(6)
        for kind, model in models.items():
            loader = gangline.balance(model, DataLoader(images(40), BATCH))
            shares = train(model, loader)
            assert shares[0] == [BATCH, BATCH]
            found[kind] = shares[-1]
            loader.close()
    dist.destroy_process_group()
    return found


@pytest.mark.slow
@needs_cores
def test_a_rank_with_less_cpu_time_gets_a_smaller_share_under_every_wrapper(tmp_path: Path) -> None:
    first, last = spawn(splits_of_kinds, 2, str(tmp_path / "store"), threads=1)
    assert first == last
    for kind, (fast, slow) in first.items():
        assert fast + slow == 2 * BATCH, kind
        assert 1 <= slow < BATCH, (kind, slow)


def becomes_slow(comm: Communicator, path: str) -> list[list[list[int]]]:
    join(comm, path)
    model = wrapped("DDP")
    loader = gangline.balance(model, DataLoader(images(9), BATCH))
    with limited(comm) as slow:
        epochs = [train(model, loader)]
        if slow is not None:
            slow.slow_down(6)
        epochs += [train(model, loader) for _ in range(4)]
    dist.destroy_process_group()
    return epochs


@needs_cores
@pytest.mark.slow
def test_a_rank_that_becomes_slow_is_balanced(tmp_path: Path) -> None:
    first, last = spawn(becomes_slow, 2, str(tmp_path / "store"), threads=1)
    assert first == last
    assert [len(epoch) for epoch in first] == [9] * 5
    assert first[-1][-1][1] < BATCH


def equal_ranks(comm: Communicator, path: str) -> list[int]:
    join(comm, path)
    model = wrapped("DDP")
    loader = gangline.balance(model, DataLoader(images(70), BATCH))
    shares = [train(model, loader)[-1] for _ in range(2)]
    dist.destroy_process_group()
    return shares[-1]


@needs_cores
@pytest.mark.slow
def test_equal_ranks_stay_near_the_equal_split(tmp_path: Path) -> None:
    first, last = spawn(equal_ranks, 2, str(tmp_path / "store"), threads=1)
    assert first == last
    assert first[0] == pytest.approx(BATCH, abs=3)


def competing(comm: Communicator, path: str) -> list[int]:
    join(comm, path)
    model = wrapped("DDP")
    loader = gangline.balance(model, DataLoader(images(50), BATCH))
    crowd = CrowdedProcess(CORES[1])
    try:
        if comm.rank == 1:
            crowd.slow_down(6)
        shares = train(model, loader)
    finally:
        crowd.close()
    dist.destroy_process_group()
    return shares[-1]


@needs_cores
@pytest.mark.slow
def test_a_rank_on_a_crowded_core_gets_a_smaller_share(tmp_path: Path) -> None:
    first, last = spawn(competing, 2, str(tmp_path / "store"), threads=1)
    assert first == last
    assert first[1] < BATCH


def test_the_split_and_its_gain_are_logged_by_rank_0(tmp_path: Path) -> None:
    first, last = spawn(logged, 2, str(tmp_path / "store"), threads=1)
    assert last == []
    assert first[0].startswith(("balance: rank 0 ", "balance: the split stays equal, rank 0 "))
    assert " of 32 samples (alone " in first[0]
    assert " samples/s); expected step " in first[0]
    assert " ms, equal split " in first[0]


def logged(comm: Communicator, path: str) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gangline")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    join(comm, path)
    model = wrapped("DDP")
    train(model, gangline.balance(model, DataLoader(images(20), BATCH)))
    dist.destroy_process_group()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return [line for line in lines if line.startswith("balance: ")]


def decodes_slowly(comm: Communicator, path: str) -> list[int]:
    join(comm, path)
    model = wrapped("DDP")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = gangline.balance(model, DataLoader(images(30), BATCH))
    for data, label in loader:
        if comm.rank == 1:
            time.sleep(0.05 * len(data))
        optimizer.zero_grad()
        cross_entropy(model(data), label).backward()
        optimizer.step()
        shares = loader.shares
    dist.destroy_process_group()
    return shares


@pytest.mark.slow
def test_a_rank_whose_loop_is_slow_outside_of_the_model_gets_a_smaller_share(tmp_path: Path) -> None:
    first, last = spawn(decodes_slowly, 2, str(tmp_path / "store"), threads=1)
    assert first == last
    assert 1 <= first[1] < 2 * BATCH / 3


class Normalized(nn.Sequential):
    """A network that cannot train on one sample."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.BatchNorm1d(3 * 16 * 16), nn.Linear(3 * 16 * 16, 10))


def trains_with_batchnorm(comm: Communicator, path: str) -> list[list[int]]:
    join(comm, path)
    model = DistributedDataParallel(Normalized())
    data = TensorDataset(torch.rand(2 * BATCH + 4, 3, 16, 16), torch.arange(2 * BATCH + 4) % 10)
    shares = train(model, gangline.balance(model, DataLoader(data, BATCH), loads=[31, 1]))
    dist.destroy_process_group()
    return shares


def test_no_rank_gets_a_single_sample_if_the_network_normalizes_batches(tmp_path: Path) -> None:
    for shares in spawn(trains_with_batchnorm, 2, str(tmp_path / "store"), threads=1):
        assert shares == [[30, 2], [2, 2]]


# -- memory -----------------------------------------------------------------------------------------------------------


def given_limits(comm: Communicator, path: str, memory: list[int]) -> str | list[int]:
    join(comm, path)
    model = wrapped("DDP")
    try:
        loader = gangline.balance(model, DataLoader(images(4), BATCH), loads=[1, 1], memory=memory)
        return train(model, loader)[-1]
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        ([100, 5], [27, 5]),
        ([10, 5], "memory is [10, 5], together 15 samples; expected the global batch of 32 or more: raise them, or "),
        ([10], "memory is [10]; expected a maximum number of samples for each of 2 ranks, 1 or more"),
    ],
)
@pytest.mark.slow
def test_limits_that_are_given_hold(memory: list[int], found: str | list[int], tmp_path: Path) -> None:
    for answer in spawn(given_limits, 2, str(tmp_path / "store"), memory, threads=1):
        assert answer == found or (isinstance(found, str) and isinstance(answer, str) and answer.startswith(found))
