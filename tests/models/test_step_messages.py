"""Costs of a training step: messages between workers, frames of a bucket, waits for GPUs, copies and page faults."""

from __future__ import annotations

import copy
import os
import platform
import resource
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from measure import Branches, distance, plain_loop, step_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import gangline
from gangline import Communicator, DistributedOptimizer, Module, Trainer, cpu, gpu, spawn
from gangline.collectives.devices.backends import copies
from gangline.collectives.processes.process_pool import ProcessPool
from gangline.collectives.work import WorkQueue
from gangline.kvstore import KVStore, create
from gangline.kvstore.allreduce.negotiation import Negotiator
from gangline.kvstore.group.worker_group import WorkerGroup
from gangline.kvstore.parameter_server.client.scheduler_client import SchedulerClient
from gangline.kvstore.reducer import reducer
from gangline.models.zoo import registry
from tests.collectives.ranks import in_threads
from tests.collectives.simulated_gpus import Counts, HostRank, counted, simulated_gpus
from tests.kvstore.parameter_server.in_process import Job
from tests.kvstore.parameter_server.processes import run_job
from tests.models.unequal_jobs import Stream

FEATURES, CLASSES = 6, 3


def batches(rank: int) -> list[Any]:
    """Return this worker's batches: of its own size, one without samples, some without a sample for the branch."""
    generator = torch.Generator().manual_seed(rank)
    made: list[Any] = []
    for step in range(6):
        data = torch.randn(3 + rank + step, FEATURES, generator=generator)
        data[:, 0] = data[:, 0].abs() * (-1 if (step + rank) % 2 else 1)
        made.append((data, torch.randint(CLASSES, (len(data),), generator=generator)))
    made[3 + rank] = (None, None)
    return made


def counting(calls: Counter[str], owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    original: Callable[..., Any] = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        return original(*arguments, **options)

    patch.setattr(owner, name, counted)


def steps(store: KVStore, rank: int, calls: Counter[str]) -> tuple[list[dict[str, int]], int]:
    """Return the calls of each step after the first, and the number of buckets."""
    torch.manual_seed(2)
    with Module(Branches(FEATURES, CLASSES), nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer(store, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        found = []
        for number, (data, label) in enumerate(batches(rank)):
            calls.clear()
            step_of(module, bool(number % 2), data, label)
            found.append(dict(calls))
        return found[1:], len(module._optimizer._reducer._buckets)  # type: ignore[attr-defined]


def allreduce_steps(comm: Communicator) -> Any:
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch, create("allreduce", communicator=comm) as store:
        patch.setattr(reducer, "BUCKET_BYTES", 200)
        counting(calls, Negotiator, "all_gather", patch)
        for name in ("all_reduce", "broadcast"):
            counting(calls, Communicator, name, patch)
        return steps(store, comm.rank, calls)


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return spawn(steps_and_epochs, 2, threads=1)


def test_a_step_of_allreduce_gathers_one_header_and_reduces_one_tensor_per_bucket(two: list[Any]) -> None:
    for (found, buckets), _ in two:
        assert buckets > 3
        for calls in found:
            assert calls.keys() <= {"all_gather", "all_reduce"}
            assert calls["all_gather"] == buckets
            assert 0 < calls["all_reduce"] < buckets  # the unused layer's has no gradients


def server_steps(name: str) -> Any:
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch, create(name) as store:
        counting(calls, SchedulerClient, "_send", patch)
        return steps(store, store.rank, calls)[0]


def test_a_step_of_dist_sync_sends_the_scheduler_nothing() -> None:
    for found in run_job(server_steps, 2, 1, "dist_sync"):
        assert found == [{}] * 5


def own_batches(rank: int, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(2 + rank, FEATURES, generator=generator).double(), torch.randint(CLASSES, (2 + rank,)))
        for _ in range(count)
    ]


def epochs_in_a_job(comm: Communicator) -> Any:
    """Return the exchanges of an epoch, and the batches seen in it, for each kind of loader and length."""
    found = []
    for kind in ("loader", "list", "stream"):
        for count in (4, 12):
            data: Any = own_batches(comm.rank, count - 3 * comm.rank)
            if kind != "list":
                data = Stream(range(len(data)), data.__getitem__) if kind == "stream" else data
                data = DataLoader(data, batch_size=None)
            calls: Counter[str] = Counter()
            seen: list[int] = []
            with pytest.MonkeyPatch.context() as patch, create("allreduce", communicator=comm) as store:
                counting(calls, WorkerGroup, "all_gather", patch)
                patch.setattr("gangline.models.balance.worker_balance._SECONDS", 100.0)
                with Module(nn.Linear(FEATURES, CLASSES).double(), nn.CrossEntropyLoss(), cpu()) as module:
                    module.fit(
                        data,
                        num_epoch=1,
                        kvstore=store,
                        eval_metric="loss",
                        batch_end_callback=lambda param, seen=seen: seen.append(param.nbatch),
                    )
            found.append((kind, count, calls["all_gather"], seen))
    return found


def steps_and_epochs(comm: Communicator) -> Any:
    return allreduce_steps(comm), epochs_in_a_job(comm)


def test_loaders_that_end_at_different_steps_exchange_their_lengths_and_not_each_step(two: list[Any]) -> None:
    first, second = (epochs for _, epochs in two)
    assert first == second
    assert all(seen == list(range(count)) for _, count, _, seen in first)
    exchanges = {(kind, count): calls for kind, count, calls, _ in first}
    for kind in ("loader", "list"):
        assert exchanges[kind, 12] - exchanges[kind, 4] == 1  # after the first, third and seventh update
    assert exchanges["stream", 12] - exchanges["stream", 4] == 1 + 2  # the eighth update; every four batches


ROWS, INPUTS, HIDDEN = 2_000, 8, 5_000


def received(folder: str) -> tuple[int, int, int]:
    """Return the bytes that the scheduler sent during predict and save_checkpoint, and the number of outputs."""
    total = 0
    receive = SchedulerClient._receive

    def counted(self: SchedulerClient, frame: bytes) -> None:
        nonlocal total
        total += len(frame)
        receive(self, frame)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, 2))
    data, label = torch.rand(ROWS, INPUTS), torch.zeros(ROWS, dtype=torch.int64)
    compression = {"type": "2bit", "threshold": 0.5}
    with Module(network, nn.CrossEntropyLoss(), cpu(), compression_params=compression) as module:
        module.init_optimizer("dist_sync")
        module.forward_backward_update(data[:4], label[:4])
        SchedulerClient._receive = counted  # type: ignore[method-assign]
        outputs = module.predict(data, batch_size=ROWS)
        of_predict, total = total, 0
        module.save_checkpoint(Path(folder, "net"), 1, save_optimizer_states=True)
        return of_predict, total, 0 if outputs is None else len(outputs)


