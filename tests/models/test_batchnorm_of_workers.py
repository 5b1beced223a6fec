"""sync_batchnorm over the workers of a job: they train a batch-normalised network as one process does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from measure import distance
from test_promise_batchnorm import residual, with_dropout
from torch import nn

from gangline import Module, cpu, spawn
from gangline.collectives.communicator import Communicator
from gangline.collectives.errors import MismatchError
from gangline.kvstore import KVStore, create
from tests.kvstore.parameter_server.processes import run_job

SIDE, CLASSES = 5, 3
OPTIMIZER: Any = {"lr": 0.01, "momentum": 0.9}


def network() -> nn.Module:
    torch.manual_seed(5)
    return residual().double()


def trained(comm: Communicator) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    shares, rank = [[4, 2], [0, 5], [3, 3]], comm.rank
    torch.manual_seed(5)
    store, made, contexts = create("allreduce", communicator=comm), with_dropout().double(), [cpu(0), cpu(1)]
    with store, Module(made, nn.CrossEntropyLoss(), contexts[: 2 - rank], sync_batchnorm=True) as module:
        module.init_optimizer(store, "sgd", OPTIMIZER)
        for (data, label), sizes in zip(batches(shares), shares, strict=True):
            part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            module.forward_backward_update(*((data[part], label[part]) if sizes[rank] else (None, None)))
        return module.get_params()


@pytest.mark.slow
def test_random_layers_between_repeat_bit_for_bit() -> None:
    first, again = (spawn(trained, 2) for _ in range(2))
    assert all(torch.equal(value, again[0][name]) for name, value in first[0].items())


def batches(shares: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return one batch for each list of workers' shares."""
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(sum(sizes), 1, SIDE, SIDE, generator=generator, dtype=torch.float64),
            torch.randint(CLASSES, (sum(sizes),), generator=generator),
        )
        for sizes in shares
    ]


def fitted(kvstore: str | KVStore | None, accumulate: int) -> dict[str, torch.Tensor]:
    """Train 7 epochs with partial last batches, of which a worker may have no sample, and ignored labels."""
    [(data, label)] = batches([[37]])
    label[torch.arange(37) % 5 == 0] = -100
    with Module(network(), nn.CrossEntropyLoss(), cpu(), sync_batchnorm=True) as module:
        module.fit(
            (data, label),
            num_epoch=7,
            seed=5,
            batch_size=12,
            accumulate=accumulate,
            kvstore=kvstore,
            optimizer="sgd",
            optimizer_params=OPTIMIZER,
        )
        return module.get_params()


def fitted_in_a_job(comm: Communicator | None, loads: str, accumulate: int) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    store = create("dist_sync") if comm is None else create("allreduce", communicator=comm)
    with pytest.MonkeyPatch.context() as patch, store:
        patch.setenv("GANGLINE_WORK_LOAD_LIST", loads)
        return fitted(store, accumulate)


@pytest.mark.slow
def test_fit_with_servers_and_with_a_worker_that_never_has_samples_is_that_of_one_process() -> None:
    expected = fitted(None, accumulate=3)
    for params in run_job(fitted_in_a_job, 2, 1, None, "3,1", 3):
        assert distance(params, expected) <= 1e-11
    expected = fitted(None, accumulate=1)
    for params in spawn(fitted_in_a_job, 3, "1,0,4", 1):
        assert distance(params, expected) <= 1e-11


def refused_by_servers() -> str:
    with create("dist_async") as store, Module(network(), None, cpu(), sync_batchnorm=True) as module:
        with pytest.raises(ValueError, match="asynchronous") as refused:
            module.init_optimizer(store)
        return str(refused.value)


def test_asynchronous_workers_are_refused() -> None:
    for text in run_job(refused_by_servers, 2, 1):
        assert text.startswith("sync_batchnorm=True needs 2 workers in step")


class Picky(nn.Module):
    """Network that raises an error for values that are not numbers, before or after its normalization."""

    def fail(self, *_: Any) -> None:
        raise ValueError("not a number")

    def __init__(self, when: str) -> None:
        super().__init__()
        self.norm, self.linear, self.when = nn.BatchNorm1d(SIDE * SIDE), nn.Linear(SIDE * SIDE, CLASSES), when

    def forward(self, data: torch.Tensor) -> Any:
        fails = bool(data.isnan().any())
        if fails and self.when == "before":
            self.fail()
        data = self.norm(data.flatten(1))
        if fails and self.when == "after":
            self.fail()
        if fails:
            data.register_hook(self.fail)
        return self.linear(data)


