"""Synchronised batch normalisation: contexts and workers equal one network over the whole batch."""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import pytest
import torch
from measure import Watch, contexts, gangline_lines
from torch import nn
from torch.utils.checkpoint import checkpoint

from gangline import Module, cpu, spawn
from gangline.collectives.communicator import Communicator
from gangline.collectives.errors import MismatchError
from gangline.kvstore import create
from gangline.models.batchnorm.distributed_batchnorm import Moments
from gangline.models.batchnorm.sync_batchnorm import Aborted, JointBatchNorm, ThreadBarrier, WorkerRounds
from gangline.models.workers import Workers
from tests.collectives.ranks import in_threads
from tests.collectives.simulated_gpus import SimulatedGpuTensor, on_simulated_gpu, simulated_gpus
from tests.kvstore.parameter_server.processes import run_job

pytestmark = pytest.mark.timeout(60)
Values = dict[str, torch.Tensor]


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def joint(network: nn.Module, loads: Sequence[float]) -> Module:
    return Module(copy.deepcopy(network), None, contexts(len(loads)), list(loads), sync_batchnorm=True)


def wholly(network: nn.Module, data: torch.Tensor, gradient: torch.Tensor) -> list[Values]:
    """Run two passes over the whole batch; return outputs, gradients and buffers of each."""
    network, found = copy.deepcopy(network), []
    for _ in range(2):
        network.zero_grad()
        given = data.clone().requires_grad_()
        output = network(given)
        output.backward(gradient)
        values = {"output": output.detach(), "input": torch.zeros_like(data) if given.grad is None else given.grad}
        values |= {name: one.clone() for name, one in network.named_buffers()}
        gradients = {name: one.grad for name, one in network.named_parameters()}
        found.append(values | {f"gradient of {name}": one for name, one in gradients.items() if one is not None})
    return found


def shared_out(network: nn.Module, data: torch.Tensor, gradient: torch.Tensor, loads: Sequence[float]) -> list[Values]:
    """Run the same two passes in shares."""
    found = []
    with joint(network, loads) as module:
        module.bind(tuple(data.shape), inputs_need_grad=True)
        replicas = [replica.network for replica in module.bound.replicas.all]
        for _ in range(2):
            for replica in replicas:
                replica.zero_grad()
            module.forward(data)
            values = {"output": module.get_outputs()}
            module.backward(gradient)
            values |= {"input": module.get_input_grads(), **dict(replicas[0].named_buffers())}
            for name, parameter in replicas[0].named_parameters():
                if parameter.grad is not None:
                    values[f"gradient of {name}"] = sum(one.get_parameter(name).grad for one in replicas)
            found.append({name: one.clone() for name, one in values.items()})
            for other in replicas[1:]:  # the same bits everywhere, and plain layers
                assert all(torch.equal(one, other.get_buffer(name)) for name, one in replicas[0].named_buffers())
                pickle.loads(pickle.dumps(other))
    return found


def check(network: nn.Module, data: torch.Tensor, gradient: torch.Tensor, loads: Sequence[float], limit: float) -> None:
    for found, expected in zip(
        shared_out(network, data, gradient, loads), wholly(network, data, gradient), strict=True
    ):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype
            torch.testing.assert_close(found[name], value, rtol=limit, atol=limit, msg=f"{name} differs")


@pytest.mark.parametrize(
    ("layer", "shape", "arguments"),
    [
        (nn.BatchNorm1d, (), {}),
        (nn.BatchNorm1d, (4,), {"momentum": None}),
        (nn.BatchNorm2d, (3, 2), {"momentum": 0.7, "eps": 0.3}),
        (nn.BatchNorm3d, (2, 1, 3), {"affine": False}),
        (nn.BatchNorm2d, (2, 2), {"bias": False} if "bias" in signature(nn.BatchNorm2d).parameters else {"eps": 0.1}),
        (nn.BatchNorm1d, (), {"track_running_stats": False}),
    ],
)
def test_every_kind_and_option_is_torchs(
    layer: Callable[..., nn.Module], shape: tuple[int, ...], arguments: dict[str, Any]
) -> None:
    network = nn.Sequential(layer(5, **arguments), layer(5, **arguments)).double()
    data, gradient = 3 * random(9, 5, *shape) + 2, random(9, 5, *shape, seed=2)
    for parameter in network.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    check(network, data, gradient, [2, 6, 1], 1e-12)