def test_only_rank_0_receives_outputs_and_parts_of_checkpoints(tmp_path: Path) -> None:
    first, second = run_job(received, 2, 1, str(tmp_path))
    outputs, residuals = 4 * 2 * ROWS, 4 * (INPUTS + 1 + 2) * HIDDEN
    assert first[0] > outputs
    assert first[1] > 2 * residuals
    assert second[0] < outputs / 10
    assert second[1] < residuals / 10
    assert (first[2], second[2]) == (ROWS, 0)


# The way of a gradient from its hook to the store's sum: Python frames and thread hand-overs, counted


MOST_FRAMES = 13
MOST_FRAMES_TO_WORKERS = 15
"""To the sum over the workers of an `allreduce` store, one call behind the sum over its own devices."""
BUCKETS = 4
WIDTH = 6


def depth(until: str) -> list[int]:
    """Return the number of frames from the caller's to the next one of a function of this name; [] if there is none."""
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and frame.f_code.co_name != until:
        frame, count = frame.f_back, count + 1
    return [] if frame is None else [count]


def frames(store: KVStore, contexts: int, summing: Any, name: str) -> tuple[list[int], list[int]]:
    """Return the frames of each bucket of a step: from its hook to the hand-over, and from there to the sum.

    Args:
        store: A store.
        contexts: Number of contexts.
        summing: Module or object with the function that sums.
        name: Name of the function.
    """
    network = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(BUCKETS)])
    in_hook: list[int] = []
    in_store: list[int] = []
    submit, inner = WorkQueue.submit, getattr(summing, name)

    def submitted(self: WorkQueue, *arguments: Any) -> None:
        in_hook.extend(depth("_on_gradient"))  # a pull is submitted too if the queue is busy
        submit(self, *arguments)

    def summed(*arguments: Any) -> Any:
        in_store.extend(depth("_serve"))
        return inner(*arguments)

    data, label = torch.ones(6, WIDTH), torch.ones(6, WIDTH)
    with (
        pytest.MonkeyPatch.context() as patch,
        store,
        Module(network, nn.MSELoss(), [cpu(index) for index in range(contexts)]) as module,
    ):
        patch.setattr(reducer, "BUCKET_BYTES", 260)  # a layer of WIDTH
        module.init_optimizer(store, "sgd", {"lr": 0.1})
        for _ in range(2):
            module.forward_backward_update(data, label)
        threads = threading.active_count()
        patch.setattr(WorkQueue, "submit", submitted)
        patch.setattr(summing, name, summed)
        module.forward_backward_update(data, label)
        assert threading.active_count() == threads
    assert len(in_hook) == len(in_store) == BUCKETS  # one hand-over and one call that sums for each
    return in_hook, in_store


