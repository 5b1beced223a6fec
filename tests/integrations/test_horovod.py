"""Tests of `gangline.horovod`: calls against plain arithmetic, training against one process, restarts."""

from __future__ import annotations

import os
import re
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gangline
import gangline.horovod.torch as hvd
from gangline import Communicator, horovod, spawn
from gangline.launcher.job import free_ports
from tests.kvstore.test_launch import launch
from tests.programs import RunsCode

NAMES = """
allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async grouped_allreduce_
grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather grouped_allgather_async
broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async reducescatter reducescatter_async
grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize init shutdown is_initialized
start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank is_homogeneous mpi_threads_supported
mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built ProcessSet
global_process_set add_process_set remove_process_set Average Sum Adasum Min Max Product HorovodInternalError
Compression DistributedOptimizer broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object
SyncBatchNorm elastic
"""
"""The public names of horovod.torch 0.28."""


def in_job(comm: Communicator, plays: list[Callable[[int, int], Any]], ports: list[int]) -> list[Any]:
    os.environ.update(RANK=str(comm.rank), WORLD_SIZE=str(comm.size), MASTER_ADDR="127.0.0.1")
    results = []
    for play, port in zip(plays, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        hvd.init()
        try:
            results.append(play(hvd.rank(), hvd.size()))
        finally:
            hvd.shutdown()
    return results


def played(ranks: int, *plays: Callable[[int, int], Any]) -> list[Any]:
    """Run functions one after another on so many ranks; return for each function the results of all ranks."""
    of_ranks = spawn(in_job, ranks, list(plays), free_ports(len(plays)), threads=1)
    return list(zip(*of_ranks, strict=True))


def test_all_names_exist() -> None:
    assert [name for name in NAMES.split() if not hasattr(hvd, name)] == []
    assert {"State", "ObjectState", "TorchState", "ElasticSampler", "run"} <= {*dir(hvd.elastic)}


def _reductions(rank: int, size: int) -> None:
    own = torch.arange(4.0) + rank
    total = sum(torch.arange(4.0) + other for other in range(size))
    torch.testing.assert_close(hvd.allreduce(own, name="x"), total / size)
    torch.testing.assert_close(hvd.allreduce(own, average=False), total)
    torch.testing.assert_close(hvd.allreduce(own, op=hvd.Max), torch.arange(4.0) + size - 1)
    torch.testing.assert_close(hvd.allreduce(own, op=hvd.Min), torch.arange(4.0))
    product = torch.stack([torch.arange(4.0) + other for other in range(size)]).prod(0)
    torch.testing.assert_close(hvd.allreduce(own, op=hvd.Product), product)
    scaled = hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(scaled, total * 1.5)
    torch.testing.assert_close(hvd.allreduce(own, compression=hvd.Compression.fp16), total / size)
    whole = torch.arange(4) + rank
    assert torch.equal(hvd.allreduce(whole), (torch.arange(4) * size + sum(range(size))) // size)
    odd = torch.tensor([-75, 75, -1, 7], dtype=torch.int32) * (rank == 0)
    assert hvd.allreduce(odd).tolist() == [int(value / size) for value in (-75, 75, -1, 7)]  # towards zero
    assert hvd.reducescatter(odd[:2].repeat(size), op=hvd.Average).tolist() == [int(-75 / size), int(75 / size)]
    assert torch.equal(whole, torch.arange(4) + rank)
    in_place = own.clone()
    assert torch.equal(hvd.allreduce_(in_place, op=hvd.Sum), total)
    assert torch.equal(in_place, total)
    pair = hvd.grouped_allreduce_([own.clone(), own + 1], op=hvd.Sum)
    assert torch.equal(torch.stack(pair), torch.stack([total, total + size]))
    handles = [hvd.allreduce_async(own + step, op=hvd.Sum) for step in range(20)]
    handles.append(hvd.allreduce_async_(tensor=own, op=hvd.Sum))
    results = [hvd.synchronize(handle) for handle in handles]
    assert all(map(hvd.poll, handles))
    assert torch.equal(torch.stack(results), torch.stack([total + step * size for step in [*range(20), 0]]))
    assert torch.equal(own, total)
    rows = torch.arange(2.0 * size + 1)
    assert torch.equal(hvd.reducescatter(rows, op=hvd.Sum), torch.tensor_split(rows * size, size)[rank])
    [half] = hvd.synchronize(hvd.grouped_reducescatter_async([rows[1:]]))
    assert torch.equal(half, rows[1:].view(size, 2)[rank])
    sparse = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0], (size + 1,), check_invariants=True)
    assert hvd.sparse_allreduce_async(sparse, op=hvd.Sum)().to_dense().tolist() == [size] + [2.0] * size
    assert hvd.allreduce(sparse).to_dense()[0] == 1


