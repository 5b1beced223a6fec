"""`gangline.balance(loads="auto")` in real jobs whose last rank has less CPU time than the others, and its limits."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from measure import gangline_lines
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, spawn, torch_backend
from gangline.bench.unequal.slow_process import CrowdedProcess, SlowProcess, slow_process
from gangline.bench.workload.networks import convolutions
from gangline.models.balance import speed_model

speed_model._MIN_SECONDS = 0.0  # in processes of jobs

CORES = sorted(os.sched_getaffinity(0))
BATCH = 16  # samples of each rank in the equal split

needs_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs a core for each of 2 ranks")


def join(comm: Communicator, path: str) -> None:
    assert torch_backend
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size)
    os.sched_setaffinity(0, {CORES[comm.rank % len(CORES)]})
    torch.manual_seed(3)


@contextmanager
def limited(comm: Communicator, how: str) -> Iterator[SlowProcess | CrowdedProcess | None]:
    """Return what slows the last rank down; None on the others, and if nothing does."""
    if comm.rank < comm.size - 1 or how not in ("limit", "crowd"):
        yield None
        return
    core = CORES[comm.rank % len(CORES)]
    process = slow_process(os.getpid(), core) if how == "limit" else CrowdedProcess(core)
    try:
        yield process
    finally:
        process.close()


def images(batches: int, pixels: int = 16) -> TensorDataset:
    samples = 2 * BATCH * batches
    return TensorDataset(torch.rand(samples, 3, pixels, pixels), torch.arange(samples) % 10)


def wrapped(kind: str) -> nn.Module:
    if kind == "FSDP2":
        model = convolutions()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.children():
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(convolutions())


def train(model: nn.Module, loader: Any, pause: float = 0.0) -> list[list[int]]:
    """Train an epoch with so many seconds of other work for each sample; return the split of each batch."""
    shares = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for data, label in loader:
        time.sleep(pause * len(data))
        optimizer.zero_grad()
        cross_entropy(model(data), label).backward()
        optimizer.step()
        shares.append(loader.shares)
    return shares


def trained(
    comm: Communicator, path: str, kind: str, batches: int, epochs: int, slow_from: int, how: str
) -> tuple[list[list[list[int]]], float]:
    """Train epochs of which one begins to be slow on the last rank; return the splits of each.

    Returns:
        The splits, and the share of its time in which this rank was ready to run, but had no core.
    """
    join(comm, path)
    before = run_and_waited()
    if how == "equal":
        speed_model._MIN_SECONDS = 1.0  # as of users
    model = wrapped(kind)
    model(torch.rand(1, 3, 16, 16)).sum().backward()  # imports
    # A step costs a slow rank up to 70 ms whatever its share, and two batches decide; the samples are to cost more.
    loader = gangline.balance(model, DataLoader(images(batches, 32 if how == "limit" else 16), BATCH))
    found = []
    with limited(comm, how) as slow:
        for epoch in range(epochs):
            if slow is not None and epoch == slow_from:
                slow.slow_down(6)
            found.append(train(model, loader, 0.05 if how == "other work" and comm.rank else 0.0))
    loader.close()
    dist.destroy_process_group()
    run, waited = (after - since for after, since in zip(run_and_waited(), before, strict=True))
    return found, waited / (run + waited)


def run_and_waited() -> tuple[int, int]:
    """Return the nanoseconds in which this thread ran, and in which it waited for a core."""
    run, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return int(run), int(waited)


@pytest.mark.slow
@needs_cores
@pytest.mark.parametrize(
    ("kind", "batches", "epochs", "slow_from", "how", "at_least", "below"),
    [
        ("DDP", 40, 1, 0, "limit", 1, BATCH),
        ("FSDP2", 40, 1, 0, "limit", 1, BATCH),
        ("DDP", 9, 5, 1, "limit", 1, BATCH),
        ("DDP", 50, 1, 0, "crowd", 1, BATCH),
        ("DDP", 30, 1, 0, "other work", 1, 2 * BATCH / 3),
        ("DDP", 70, 2, 0, "equal", BATCH - 3, BATCH + 4),
    ],
)
def test_the_share_of_a_rank_follows_its_speed(
    kind: str, batches: int, epochs: int, slow_from: int, how: str, at_least: int, below: float, tmp_path: Path
) -> None:
    ranks = spawn(trained, 2, str(tmp_path / "store"), kind, batches, epochs, slow_from, how, threads=1)
    (first, _), (last, _) = ranks
    most, waited = (0.1, max(share for _, share in ranks)) if how == "equal" else (0.3, ranks[0][1])
    if waited > most:
        pytest.skip(f"the ranks are not as fast as they should be: one waited {waited:.0%} of its time for a core")
    assert first == last
    assert [len(epoch) for epoch in first] == [batches] * epochs
    assert first[0][0] == [BATCH, BATCH]
    fast, slow = first[-1][-1]
    assert fast + slow == 2 * BATCH
    assert at_least <= slow < below


def test_the_split_and_its_gain_are_logged_by_rank_0(tmp_path: Path) -> None:
    first, last = spawn(logged, 2, str(tmp_path / "store"), threads=1)
    assert last == []
    kept = r"the split stays equal so far, (\d of 8 measurements|no other gains more than .*, the error of .*): "
    assert re.match(f"balance: ({kept})?rank 0 ", first[0])
    assert " of 32 samples (" in first[0]
    assert " samples/s); expected step " in first[0]
    assert " ms, equal split " in first[0]


def logged(comm: Communicator, path: str) -> list[str]:
    join(comm, path)
    model = wrapped("DDP")
    with gangline_lines() as lines:
        train(model, gangline.balance(model, DataLoader(images(20), BATCH)))
    dist.destroy_process_group()
    return [line for line in lines if line.startswith("balance: ")]


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
