"""`gangline.balance(loads="auto")` in real jobs whose last rank has less CPU time or less memory than the others."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, spawn, torch_backend
from gangline.bench.unequal.rank_program import network
from gangline.bench.unequal.slow_process import CrowdedProcess, SlowProcess, slow_process
from gangline.models.executor.executor import is_out_of_memory

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
    for data, label in loader:
        model.zero_grad()
        cross_entropy(model(data), label).backward()
        if type(model) is nn.Sequential:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
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
            loader = gangline.balance(model, DataLoader(images(20), BATCH))
            shares = train(model, loader, 8)
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
        epochs = [train(model, loader) for _ in range(2)]
        if slow is not None:
            slow.slow_down(6)
        epochs += [train(model, loader) for _ in range(2)]
    dist.destroy_process_group()
    return epochs


@needs_cores
@pytest.mark.slow
def test_a_rank_that_becomes_slow_is_balanced_after_one_epoch(tmp_path: Path) -> None:
    first, last = spawn(becomes_slow, 2, str(tmp_path / "store"), threads=1)
    assert first == last
    assert [len(epoch) for epoch in first] == [9] * 4
    assert first[3][0][1] < BATCH  # the epoch after the one in which it became slow


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
    loader = gangline.balance(model, DataLoader(images(20), BATCH))
    crowd = CrowdedProcess(CORES[1])
    try:
        if comm.rank == 1:
            crowd.slow_down(6)
        shares = train(model, loader, 12)
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
    assert "balance: rank 0 " in first[0]
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
    train(model, gangline.balance(model, DataLoader(images(20), BATCH)), 6)
    dist.destroy_process_group()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return [line for line in lines if line.startswith("balance: rank")]


# -- memory -----------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A module with activations of some 20 MiB a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1 << 19))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * self.weight
        for _ in range(2):
            hidden = (hidden * self.weight).sin()
        return hidden.mean(1, keepdim=True)


SAMPLE = 24 << 20  # bytes that a sample of Wide needs at most


def limit_memory(samples: float) -> None:
    """Leave this process the memory of so many samples; 0: no limit."""
    if not samples:
        return
    status = Path("/proc/self/status").read_text()
    (size,) = (int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, (size + int(samples * SAMPLE), resource.RLIM_INFINITY))


def wide_model() -> DistributedDataParallel:
    model = DistributedDataParallel(Wide())
    model(torch.rand(1, 1)).sum().backward()  # starts threads, whose stacks and heaps are address space
    return model


def plain_step(comm: Communicator, path: str, room: list[float]) -> str:
    join(comm, path)
    model = wide_model()
    limit_memory(room[comm.rank])
    try:
        with model.no_sync():  # the other rank must not wait for the one that fails
            model(torch.rand(24, 1)).sum().backward()
    except RuntimeError as error:
        return "out of memory" if is_out_of_memory(error) else str(error)
    finally:
        dist.destroy_process_group()
    return ""


def balanced_steps(comm: Communicator, path: str, room: list[float], loads: Any) -> tuple[list[list[int]], str]:
    join(comm, path)
    model = wide_model()
    data = TensorDataset(torch.rand(4 * 48, 1), torch.rand(4 * 48, 1))
    loader = gangline.balance(model, DataLoader(data, 24), loads=loads)
    limit_memory(room[comm.rank])
    shares = []
    try:
        for inputs, labels in loader:
            model.zero_grad()
            nn.functional.mse_loss(model(inputs), labels).backward()
            shares.append(loader.shares)
    except ValueError as error:
        return shares, str(error)
    finally:
        dist.destroy_process_group()
    return shares, ""


@pytest.mark.slow
@pytest.mark.parametrize("loads", ["auto", pytest.param([1, 1], marks=pytest.mark.slow)])
def test_a_rank_with_a_third_of_the_memory_trains_where_ddp_runs_out(loads: Any, tmp_path: Path) -> None:
    assert spawn(plain_step, 2, str(tmp_path / "plain"), [0, 8], threads=1) == ["", "out of memory"]
    (shares, error), (of_last, error_of_last) = spawn(
        balanced_steps, 2, str(tmp_path / "store"), [0, 8], loads, threads=1
    )
    assert [error, error_of_last] == ["", ""]
    assert shares == of_last
    assert len(shares) == 4
    assert all(sum(split) == 48 and 1 <= split[1] <= 16 for split in shares)


def test_a_global_batch_that_fits_nowhere_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    found = spawn(balanced_steps, 2, str(tmp_path / "store"), [10, 10], "auto", threads=1)
    (shares, error), (_, of_last) = found
    assert error == of_last
    assert shares == []
    assert "the global batch of 48 samples does not fit into the memory of the ranks: rank 0 " in error
    assert "accumulate gradients over more batches" in error


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
        ([10, 5], "the global batch of 32 samples does not fit into the memory of the ranks: rank 0 10, rank 1 5, "),
        ([10], "memory is [10]; expected a maximum number of samples for each of 2 ranks, 1 or more"),
    ],
)
@pytest.mark.slow
def test_limits_that_are_given_hold(memory: list[int], found: str | list[int], tmp_path: Path) -> None:
    for answer in spawn(given_limits, 2, str(tmp_path / "store"), memory, threads=1):
        assert answer == found or (isinstance(found, str) and isinstance(answer, str) and answer.startswith(found))