@pytest.mark.parametrize("store", ["local", "device"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_bucket_takes_few_frames_and_one_hand_over_to_its_sum(store: str, count: int) -> None:
    in_hook, in_store = frames(create(store), count, copies, "move_jointly")
    assert max(in_hook) + max(in_store) <= MOST_FRAMES


def frames_to_the_workers(comm: Communicator) -> tuple[list[int], list[int]]:
    return frames(create("allreduce", communicator=comm), 2, comm, "all_reduce")


def test_a_bucket_takes_few_frames_to_the_sum_over_the_workers() -> None:
    for in_hook, in_store in spawn(frames_to_the_workers, 2):
        assert max(in_hook) + max(in_store) <= MOST_FRAMES_TO_WORKERS


# Jobs on two simulated GPUs: the weights of one device, and how often a step has the host wait and copy


STEPS = 5
SHARES = slice(0, 4), slice(4, None)
RATE: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
NO_NCCL = "nothing to reduce by"
Step = Callable[[Tensor, Tensor], None]
Result = tuple[dict[str, Tensor], Counts]


def _network(*, with_batchnorm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), *([nn.BatchNorm1d(8)] if with_batchnorm else []), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def _batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-2, 2, 60).double().sin().view(10, 6), torch.arange(10) % 3


def _trainer(network: nn.Module, kv: KVStore) -> Step:
    trainer = Trainer(network, "sgd", RATE, kv)

    def step(data: Tensor, label: Tensor) -> None:
        trainer.zero_grad()
        trainer.backward(cross_entropy(network(data), label), len(label))
        trainer.step(len(label))

    return step


def _distributed_optimizer(network: nn.Module, kv: KVStore) -> Step:
    optimizer = DistributedOptimizer(torch.optim.SGD(network.parameters(), **RATE), kv)

    def step(data: Tensor, label: Tensor) -> None:
        optimizer.zero_grad()
        optimizer.weight = len(label)
        cross_entropy(network(data), label).backward()
        optimizer.step()

    return step


def _trained(kv: KVStore, network: nn.Module, make: Callable[[nn.Module, KVStore], Step]) -> Result:
    """Train a rank's share on its GPU; return the weights, and the counts of the last step."""
    card, (data, label) = torch.device("cuda", kv.rank), _batch()
    network = copy.deepcopy(network).to(card)
    data, label = data[SHARES[kv.rank]].to(card), label[SHARES[kv.rank]].to(card)
    step = make(network, kv)
    for _ in range(STEPS - 1):
        step(data, label)
    with counted(kv.rank) as counts:
        step(data, label)
    return {name: value.cpu() for name, value in network.state_dict().items()}, counts


def _by_allreduce(comm: Communicator, *arguments: Any) -> Result:
    with create("allreduce", communicator=comm) as kv:
        return _trained(kv, *arguments)


def _results(store: str, *arguments: Any) -> list[Result]:
    if store == "allreduce":
        return in_threads(2, _by_allreduce, *arguments)
    with Job(2) as job:
        stores = job.stores(store)
        try:
            return job.each(stores, lambda kv: _trained(kv, *arguments))
        finally:
            job.each(stores, lambda kv: kv.close())


@pytest.mark.usefixtures("stream_order")
@pytest.mark.parametrize(
    ("make", "store", "nccl", "waits", "copies"),
    [
        (_trainer, "allreduce", "", 0, 0),
        (_distributed_optimizer, "allreduce", "", 0, 0),
        (_trainer, "allreduce", NO_NCCL, 1, 1),
        (_distributed_optimizer, "allreduce", NO_NCCL, 1, 1),
        (_trainer, "dist_sync", "", 1, 1),
        (_distributed_optimizer, "dist_sync", "", 1, 1),
    ],
)
def test_waits_and_copies_of_a_workers_step(
    make: Callable[[nn.Module, KVStore], Step],
    store: str,
    nccl: str,
    waits: int,
    copies: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For the only bucket of the network."""
    monkeypatch.setenv("GANGLINE_REPLICA_CHECK", "0")  # a step that compares replicas waits for one more copy
    network = _network()
    expected = plain_loop(network, [_batch()] * STEPS, **RATE)
    with simulated_gpus(nccl=nccl):
        for weights, counts in _results(store, network, make):
            assert distance(weights, expected) <= 1e-12
            assert len(counts.waits) == waits, counts
            assert len(counts.to_host) == copies, counts


@contextmanager
def _module(network: nn.Module, **options: Any) -> Iterator[Module]:
    with Module(network, nn.CrossEntropyLoss(), [gpu(0), gpu(1)], **options) as module:
        module.init_optimizer("device", "sgd", RATE)
        yield module


@pytest.mark.usefixtures("stream_order")
@pytest.mark.parametrize("nccl", ["", NO_NCCL])
@pytest.mark.parametrize("with_batchnorm", [False, True])
def test_a_step_of_a_module_on_two_gpus_has_no_wait_and_no_copy_to_the_host(nccl: str, with_batchnorm: bool) -> None:
    network = _network(with_batchnorm=with_batchnorm)
    expected = plain_loop(network, [_batch()] * STEPS, **RATE)
    with simulated_gpus(nccl=nccl), _module(network, sync_batchnorm=with_batchnorm) as module:
        for _ in range(STEPS - 1):
            module.forward_backward_update(*_batch())
        with counted(0) as first, counted(1) as second:
            module.forward_backward_update(*_batch())
        for counts in first, second:
            assert (counts.waits, counts.to_host, counts.to_gpu) == ([], [], [30, 5])  # data and labels
        assert distance(module.get_params(), expected) <= 1e-12
        assert bool(HostRank.calls) == (not nccl)


@pytest.mark.usefixtures("stream_order")
def test_a_module_measures_its_gpus_without_waits() -> None:
    network = _network()
    with simulated_gpus(), _module(network, work_load_list="auto") as module:
        for step in range(2 * STEPS):  # to find writes through .data the host waits in the first, and copies in one
            with counted(0) as first, counted(1) as second:
                module.forward_backward_update(*_batch())
            if step >= 3:
                assert first.waits == second.waits == []
        assert module.load_balancer is not None
        [(samples, seconds)] = module.load_balancer.measurements.take(wait=True)  # earlier steps have been taken in
        assert sum(samples) == 10  # threads interleave as they like, and so do the times
        assert min(seconds) > 0


# Host memory that a step frees is reused by the next step


COUNTED, MOST_FAULTS = 20, 250


def train_module() -> Iterator[None]:
    with Module(registry.create("lenet"), torch.nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer("device", "sgd", {"lr": 0.1, "momentum": 0.9})
        data, label = torch.rand(64, 1, 28, 28), torch.arange(64) % 10
        while True:
            module.forward_backward_update(data, label)
            yield


def train_balanced() -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 24, 3, padding=1), torch.nn.Flatten(), torch.nn.LazyLinear(10))
    data = TensorDataset(torch.rand(1024, 3, 16, 16), torch.arange(1024) % 10)
    network(data[:2][0])
    model = DistributedDataParallel(network)
    loader = gangline.balance(model, DataLoader(data, 128))
    while True:
        for images, labels in loader:
            torch.nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            yield


def count_faults(steps: Iterator[None], connection: Connection) -> None:
    """Send the number of page faults of some steps; run it in a process of its own, with fresh memory."""
    for _ in range(16):
        next(steps)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(COUNTED):
        next(steps)
    connection.send(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    os._exit(0)  # gloo of torch 2.13 aborts now and then in destroy_process_group


def module_faults(connection: Connection) -> None:
    count_faults(train_module(), connection)


def balanced_faults(connection: Connection) -> None:
    count_faults(train_balanced(), connection)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators than glibc's keep memory or not")
@pytest.mark.slow
@pytest.mark.parametrize("job", [module_faults, balanced_faults])
def test_a_step_has_no_memory_cleared_by_the_kernel(job: Callable[[Connection], None]) -> None:
    with ProcessPool(job, 1) as family:
        faults = family.connections[0].recv()
    assert faults < COUNTED * MOST_FAULTS  # pages; 2 to 100 a step of threads; if freed memory is returned, about 2,500