def _moves(rank: int, size: int) -> None:
    assert [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()] == [rank, size, 0, 1]
    assert hvd.is_homogeneous()
    rows = hvd.allgather(torch.full((rank + 1, 2), float(rank)))
    assert rows[:, 0].tolist() == [other for other in range(size) for _ in range(other + 1)]
    assert hvd.allgather(torch.tensor(rank)).tolist() == [*range(size)]
    own = torch.full((3,), float(rank))
    assert hvd.broadcast(own, size - 1).tolist() == [size - 1] * 3
    assert own.tolist() == [rank] * 3
    assert hvd.broadcast_(own, 0).tolist() == own.tolist() == [0] * 3
    sent = torch.full((size * (size + 1) // 2,), rank)
    received, splits = hvd.alltoall(sent, splits=torch.arange(1, size + 1))
    assert received.tolist() == [other for other in range(size) for _ in range(rank + 1)]
    assert splits.tolist() == [rank + 1] * size
    assert hvd.alltoall(torch.arange(size) + 10 * rank).tolist() == [rank + 10 * other for other in range(size)]
    hvd.barrier()

    def state(of: int) -> dict[str, Any]:
        return {"of": of, "best": np.float64(of), "moments": (np.arange(of), {of}, torch.ones(of))}

    assert str(hvd.broadcast_object(state(rank), size - 1)) == str(state(size - 1))
    assert hvd.allgather_object([rank] * rank) == [[other] * other for other in range(size)]


def _objects_that_run_code(folder: str, rank: int, size: int) -> None:
    unfit = RunsCode(Path(folder, str(rank)))
    refusal = "posix.mkdir; expected .*GANGLINE_ALLOW_PICKLE=1 in every process"
    with pytest.raises(TypeError, match=f"the object of broadcast_object contains {refusal}"):
        hvd.broadcast_object({"epoch": 3, "run": unfit}, 1)
    with pytest.raises(TypeError, match=f"the object of rank 1 in allgather_object contains {refusal}"):
        hvd.allgather_object(unfit if rank else rank)
    with pytest.raises(TypeError, match=f"the elastic state contains {refusal}"):
        hvd.elastic.State(run=unfit)
    state = hvd.elastic.State(epoch=rank)
    state.sync()  # goes on after the refusals
    assert state.epoch == 0
    assert not os.listdir(folder)
    os.environ["GANGLINE_ALLOW_PICKLE"] = "1"
    assert hvd.broadcast_object(Namespace(rate=rank), 1).rate == 1
    del os.environ["GANGLINE_ALLOW_PICKLE"]


def test_objects_that_run_code_are_refused_until_the_user_allows_pickle(tmp_path: Path) -> None:
    played(2, partial(_objects_that_run_code, str(tmp_path)))


def _gradients(rank: int, size: int) -> None:
    weight = torch.arange(4.0, requires_grad=True)
    hvd.allreduce(weight, op=hvd.Sum).sum().backward()
    assert weight.grad.tolist() == [size] * 4
    weight = torch.full((rank + 1, 2), 1.0, requires_grad=True)
    rows = hvd.allgather(weight)
    (rows[:, 0] * torch.arange(len(rows))).sum().backward()
    before = rank * (rank + 1) // 2
    assert weight.grad[:, 0].tolist() == [*range(before, before + rank + 1)]
    weight = torch.ones(3, requires_grad=True)
    (hvd.broadcast(weight, 1) * (rank + 1)).sum().backward()
    assert weight.grad.tolist() == [(size + 1) / 2 if rank == 1 else 0] * 3
    weight = torch.ones(size, requires_grad=True)
    (hvd.alltoall(weight) * (rank + 1)).sum().backward()
    assert weight.grad.tolist() == [*range(1, size + 1)]
    weight = torch.ones(2 * size, requires_grad=True)
    (hvd.reducescatter(weight, op=hvd.Sum) * (rank + 1)).sum().backward()
    assert weight.grad.tolist() == [size * (other + 1) for other in range(size) for _ in range(2)]


def _process_sets(rank: int, size: int) -> None:
    ends = hvd.add_process_set([0, size - 1])
    if ends.included():
        assert [ends.size(), ends.rank()] == [2, min(rank, 1)]
        assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum, process_set=ends) == 2
        assert hvd.broadcast(torch.tensor(rank), size - 1, process_set=ends) == size - 1
    else:
        with pytest.raises(ValueError, match=re.escape(f"rank 1 calls process set [0, {size - 1}]")):
            hvd.allreduce(torch.ones(1), process_set=ends)
    assert hvd.remove_process_set(ends)
    assert not hvd.remove_process_set(hvd.global_process_set)


def _joins(rank: int, size: int) -> None:
    for step in range(2 + rank):
        present = size if step < 2 else size + 1 - step
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [present] * 3
        assert len(hvd.allgather(torch.ones(2))) == 2 * present
    if rank == size - 1:
        with pytest.raises(hvd.HorovodInternalError, match=r"broadcast needs all ranks, but rank.* called join\(\)"):
            hvd.broadcast(torch.ones(1), 0)
        with pytest.raises(hvd.HorovodInternalError, match=r"a rank called join\(\), which has zeros to add only"):
            hvd.allreduce(torch.ones(1), op=hvd.Max)
    assert hvd.join() == size - 1
    for _ in range(2 * size - rank):  # now the first rank is the last one
        hvd.allreduce(torch.ones(3))
    assert hvd.join() == 0


def _different_calls(rank: int, size: int) -> None:
    names = "; ".join(f"rank {other}: allreduce of {other} float32 [1] 0 1.0 1.0" for other in range(size))
    with pytest.raises(hvd.HorovodInternalError, match=re.escape(names)):
        hvd.allreduce(torch.ones(1), name=f"of {rank}")
    assert hvd.allreduce(torch.ones(1), name="same") == 1


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_calls(ranks: int) -> None:
    played(ranks, _reductions, _moves, _gradients, _joins, _different_calls)


def test_process_sets_and_an_optimizer_of_one() -> None:
    """A rank outside of the optimizer's set trains alone."""
    _, gradients = played(3, _process_sets, _trains_in_one_of_two_sets)
    assert gradients == (1, 1, 1)


DATA = torch.randn(48, 4, generator=torch.Generator().manual_seed(1)), torch.randn(48, 2, generator=torch.Generator())


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def loss_of(model: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    data, target = DATA
    return nn.functional.mse_loss(model(data[samples]), target[samples])


def _trains(rank: int, size: int, op: int, passes: int, compression: Any) -> list[float]:
    """Train beside a loop over the samples of all ranks, and return the weights' distance."""
    expected, model = network(), network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    alone = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(model.parameters(), lr=0.1 + rank, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression, passes, op)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(6):
        alone.zero_grad()
        optimizer.zero_grad()
        for part in range(passes):
            samples = (torch.arange(4 * size) + 4 * size * (step * passes + part)) % 48
            (loss_of(expected, samples) * (size if op == hvd.Sum else 1)).backward()
            loss_of(model, samples.chunk(size)[rank]).backward()
        optimizer.step()
        alone.step()
    return differences(expected, model)


def differences(expected: nn.Module, model: nn.Module) -> list[float]:
    pairs = zip(expected.parameters(), model.parameters(), strict=True)
    return [float((own - theirs).detach().abs().max()) for own, theirs in pairs]


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_train_as_one_process(ranks: int) -> None:
    sums = partial(_trains, op=hvd.Sum, passes=2, compression=hvd.Compression.none)
    halves = partial(_trains, op=hvd.Average, passes=1, compression=hvd.Compression.fp16)
    exact, rounded = played(ranks, sums, halves)
    assert max(map(max, exact)) < 1e-6
    for found in rounded:
        assert (1e-6 if ranks > 1 else -1) < max(found) < 2e-3  # halves were sent


def _joins_while_others_train(rank: int, size: int) -> list[float]:
    """Give each rank a step more than the one before; zeros of ranks that have joined count in the mean."""
    model, expected = network(), network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    alone = torch.optim.SGD(expected.parameters(), lr=0.1)
    samples = [torch.arange(other, other + 4) for other in range(size)]
    for _ in range(2 + rank):
        optimizer.zero_grad()
        loss_of(model, samples[rank]).backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), hvd.join())
    for step in range(1 + size):
        alone.zero_grad()
        for other in range(size):
            if step < 2 + other:
                (loss_of(expected, samples[other]) / size).backward()
        alone.step()
    return differences(expected, model)