def failing(comm: Communicator, when: str) -> list[str]:
    torch.set_num_threads(1)
    store, found = create("allreduce", communicator=comm), []
    contexts = [cpu(index) for index in range(1 + comm.rank)]  # three workers, the last one without samples
    with store, Module(Picky(when), nn.CrossEntropyLoss(), contexts, sync_batchnorm=True) as module:
        module.init_optimizer(store, "sgd", {"lr": 0.01})
        data, label = torch.ones(4, 1, SIDE, SIDE), torch.zeros(4, dtype=torch.int64)
        for spoilt in (False, True, False):
            batch = (data.clone(), label) if comm.rank < 2 else (None, None)
            if spoilt and comm.rank == 1:
                batch[0][-1] = torch.nan  # type: ignore[index]
            try:
                module.forward_backward_update(*batch)
            except ValueError as error:
                found.append(f"{error}; {error.__notes__}")
        return [*found, str(module.network.norm.num_batches_tracked.item())]


@pytest.mark.parametrize("when", ["before", "after", "in backward"])
def test_an_error_in_one_worker_is_raised_on_all_and_the_next_batch_works(when: str) -> None:
    first, second, third = spawn(failing, 3, when)
    for text, batches_seen in (first, third):
        direction = "backward" if when == "in backward" else "forward"
        assert text.startswith(f"not a number; ['Rank 1 raised this error in {direction}.'")
        assert int(batches_seen) == (2 if when == "before" else 3)
    assert "in the replica on cpu(1)" in second[0]


class Fickle(nn.Module):
    """Network that calls its layer more often on one rank, or two layers in another order."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.norms, self.order = nn.ModuleList(nn.BatchNorm1d(2) for _ in range(2)), order

    def forward(self, data: torch.Tensor) -> Any:
        for index in self.order:
            data = self.norms[index](data)
        return data


def in_other_layers(comm: Communicator) -> list[str]:
    found = []
    for order in ([0, 1] if comm.rank else [1, 0], [0] * (comm.rank + 1)):  # rank 2 has no samples
        store = create("allreduce", communicator=comm)
        with store, Module(Fickle(order), nn.MSELoss(), cpu(), sync_batchnorm=True) as module:
            module.init_optimizer(store, "sgd", {"lr": 0.01})
            with pytest.raises(RuntimeError) as raised:
                module.forward_backward_update(
                    *((torch.randn(3, 2), torch.randn(3, 2)) if comm.rank < 2 else (None, None))
                )
            found.append(str(raised.value))
    return found


def test_workers_in_different_layers_are_an_error_on_all() -> None:
    first, second, third = spawn(in_other_layers, 3)
    assert first == second == third
    assert "rank 0, replica 0: forward of 'norms.1', rank 1, replica 0: forward of 'norms.0'" in first[0]
    assert "rank 0 is finished, rank 1 is in a layer" in first[1]


def refused(comm: Communicator) -> list[str]:
    network, found = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), []
    store = create("allreduce", communicator=comm)
    with store, Module(network, nn.MSELoss(), cpu(), sync_batchnorm=bool(comm.rank)) as module:
        with pytest.raises(MismatchError) as raised:
            module.init_optimizer(store)
        found.append(str(raised.value))
    store = create("allreduce", communicator=comm)
    with store, Module(network, nn.MSELoss(), cpu(), sync_batchnorm=True) as module:
        module.init_optimizer(store)
        with pytest.raises(ValueError, match="Expected more than 1 value per channel") as one_value:
            module.forward_backward_update(*((torch.ones(1, 2), torch.ones(1, 3)) if comm.rank else (None, None)))
        found.append(str(one_value.value))
    return found


def test_settings_that_differ_and_a_batch_of_one_value_are_errors_on_all_workers() -> None:
    first, second = spawn(refused, 2)
    assert first == second
    assert first[0].startswith("init_optimizer: sync_batchnorm is False on rank 0, but True on rank 1")


def warned(comm: Communicator, loads: str, synchronized: bool) -> list[str]:
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gangline").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch, create("allreduce", communicator=comm) as store:
        patch.setenv("GANGLINE_WORK_LOAD_LIST", loads)
        network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        with Module(network, nn.MSELoss(), cpu(), sync_batchnorm=synchronized) as module:
            module.init_optimizer(store)
            module.init_optimizer(store)
    logging.getLogger("gangline").removeHandler(handler)
    return texts


def test_unequal_workers_with_statistics_of_their_own_are_warned_of_once() -> None:
    (text,), others = spawn(warned, 2, "3,1", False)
    assert others == []
    assert "batch normalization '1' will take mean and variance from each rank's own share" in text
    assert "loads 3, 1" in text
    assert text.endswith("pass sync_batchnorm=True to Module")
    assert spawn(warned, 2, "1,1", False) == [[], []]
    assert spawn(warned, 2, "3,1", True) == [[], []]
