"""sync_batchnorm over the workers of a job: they train a batch-normalised network as one process does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from measure import distance
from test_promise_batchnorm import perceptron, plainly, residual, with_dropout
from torch import nn

from gangline import Module, cpu
from gangline.collectives import spawn
from gangline.collectives.communicator import Communicator
from gangline.collectives.errors import MismatchError
from gangline.kvstore import KVStore, create
from tests.kvstore.parameter_server.processes import run_job

SIDE, CLASSES = 5, 3
NETWORKS = {made.__name__: made for made in (residual, perceptron, with_dropout)}
OPTIMIZER: Any = {"lr": 0.01, "momentum": 0.9}


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


def made(network: str) -> nn.Module:
    torch.manual_seed(5)
    return NETWORKS[network]().double()


def own(batch: tuple[torch.Tensor, torch.Tensor], sizes: list[int], rank: int) -> Any:
    """Return a worker's part of a batch; None if it is empty."""
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return (batch[0][part], batch[1][part]) if sizes[rank] else (None, None)


def trained(comm: Communicator, network: str, shares: list[list[int]], loads: list[list[float]]) -> list[Any]:
    torch.set_num_threads(1)
    mine = loads[comm.rank]
    contexts = [cpu(index) for index in range(len(mine))]
    store = create("allreduce", communicator=comm)
    with store, Module(made(network), nn.CrossEntropyLoss(), contexts, mine, sync_batchnorm=True) as module:
        module.init_optimizer(store, "sgd", OPTIMIZER)
        for batch, sizes in zip(batches(shares), shares, strict=True):
            module.forward_backward_update(*own(batch, sizes, comm.rank))
        replicas = [replica.network.state_dict() for replica in module.bound.replicas.all]
        return [{name: value.clone() for name, value in state.items()} for state in replicas]


CASES = [
    (2, "residual", [[9, 3], [6, 6], [8, 0], [1, 7]], [[1], [1]]),
    pytest.param(3, "perceptron", [[1, 7, 4], [6, 1, 1], [0, 9, 2]], [[1], [3, 1], [1, 0, 2]], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("count", "network", "shares", "loads"), CASES)
def test_float64_weights_and_statistics_after_20_steps_are_those_of_one_process(
    count: int, network: str, shares: list[list[int]], loads: list[list[float]]
) -> None:
    shares = (shares * 20)[:20]
    expected = plainly(made(network), batches(shares))
    for replicas in spawn(trained, count, network, shares, loads):
        for state in replicas:
            assert distance(state, expected) <= 1e-11
            assert all(torch.equal(value, replicas[0][name]) for name, value in state.items())


@pytest.mark.slow
def test_random_layers_between_repeat_bit_for_bit() -> None:
    shares = [[4, 2], [0, 5], [3, 3]]
    first, again = (spawn(trained, 2, "with_dropout", shares, [[2, 1], [1]]) for _ in range(2))
    assert all(torch.equal(value, again[0][0][name]) for name, value in first[0][0].items())


def fitted(kvstore: str | KVStore | None, accumulate: int) -> dict[str, torch.Tensor]:
    """Train 7 epochs with partial last batches, of which a worker may have no sample, and ignored labels."""
    [(data, label)] = batches([[37]])
    label[torch.arange(37) % 5 == 0] = -100
    with Module(made("residual"), nn.CrossEntropyLoss(), cpu(), sync_batchnorm=True) as module:
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


def by_servers() -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, create("dist_sync") as store:
        patch.setenv("GANGLINE_WORK_LOAD_LIST", "3,1")
        return fitted(store, accumulate=3)


@pytest.mark.slow
def test_workers_of_servers_accumulate_as_one_process() -> None:
    expected = fitted(None, accumulate=3)
    for params in run_job(by_servers, 2, 1):
        assert distance(params, expected) <= 1e-11


def refused_by_servers() -> str:
    with create("dist_async") as store, Module(made("residual"), None, cpu(), sync_batchnorm=True) as module:
        with pytest.raises(ValueError, match="asynchronous") as refused:
            module.init_optimizer(store)
        return str(refused.value)


def test_asynchronous_workers_are_refused() -> None:
    for text in run_job(refused_by_servers, 2, 1):
        assert text.startswith("sync_batchnorm=True needs 2 workers in step")


def fitted_in_a_job(comm: Communicator) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, create("allreduce", communicator=comm) as store:
        patch.setenv("GANGLINE_WORK_LOAD_LIST", "1,0,4")
        return fitted(store, accumulate=1)


@pytest.mark.slow
def test_fit_with_a_worker_that_never_has_samples_is_that_of_one_process() -> None:
    expected = fitted(None, accumulate=1)
    for params in spawn(fitted_in_a_job, 3):
        assert distance(params, expected) <= 1e-11


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