def test_ranks_that_joined_add_zeros_to_gradients() -> None:
    [found] = played(3, _joins_while_others_train)
    assert max(map(max, found)) < 1e-6


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(8, 3, sparse=True)


SPARSE_CASES: list[dict[str, Any]] = [
    {},
    {"sparse_as_dense": True},
    {"op": hvd.Sum},
    {"op": hvd.Sum, "sparse_as_dense": True},
    {"compression": hvd.Compression.fp16},
]


def _sparse_gradients(rank: int, size: int) -> list[list[list[float]]]:
    """Train on a row of the rank's own and one of all, with SparseAdam, which takes sparse gradients only."""
    found = []
    for options in SPARSE_CASES:
        model = _Embedding()
        optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(list(model.parameters()), lr=0.5), **options)
        optimizer.zero_grad()
        model.rows(torch.tensor([rank, 7])).sum().backward()
        optimizer.synchronize()
        gradient = model.rows.weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        found.append(gradient.to_dense().tolist())
        optimizer.step()
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sparse_gradients_are_reduced(ranks: int) -> None:
    [of_ranks] = played(ranks, _sparse_gradients)
    for of_rank in of_ranks:
        for options, found in zip(SPARSE_CASES, of_rank, strict=True):
            expected = torch.zeros(8, 3)
            expected[:ranks] = 1 if options.get("op") == hvd.Sum else 1 / ranks
            expected[7] = ranks if options.get("op") == hvd.Sum else 1
            torch.testing.assert_close(torch.tensor(found), expected)