def test_channels_last_shares_keep_their_layout() -> None:
    data = random(5, 3, 4, 2).contiguous(memory_format=torch.channels_last)
    with joint(nn.BatchNorm2d(3).double(), [2, 3]) as module:
        module.forward(data)
        torch.testing.assert_close(module.get_outputs(), nn.BatchNorm2d(3).double()(data), rtol=1e-12, atol=1e-12)
        assert module.get_outputs().is_contiguous(memory_format=torch.channels_last)


def test_a_large_mean_costs_no_more_digits_than_torchs_own_layer() -> None:
    data, gradient = random(64, 3).float() + 1e3, random(64, 3, seed=2).float()
    exact = wholly(nn.BatchNorm1d(3).double(), data.double(), gradient.double())[0]
    plain = wholly(nn.BatchNorm1d(3), data, gradient)[0]
    got = shared_out(nn.BatchNorm1d(3), data, gradient, [40, 24])[0]
    for name, expected in exact.items():
        torchs = float((plain[name] - expected).double().norm())
        assert float((got[name] - expected).double().norm()) <= 2 * torchs + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_statistics_in_float32_and_outputs_in_its_own_type(dtype: torch.dtype) -> None:
    data, gradient = random(11, 4, 3).to(dtype), random(11, 4, 3, seed=2).to(dtype)
    network = nn.BatchNorm1d(4)  # float32 weights, as under autocast
    check(network, data, gradient, [7, 4], 2 * torch.finfo(dtype).eps)
    got, whole = shared_out(network, data, gradient, [7, 4])[1], wholly(network, data, gradient)[1]
    for name, _ in network.named_buffers():
        torch.testing.assert_close(got[name], whole[name])
    check(network.to(dtype), data, gradient, [7, 4], 2 * torch.finfo(dtype).eps)


class Twice(nn.Module):
    """Calls a layer twice, the first time before anything is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, data: torch.Tensor) -> Any:
        return self.norm(self.linear(self.norm(data.detach())))


class Checkpointed(nn.Module):
    """Computes its layers again in backward, which updates running statistics twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4))
        self.second = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))

    def forward(self, data: torch.Tensor) -> Any:
        hidden = checkpoint(self.first, data, use_reentrant=True)
        return checkpoint(self.second, hidden, use_reentrant=True)


def partly_frozen() -> nn.Module:
    other_norm = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.InstanceNorm1d(1, affine=True), nn.Flatten())
    network = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), other_norm)
    network[0].running_mean.fill_(0.5)  # type: ignore[operator]
    network[0].eval()
    return network


@pytest.mark.parametrize(
    "make",
    [
        partly_frozen,
        lambda: nn.BatchNorm1d(3, track_running_stats=False).eval(),  # torch then uses the batch's statistics
        lambda: nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(3, 3)),
        Twice,
        Checkpointed,
    ],
    ids=["frozen", "frozen without statistics", "lazy", "called twice", "recomputed"],
)
def test_other_layers_equal_one_network_over_the_whole_batch(make: Callable[[], nn.Module]) -> None:
    network, data, gradient = make().double(), random(7, 3), random(7, 3, seed=2)
    network(random(2, 3).requires_grad_())  # gives a lazy layer its shape
    check(network, data, gradient, [4, 2, 1], 1e-12)


def test_torchs_layer_for_process_groups_is_left_alone() -> None:
    networks = [nn.Sequential(nn.SyncBatchNorm(3), nn.BatchNorm1d(3)) for _ in range(2)]
    with JointBatchNorm(networks).section(ThreadBarrier([0, 1]), 0):
        assert "forward" not in vars(networks[0][0])
        assert "forward" in vars(networks[0][1])


