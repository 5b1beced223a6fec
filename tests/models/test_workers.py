"""Several workers train, score and predict as one process does, each on its own share of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from measure import distance
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gangline import Module, cpu, spawn
from gangline.collectives.communicator import Communicator
from gangline.kvstore import KVStore, create

SAMPLES, FEATURES, CLASSES = 37, 6, 3
IGNORED = -100
Params = Mapping[str, torch.Tensor]


def network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def arrays(ignore: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    label = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    if ignore:
        label[torch.rand(SAMPLES, generator=generator) < 0.6] = IGNORED
    return data, label


def regression() -> tuple[torch.Tensor, torch.Tensor]:
    data, label = arrays()
    return data, nn.functional.one_hot(label, CLASSES).double()


CASES: dict[str, tuple[Callable[[], Any], Any]] = {
    "elements": (regression, nn.MSELoss()),
    "own-loss": (arrays, lambda output, label: nn.functional.cross_entropy(output, label)),
    "dataset": (lambda: TensorDataset(*arrays()), nn.CrossEntropyLoss()),
}
"""Data and loss."""


def trained(case: str, kvstore: Any) -> Params:
    """Train 20 steps; 37 samples leave a partial batch."""
    make, loss = CASES[case]
    with Module(network(), loss, cpu()) as module:
        module.fit(
            make(),
            num_epoch=4,
            batch_size=8,
            seed=5,
            kvstore=kvstore,
            optimizer="sgd",
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3},
            eval_metric="loss",
        )
        return module.get_params()


def of_two_workers(comm: Communicator) -> dict[str, Any]:
    return {
        "cases": in_a_job(comm),
        "own batches": [own_batches_in_a_job(comm, as_loader) for as_loader in (False, True)],
        "auto": auto_in_a_job(comm),
        "noise": noise_in_a_job(comm),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    """Train in many ways as two workers; return what each showed."""
    return spawn(of_two_workers, 2, threads=1)


def in_a_job(comm: Communicator) -> list[Params]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GANGLINE_WORK_LOAD_LIST", "3,1")
        for case in CASES:
            with create("allreduce", communicator=comm) as store:
                found.append(trained(case, store))
    return found


def test_workers_train_as_one_process_does(two: list[dict[str, Any]]) -> None:
    for case, *of_workers in zip(CASES, *(each["cases"] for each in two), strict=True):
        for params in of_workers:
            assert distance(params, trained(case, None)) <= 1e-11, case
        assert all(torch.equal(params[name], of_workers[0][name]) for params in of_workers for name in params), case


def own_batches(rank: int) -> list[Any]:
    """Return three batches for rank 0 and five of other sizes for rank 1."""
    data, label = arrays(ignore=True)
    sizes = [[5, 2, 6], [1, 3, 4, 2, 5]][rank]
    start = [0, 20][rank]
    pieces = zip(
        data[start : start + sum(sizes)].split(sizes), label[start : start + sum(sizes)].split(sizes), strict=True
    )
    return list(pieces)


def own_batches_in_a_job(comm: Communicator, as_loader: bool) -> Params:
    with create("allreduce", communicator=comm) as store, Module(network(comm.rank), nn.CrossEntropyLoss()) as module:
        batches: Any = own_batches(comm.rank)
        if as_loader:
            batches = DataLoader(batches, batch_size=None, sampler=range(len(batches)))
        module.fit(batches, num_epoch=2, kvstore=store, optimizer_params={"learning_rate": 0.1})
        return module.get_params()


def test_batches_of_a_workers_own_are_not_cut_and_may_be_fewer_than_the_others(two: list[dict[str, Any]]) -> None:
    joined = []
    for step in range(5):
        parts = [own_batches(rank)[step] for rank in range(2) if step < len(own_batches(rank))]
        joined.append(tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    with Module(network(0), nn.CrossEntropyLoss()) as module:
        module.fit(joined, num_epoch=2, optimizer_params={"learning_rate": 0.1})
        alone = module.get_params()
    for params in (params for each in two for params in each["own batches"]):
        assert distance(params, alone) <= 1e-11


def auto(store: KVStore) -> Params:
    with Module(network(), nn.CrossEntropyLoss(), [cpu(0), cpu(1)], work_load_list="auto") as module:
        module.init_params("uniform")
        module.fit(arrays(True), num_epoch=3, batch_size=5, kvstore=store, optimizer_params={"learning_rate": 0.05})
        begun = module.get_params()
        module.set_params({name: value + store.rank for name, value in begun.items()})
        after = module.get_params()
        assert all(torch.equal(after[name], value) for name, value in begun.items())  # rank 0's, which added nothing
        return begun


def auto_in_a_job(comm: Communicator) -> Params:
    torch.manual_seed(comm.rank)
    with create("allreduce", communicator=comm) as store:
        return auto(store)


def test_auto_loads_of_contexts_work_among_workers(two: list[dict[str, Any]]) -> None:
    first, second = (each["auto"] for each in two)
    assert all(torch.equal(second[name], value) for name, value in first.items())
    torch.manual_seed(0)
    with create("local") as store:
        assert distance(first, auto(store)) <= 1e-11


def noisy(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    layers = [nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def noise_in_a_job(comm: Communicator) -> tuple[Params, Params]:
    network = noisy(comm.rank)
    network[1].running_mean.fill_(comm.rank + 1)  # rank 0's values are used
    with create("allreduce", communicator=comm) as store, Module(network, nn.CrossEntropyLoss(), cpu()) as module:
        module.init_optimizer(store, "sgd", {"learning_rate": 0.1})
        begun = module.get_params()
        module.fit(arrays(), num_epoch=2, batch_size=8, seed=5, kvstore=store, eval_metric="loss")
        return begun, module.get_params()


def test_random_streams_and_running_statistics_are_those_of_as_many_contexts_of_one_worker(
    two: list[dict[str, Any]],
) -> None:
    found = [each["noise"] for each in two]
    network = noisy(0)
    network[1].running_mean.fill_(1)
    with Module(network, nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer("local", "sgd", {"learning_rate": 0.1})
        begun = module.get_params()
        module.fit(arrays(), num_epoch=2, batch_size=8, seed=5, eval_metric="loss")
        alone = module.get_params()
    for begun_there, params in found:
        assert all(torch.equal(begun_there[name], value) for name, value in begun.items())
        assert distance(params, alone) <= 1e-11
