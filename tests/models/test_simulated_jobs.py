"""Jobs on two simulated GPUs: the weights of one device, and how often a step has the host wait and copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from measure import distance, plain_loop
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gangline import Communicator, DistributedOptimizer, Module, Trainer, gpu
from gangline.kvstore import create
from gangline.kvstore.interface import KVStore
from tests.collectives.ranks import in_threads
from tests.collectives.simulated_gpus import Counts, HostRank, counted, simulated_gpus
from tests.kvstore.parameter_server.in_process import Job

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
    make: Callable[[nn.Module, KVStore], Step], store: str, nccl: str, waits: int, copies: int
) -> None:
    """For the only bucket of the network."""
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
        [(step, samples, seconds)] = module.load_balancer.message(wait=True)  # earlier steps have been taken in
        assert (step, sum(samples)) == (2 * STEPS, 10)  # threads interleave as they like, and so do the times
        assert min(seconds) > 0
