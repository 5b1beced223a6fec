"""Synchronised batch normalisation: replicas in threads equal one network over the whole batch."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gangline.models.batchnorm.sync_batchnorm import Aborted, JointBatchNorm, ThreadBarrier

pytestmark = pytest.mark.timeout(60)


def in_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each function in a thread of its own; return results or errors."""
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
        return [future.exception() or future.result() for future in futures]


def all_well(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Trained:
    """Run forward and backward over a whole batch or in shares; return outputs and all gradients."""

    def __init__(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], networks: list[nn.Module]) -> None:
        self.networks = networks
        self.values = {"output": torch.cat(outputs).detach()}
        if inputs[0].grad is not None:
            self.values["input"] = torch.cat([each.grad for each in inputs if each.grad is not None])
        for name, parameter in networks[0].named_parameters():
            if parameter.grad is not None:
                self.values[name] = torch.stack([network.get_parameter(name).grad for network in networks]).sum(0)

    def is_close_to(self, whole: Trained, limit: float = 1e-12) -> None:
        assert self.values.keys() == whole.values.keys()
        for name, expected in whole.values.items():
            assert self.values[name].dtype == expected.dtype
            torch.testing.assert_close(self.values[name], expected, rtol=limit, atol=limit, msg=f"{name} differs")
        expected_buffers = dict(whole.networks[0].named_buffers())
        first = dict(self.networks[0].named_buffers())
        for network in self.networks:
            for name, value in network.named_buffers():
                torch.testing.assert_close(value, expected_buffers[name], rtol=limit, atol=limit)
                assert torch.equal(value, first[name])  # the same bits everywhere


def wholly(network: nn.Module, data: torch.Tensor, gradient: torch.Tensor) -> Trained:
    network = copy.deepcopy(network)
    data = data.clone().requires_grad_(data.is_floating_point())
    output = network(data)
    if output.requires_grad:
        output.backward(gradient)
    return Trained([output], [data], [network])


def shared_out(network: nn.Module, data: torch.Tensor, gradient: torch.Tensor, sizes: Sequence[int]) -> Trained:
    networks = [copy.deepcopy(network) for _ in sizes]
    batchnorm = JointBatchNorm(networks)
    inputs = [share.clone().requires_grad_() for share in data.split(list(sizes))]
    gradients = gradient.split(list(sizes))
    there, back = ThreadBarrier(range(len(sizes))), ThreadBarrier(range(len(sizes)))

    def forward(index: int) -> torch.Tensor:
        with batchnorm.forward_section(there, index):
            output: torch.Tensor = networks[index](inputs[index])
            return output

    def backward(index: int) -> None:
        with batchnorm.backward_section(back, index):
            outputs[index].backward(gradients[index])

    outputs = all_well(in_threads([partial(forward, index) for index in range(len(sizes))]))
    if outputs[0].requires_grad:
        all_well(in_threads([partial(backward, index) for index in range(len(sizes))]))
    return Trained(outputs, inputs, networks)


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
    shared_out(network, data, gradient, [2, 6, 1]).is_close_to(wholly(network, data, gradient))


def test_channels_last_shares_keep_their_layout() -> None:
    data = random(5, 3, 4, 2).contiguous(memory_format=torch.channels_last)
    gradient = random(5, 3, 4, 2, seed=2)
    got = shared_out(nn.BatchNorm2d(3).double(), data, gradient, [2, 3])
    got.is_close_to(wholly(nn.BatchNorm2d(3).double(), data, gradient))
    assert got.values["output"].is_contiguous(memory_format=torch.channels_last)


def test_a_large_mean_costs_no_more_digits_than_torchs_own_layer() -> None:
    data, gradient = random(64, 3) + 1e3, random(64, 3, seed=2)
    exact = wholly(nn.BatchNorm1d(3).double(), data.float().double(), gradient.float().double())
    network = nn.BatchNorm1d(3)
    plain = wholly(network, data.float(), gradient.float())
    got = shared_out(network, data.float(), gradient.float(), [40, 24])
    for name, expected in exact.values.items():
        torchs = float((plain.values[name] - expected).norm())
        assert float((got.values[name] - expected).norm()) <= 2 * torchs + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_statistics_in_float32_and_outputs_in_its_own_type(dtype: torch.dtype) -> None:
    data, gradient = random(11, 4, 3).to(dtype), random(11, 4, 3, seed=2).to(dtype)
    network = nn.BatchNorm1d(4)  # float32 weights, as under autocast
    whole, got = wholly(network, data, gradient), shared_out(network, data, gradient, [7, 4])
    got.is_close_to(whole, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(dict(got.networks[1].named_buffers()), dict(whole.networks[0].named_buffers()))
    halved = copy.deepcopy(network).to(dtype)
    shared_out(halved, data, gradient, [7, 4]).is_close_to(wholly(halved, data, gradient), 2 * torch.finfo(dtype).eps)


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
    network[0].running_mean.fill_(0.5)  # type: ignore[union-attr, operator]
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
    shared_out(network, data, gradient, [4, 2, 1]).is_close_to(wholly(network, data, gradient))


def test_torchs_layer_for_process_groups_is_left_alone() -> None:
    networks = [nn.Sequential(nn.SyncBatchNorm(3), nn.BatchNorm1d(3)) for _ in range(2)]
    with JointBatchNorm(networks).forward_section(ThreadBarrier([0, 1]), 0):
        assert "forward" not in vars(networks[0][0])
        assert "forward" in vars(networks[0][1])


def test_a_share_of_which_nothing_reaches_the_layer_takes_part_with_nothing() -> None:
    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, data: torch.Tensor) -> Any:
            return self.norm(data[data[:, 0] > 0])

    network, data = Selecting().double(), random(6, 2).abs()
    data[4:] *= -1
    networks = [copy.deepcopy(network) for _ in range(2)]
    all_well(forwards(networks, [data[:4], data[4:]]))
    network(data)
    for each in networks:
        torch.testing.assert_close(dict(each.named_buffers()), dict(network.named_buffers()))