class Chosen(nn.Module):
    """Runs the layers that the first number of its share stands for; copies share the choices."""

    def __init__(self, *choices: str) -> None:
        super().__init__()
        self.n, self.o = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
        self.choices = choices

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for layer in self.choices[int(data[0, 0])]:
            if layer == "!":
                raise ZeroDivisionError("a replica's own")
            data = self.get_submodule(layer)(data)
        return data


@pytest.mark.parametrize(
    ("choices", "error", "text"),
    [
        (("n!n", "nnn", "nnn"), ZeroDivisionError, "a replica's own"),
        (("nnn", "nnn", "n!n"), ZeroDivisionError, "a replica's own"),
        (("n", "nn"), RuntimeError, "different number of times.*replica 0 after 1"),
        (("", "n"), RuntimeError, "different number of times.*replica 0 after 0"),
        (("nnn", "nnn", "nn"), RuntimeError, "different number of times.*replica 2 after 2"),
        (("no", "on"), RuntimeError, "0: forward of 'n', 1: forward of 'o'"),
    ],
)
def test_replicas_that_fail_or_differ_end_the_waits_of_all_and_the_next_batch_works(
    choices: tuple[str, ...], error: type[Exception], text: str
) -> None:
    shares = torch.arange(len(choices)).repeat_interleave(3)[:, None].expand(-1, 2).double()
    with joint(Chosen(*choices, "n").double(), [1] * len(choices)) as module:
        for _ in range(2):
            with pytest.raises(error, match=text):
                module.forward(shares)
            for replica in module.bound.replicas.all:
                pickle.loads(pickle.dumps(replica.network))
            module.forward(torch.full_like(shares, len(choices)))


@pytest.mark.parametrize(("layer", "is_refused"), [(nn.Dropout(0.5), False), (nn.RReLU(), True)])
def test_contexts_that_share_a_generator_draw_from_it_by_dropout_alone(layer: nn.Module, is_refused: bool) -> None:
    found = []
    for _ in range(2):
        with joint(nn.Sequential(nn.BatchNorm1d(2), layer).double(), [1, 1]) as module, contextlib.ExitStack() as stack:
            if is_refused:
                message = "from a generator that its contexts share; start a process for each context"
                stack.enter_context(pytest.raises(RuntimeError, match=message))
            module.forward(random(8, 2))
            found.append(module.get_outputs())
    assert [torch.equal(found[0], one) for one in found[1:]] == [True] * (not is_refused)


def test_a_share_of_which_nothing_reaches_the_layer_takes_part_with_nothing() -> None:
    class Selecting(nn.Sequential):
        def forward(self, data: torch.Tensor) -> Any:
            return super().forward(data[data[:, 0] > 0])  # type: ignore[no-untyped-call]

    network, data = Selecting(nn.BatchNorm1d(2)).double(), random(6, 2).abs()
    data[4:] *= -1
    with joint(network, [2, 1]) as module:
        module.forward(data)
        network(data)
        for replica in module.bound.replicas.all:
            torch.testing.assert_close(dict(replica.network.named_buffers()), dict(network.named_buffers()))


def test_one_value_per_channel_is_torchs_error_for_the_whole_batch_only() -> None:
    with joint(nn.BatchNorm1d(2), [1, 1]) as module:
        module.forward(torch.ones(2, 2))
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            module.forward(torch.ones(1, 2))
        with pytest.raises(ValueError, match="expected 2D or 3D input"):
            module.forward(torch.ones(4, 2, 1, 1))


def test_a_layer_with_a_forward_of_its_own_is_refused_by_name() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return super().forward(data).relu()

    network = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Own(3)))
    with (
        joint(network, [1, 1]) as module,
        pytest.raises(ValueError, match=r"layer '1\.0' is a Own with a forward of its"),
    ):
        module.bind((4, 3))


def test_a_participant_that_arrives_after_an_error_does_not_wait() -> None:
    barrier = ThreadBarrier([0, 1])
    barrier.abort(ValueError("early"))
    with pytest.raises(Aborted, match="ValueError: early") as caught:
        barrier.exchange(1, None)
    assert isinstance(caught.value.__cause__, ValueError)


# Over the workers of a job


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