def _joins_while_others_look_rows_up(rank: int, size: int) -> list[list[float]]:
    model = _Embedding()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    before = model.rows.weight.detach().clone()
    for step in range(1 + rank):
        optimizer.zero_grad()
        model.rows(torch.tensor([step])).sum().backward()
        optimizer.step()
    hvd.join()
    return (before - hvd.broadcast(model.rows.weight.detach(), size - 1)).tolist()


def test_ranks_that_joined_add_no_rows_to_sparse_gradients_and_integers_are_scaled_in_float64() -> None:
    joined, integers = played(2, _joins_while_others_look_rows_up, _large_integers)
    for changed in joined:
        expected = torch.zeros(8, 3)
        expected[0], expected[1] = 1, 0.5  # the mean counts the rank that joined
        torch.testing.assert_close(torch.tensor(changed), expected)
    assert integers == ([2**40 + 1, 2**41 + 2],) * 2


def _trains_in_one_of_two_sets(rank: int, size: int) -> float:
    inside = hvd.add_process_set([0, 2])
    assert [inside.size(), inside.included(), hvd.add_process_set([]).size()] == [2, rank != 1, 0]
    torch.manual_seed(rank)
    model = nn.Linear(3, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=inside)
    model(torch.full((1, 3), float(rank))).sum().backward()
    optimizer.step()
    return float(model.weight.grad[0, 0])  # type: ignore[index]


def _large_integers(rank: int, size: int) -> list[int]:
    large = torch.tensor([2**40 + 1])
    halved = hvd.allreduce(large, op=hvd.Sum, postscale_factor=0.5)
    return [int(halved), int(hvd.allreduce(large, op=hvd.Max, prescale_factor=2))]


def test_the_version_of_nccl_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert hvd.nccl_built() == 0
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    assert hvd.nccl_built() == 22703