class Norm(nn.Module):
    """Network with batch normalisation and a function that a test supplies."""

    def __init__(self, *then: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.other, self.then = nn.BatchNorm1d(2), nn.BatchNorm1d(2), then

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for function in self.then:
            data = function(self, data)
        return data


def norm(network: Any, data: torch.Tensor) -> torch.Tensor:
    return network.norm(data)  # type: ignore[no-any-return]


def other(network: Any, data: torch.Tensor) -> torch.Tensor:
    return network.other(data)  # type: ignore[no-any-return]


def fail(network: Any, data: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("a replica's own")


def forwards(
    networks: Sequence[nn.Module], inputs: Sequence[torch.Tensor] | None = None, *, one_after_another: bool = False
) -> list[Any]:
    """Run each network forward in a thread, without inputs on 3 samples; return outputs or errors."""
    batchnorm = JointBatchNorm(networks)
    barrier = ThreadBarrier(range(len(networks)), one_after_another=one_after_another)

    def forward(index: int) -> torch.Tensor:
        with batchnorm.forward_section(barrier, index):
            output: torch.Tensor = networks[index](torch.ones(3, 2) if inputs is None else inputs[index])
            return output

    results = in_threads([partial(forward, index) for index in range(len(networks))])
    assert all("forward" not in vars(layer) for network in networks for layer in network.modules())
    return results


@pytest.mark.parametrize("one_after_another", [False, True])
@pytest.mark.parametrize("failing", [0, 2])
def test_an_error_in_one_replica_ends_the_wait_of_the_others(failing: int, one_after_another: bool) -> None:
    networks = [Norm(norm, fail if index == failing else norm, norm) for index in range(3)]
    results = forwards(networks, one_after_another=one_after_another)
    assert isinstance(results.pop(failing), ZeroDivisionError)
    for result in results:
        assert isinstance(result, Aborted)
        assert "ZeroDivisionError: a replica's own" in str(result)


@pytest.mark.parametrize("one_after_another", [False, True])
@pytest.mark.parametrize("calls", [(1, 2), (0, 1), (3, 3, 2)])
def test_unequally_many_calls_are_an_error(calls: tuple[int, ...], one_after_another: bool) -> None:
    networks = [Norm(*[norm] * count) for count in calls]
    results = forwards(networks, one_after_another=one_after_another)
    errors = [result for result in results if isinstance(result, BaseException)]
    fewest = calls.index(min(calls))
    assert errors
    for error in errors:
        assert type(error) is RuntimeError
        assert "different number of times" in str(error)
        assert f"replica {fewest} after {calls[fewest]}" in str(error)


def test_calls_of_different_layers_are_an_error_on_all() -> None:
    for result in forwards([Norm(norm, other), Norm(other, norm)]):
        assert type(result) is RuntimeError
        assert "0: forward of 'norm', 1: forward of 'other'" in str(result)


def test_one_value_per_channel_is_torchs_error_for_the_whole_batch_only() -> None:
    all_well(forwards([Norm(norm), Norm(norm)], [torch.ones(1, 2)] * 2))
    network = nn.BatchNorm1d(2)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        shared_out(network, torch.ones(1, 2), torch.ones(1, 2), [1, 0])
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        shared_out(network, torch.ones(1, 2), torch.ones(1, 2), [1])
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        shared_out(network, torch.ones(4, 2, 1, 1), torch.ones(4, 2, 1, 1), [2, 2])


@pytest.mark.parametrize("indices", [[], [0, 1]], ids=str)
def test_backward_with_other_replicas_than_forward_is_refused(indices: list[int]) -> None:
    networks = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(3)]
    batchnorm, there, back = JointBatchNorm(networks), ThreadBarrier(range(3)), ThreadBarrier(indices)

    def step(index: int) -> None:
        with batchnorm.forward_section(there, index):
            output = networks[index](random(3, 2).float())
        with ExitStack() as section:
            if index in indices:
                section.enter_context(batchnorm.backward_section(back, index))
            output.sum().backward()

    for error in in_threads([partial(step, index) for index in range(3)]):
        assert type(error) is RuntimeError
        assert "joint statistics of replicas [0, 1, 2]" in str(error)


def test_a_layer_with_a_forward_of_its_own_is_refused_by_name() -> None:
    class Own(nn.BatchNorm1d):
        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return super().forward(data).relu()

    with pytest.raises(ValueError, match=r"layer 'deep\.0' is a Own with a forward of its own"):
        JointBatchNorm([nn.ModuleDict({"deep": nn.Sequential(Own(3))})])


def test_nothing_is_left_on_the_network() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh()).double()
    got = shared_out(network, random(4, 2), random(4, 3), [2, 2])
    pickle.loads(pickle.dumps(got.networks[1]))
    first = weakref.ref(got.networks[0])
    del got
    gc.collect()
    assert first() is None


def test_a_participant_that_arrives_after_an_error_does_not_wait() -> None:
    barrier = ThreadBarrier([0, 1])
    barrier.abort(ValueError("early"))
    with pytest.raises(Aborted, match="ValueError: early") as caught:
        barrier.exchange(1, None)
    assert isinstance(caught.value.__cause__, ValueError)
