"""sync_batchnorm over the workers of a job: they train a batch-normalised network as one process does."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from measure import Watch, gangline_lines
from torch import nn

from gangline import Module, cpu, spawn
from gangline.collectives.communicator import Communicator
from gangline.collectives.errors import MismatchError
from gangline.kvstore import create
from gangline.models.batchnorm.distributed_batchnorm import Moments
from gangline.models.batchnorm.sync_batchnorm import JointBatchNorm, ThreadBarrier, WorkerRounds
from gangline.models.workers import Workers
from tests.collectives.ranks import in_threads
from tests.collectives.simulated_gpus import SimulatedGpuTensor, on_simulated_gpu, simulated_gpus
from tests.kvstore.parameter_server.processes import run_job

SIDE, CLASSES = 5, 3


def refused_by_servers() -> str:
    with create("dist_async") as store, Module(nn.BatchNorm1d(3), None, cpu(), sync_batchnorm=True) as module:
        with pytest.raises(ValueError, match="asynchronous") as refused:
            module.init_optimizer(store)
        return str(refused.value)


@pytest.mark.slow
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


WHEN = ("before", "after", "in backward")


def of_three_workers(comm: Communicator) -> dict[str, Any]:
    return {
        "failing": [failing(comm, when) for when in WHEN],
        "other layers": in_other_layers(comm),
        "refused": refused(comm),
        "warned": warned(comm),
    }


@pytest.fixture(scope="module")
def three() -> list[dict[str, Any]]:
    return spawn(of_three_workers, 3, threads=1)


def failing(comm: Communicator, when: str) -> list[str]:
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


def test_an_error_in_one_worker_is_raised_on_all_and_the_next_batch_works(three: list[dict[str, Any]]) -> None:
    for when, first, second, third in zip(WHEN, *(each["failing"] for each in three), strict=True):
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


def test_workers_in_different_layers_are_an_error_on_all(three: list[dict[str, Any]]) -> None:
    first, second, third = (each["other layers"] for each in three)
    assert first == second == third
    assert "rank 0, replica 0: forward of 'norms.1', rank 1, replica 0: forward of 'norms.0'" in first[0]
    assert "rank 0 is finished, rank 1 is in a layer" in first[1]


def refused(comm: Communicator) -> str:
    store = create("allreduce", communicator=comm)
    with store, Module(nn.BatchNorm1d(3), nn.MSELoss(), cpu(), sync_batchnorm=bool(comm.rank)) as module:
        with pytest.raises(MismatchError) as raised:
            module.init_optimizer(store)
        return str(raised.value)


def test_settings_that_differ_are_an_error_on_all_workers(three: list[dict[str, Any]]) -> None:
    first, second, third = (each["refused"] for each in three)
    assert first == second == third
    assert first.startswith("init_optimizer: sync_batchnorm is False on rank 0, but True on rank 1")


def warned(comm: Communicator) -> list[list[str]]:
    found = []
    for loads, how in (("3,1,1", "own"), ("1.04,1,1", "own"), ("3,1,1", "synchronized"), ("3,1,1", "frozen")):
        with (
            gangline_lines(logging.WARNING) as lines,
            pytest.MonkeyPatch.context() as patch,
            create("allreduce", communicator=comm) as store,
        ):
            patch.setenv("GANGLINE_WORK_LOAD_LIST", loads)
            network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3).train(how != "frozen"))
            with Module(network, nn.MSELoss(), cpu(), sync_batchnorm=how == "synchronized") as module:
                module.init_optimizer(store)
                module.init_optimizer(store)
        found.append(lines)
    return found


def test_unequal_workers_with_statistics_of_their_own_are_warned_of_once(three: list[dict[str, Any]]) -> None:
    [[text], *silent], *others = (each["warned"] for each in three)
    assert silent == [[], [], []]
    assert others == [[[], [], [], []]] * 2
    assert "batch normalization '1' will take mean and variance from each rank's own share" in text
    assert "loads 3, 1, 1" in text
    assert text.endswith("pass sync_batchnorm=True to Module")


class HostWaits(Watch):
    """Records the elements of each copy from a simulated GPU to the host, and of each back that the host waits for."""

    def __init__(self) -> None:
        super().__init__(self._record)
        self.to_host: list[int] = []
        self.to_gpu: list[int] = []

    def _record(self, func: Any, args: Any, _: Any) -> None:
        name, is_on_gpu = func.overloadpacket.__name__, [isinstance(arg, SimulatedGpuTensor) for arg in args[:2]]
        if name in ("_to_copy", "_local_scalar_dense") and is_on_gpu[0]:
            self.to_host.append(args[0].numel())
        if name == "copy_" and is_on_gpu == [False, True]:
            self.to_host.append(args[0].numel())
        if name == "copy_" and is_on_gpu == [True, False] and not (len(args) > 2 and args[2]):
            self.to_gpu.append(args[0].numel())


PARTS = [3, 5, 0]
"""Samples of each worker."""


def normalized_on_gpus(comm: Communicator, stays: bool) -> dict[str, Any]:
    """Run one layer forward on a simulated GPU of each worker, and exchange gradients of its statistics."""
    card = torch.device("cuda", comm.rank)
    layer = nn.BatchNorm1d(4, affine=False)
    layer.running_mean, layer.running_var = (
        on_simulated_gpu(one, comm.rank) for one in (torch.zeros(4), torch.ones(4))
    )
    networks, own = JointBatchNorm([layer]), whole_batch().split(PARTS)[comm.rank]
    with create("allreduce", communicator=comm) as store, torch.no_grad():
        workers = Workers(store)
        rounds, back = (WorkerRounds(workers, name, card if stays else None) for name in ("forward", "backward"))
        with HostWaits() as waits:
            if not len(own):
                rounds.follow(networks.follow)
                back.follow(networks.follow)
                output = own
            else:
                data = on_simulated_gpu(own, comm.rank)
                with rounds.running(), networks.section(ThreadBarrier([0], rounds=rounds), 0):
                    output = layer(data)
                with back.running(), networks.section(ThreadBarrier([0], rounds=back), 0):
                    call: Any = layer.forward
                    moments = call.exchange("backward", Moments(len(own), data[0], data[1]))
                    total = sum(one.mean for one in moments)
            found = {"waits": (waits.to_host, waits.to_gpu)}
        found |= {"output": output.host() if len(own) else own, "mean": layer.running_mean.host()}
        return found | ({"gradient": total.host()} if len(own) else {})


def whole_batch() -> torch.Tensor:
    return torch.randn(sum(PARTS), 4, generator=torch.Generator().manual_seed(3))


@pytest.mark.usefixtures("stream_order")
@pytest.mark.parametrize("nccl", ["", "there is none"])
@pytest.mark.parametrize("stays", [True, False])
def test_moments_stay_on_gpus_where_nccl_takes_them_and_cross_once_elsewhere(stays: bool, nccl: str) -> None:
    whole = nn.BatchNorm1d(4, affine=False)
    expected = whole(whole_batch()).split(PARTS)
    with simulated_gpus(nccl=nccl):
        found = in_threads(3, normalized_on_gpus, stays)
    for rank, of_rank in enumerate(found):
        torch.testing.assert_close(of_rank["output"], expected[rank])
        torch.testing.assert_close(of_rank["mean"], whole.running_mean)
        has_samples = PARTS[rank] > 0
        if has_samples:
            torch.testing.assert_close(of_rank["gradient"], whole_batch()[0] + whole_batch()[3])
        to_host, to_gpu = of_rank["waits"]
        assert to_gpu == []
        if stays and not nccl:
            assert to_host == []
        elif not stays:
            assert to_host == [8, 8] * has_samples  # both moments at once, in forward and in backward