def test_wrong_arguments_are_refused() -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"use hvd.init\(\)"):
        hvd.rank()
    hvd.init(process_sets="dynamic")
    try:
        weight, *others = model.named_parameters()
        for arguments, error, text in (
            ({"op": hvd.Adasum}, NotImplementedError, "op is Adasum"),
            ({"op": hvd.Max}, ValueError, "expected hvd's mean, sum"),
            ({"compression": "fp16"}, ValueError, "compression is fp16"),
            ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step is 0"),
            ({"named_parameters": [weight[1]]}, ValueError, "entries without a name"),
            ({"named_parameters": [weight, weight]}, ValueError, "0.weight more than once"),
            ({"named_parameters": others}, ValueError, "lacks 1 of the optimizer's parameters"),
        ):
            with pytest.raises(error, match=text):
                hvd.DistributedOptimizer(sgd, **arguments)
        for call, error, text in (
            (lambda: hvd.init([0]), ValueError, "use a ProcessSet"),
            (lambda: hvd.init(process_sets="static"), ValueError, "process_sets is 'static'"),
            (lambda: hvd.allreduce(torch.ones(1), op=9), ValueError, "op is 9"),
            (lambda: hvd.allreduce_(torch.eye(2).to_sparse()), ValueError, "sparse_allreduce_async"),
            (lambda: hvd.broadcast(torch.ones(1), 1), ValueError, "root_rank is 1"),
            (lambda: hvd.alltoall(torch.ones(2), splits=[1]), ValueError, r"splits are \[1\]"),
            (lambda: hvd.alltoall(torch.ones(2), splits=torch.tensor([2.0])), ValueError, "of torch.float32"),
            (lambda: hvd.reducescatter(torch.ones(())), ValueError, "is a scalar"),
            (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), ValueError, "expected one of them"),
            (lambda: hvd.add_process_set([0, 1]), ValueError, r"ranks \[0, 1\]"),
            (lambda: hvd.allreduce(torch.ones(1), name="n" * 2000), ValueError, "a name or splits of"),
            (lambda: hvd.start_timeline("t.json"), NotImplementedError, "GANGLINE_TIMELINE"),
            (lambda: hvd.SyncBatchNorm(3), NotImplementedError, "sync_batchnorm=True"),
            (
                lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0),
                ValueError,
                "optimizer is LBFGS",
            ),
        ):
            with pytest.raises(error, match=text):
                call()
    finally:
        hvd.shutdown()


def test_a_name_in_use_is_refused() -> None:
    hvd.init()
    gate = threading.Event()
    try:
        hvd.calls.submit(gate.wait, is_async=True)
        running = hvd.allreduce_async(torch.ones(2), name="loss")
        others = [hvd.allreduce_async(torch.ones(2)), hvd.allgather_async(torch.ones(2), name="loss")]
        with pytest.raises(ValueError, match="the name 'loss' runs"):
            hvd.allreduce_async(torch.ones(2), name="loss")
        gate.set()
        for handle in (running, *others, hvd.allreduce_async(torch.ones(2), name="next")):
            assert hvd.synchronize(handle).tolist() == [1, 1]
        assert hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="loss")).tolist() == [1, 1]
    finally:
        gate.set()
        hvd.shutdown()


def _rank_and(value: int) -> list[int]:
    hvd.init()
    return [hvd.rank(), hvd.size(), value]


@pytest.mark.slow
def test_a_function_runs_in_new_processes() -> None:
    assert horovod.run(_rank_and, (7,), np=2) == [[0, 2, 7], [1, 2, 7]]


ELASTIC = """
import os, sys
import torch
import gangline.horovod.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))
sampler = hvd.elastic.ElasticSampler(data)

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, 2):
        for number, batch in enumerate(torch.utils.data.DataLoader(data, 5, sampler=state.sampler)):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            state.sampler.record_batch(number, 5)
            if state.epoch == 1 and number == 2 and hvd.rank() == 1 and os.environ.get("KILL") == os.environ.get(
                "GANGLINE_RESTART"
            ):
                os.kill(os.getpid(), 9)
            state.commit()
        state.sampler.set_epoch(state.epoch + 1)
        state.commit()

state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler)
state.register_reset_callbacks([lambda: print("reset", flush=True)])
train(state)
print("weights", model.weight.detach().flatten().tolist(), flush=True)
"""


@pytest.mark.slow
def test_a_restarted_job_goes_on_from_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outputs = []
    for kill in ("never", "0"):
        monkeypatch.setenv("KILL", kill)
        with launch("-np", "2", "-s", "0", "--max-restarts", "1", "--", sys.executable, "-c", ELASTIC) as job:
            status, out, errors = job.end(60)
        assert status == 0, "\n".join(errors)
        outputs.append({line.partition("] ")[2] for line in out})
        assert any("restart 1 of 1" in line for line in errors) == (kill == "0")
    assert outputs[1] == outputs[0] | {"reset"}
    assert len(outputs[0]) == 1
    assert not [*tmp_path.glob("gangline/*")]
    assert gangline.horovod is horovod
