"""`DistributedOptimizer`: workers train as one process with the same torch optimizer does on all their samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gangline import Communicator, DistributedOptimizer, spawn
from gangline.kvstore import KVStore, create
from tests.kvstore.keyed import Told, work
from tests.kvstore.parameter_server.processes import run_job


@pytest.fixture(scope="module")
def told() -> Told:
    return work(2, complex_weights, assigns)


def complex_weights(store: KVStore) -> torch.Tensor:
    weight = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j], dtype=torch.complex128))
    optimizer = DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), store)
    (weight * torch.tensor([1, 2j]) * (store.rank + 1)).abs().square().sum().backward()
    optimizer.step()
    return weight.detach()


def test_gradients_of_complex_weights_are_averaged(told: Told) -> None:
    for weight in told[complex_weights]:  # the mean gradient is [5 + 5j, 40 - 20j]
        torch.testing.assert_close(weight, torch.tensor([0.5 + 0.5j, -2 + 1j], dtype=torch.complex128))


def test_alone_it_is_the_wrapped_optimizer_bit_for_bit() -> None:
    weights = []
    for wrap in (lambda optimizer: optimizer, lambda optimizer: DistributedOptimizer(optimizer, "local")):
        torch.manual_seed(0)
        layer = nn.Linear(5, 3)
        inner = torch.optim.Adam([{"params": [layer.weight], "lr": 0.01}, {"params": [layer.bias]}], lr=0.02)
        optimizer = wrap(inner)

        def closure(step: float) -> float:
            optimizer.zero_grad()  # noqa: B023
            layer(torch.full((2, 5), float(step))).square().mean().backward()  # noqa: B023
            return step

        for step in range(4):
            assert optimizer.step(lambda step=step: closure(step)) == step
        weights.append(nn.utils.parameters_to_vector(layer.parameters()).detach())
        assert optimizer.state is inner.state
        assert isinstance(optimizer, torch.optim.Optimizer)
    assert torch.equal(*weights)


def refused(comm: Communicator) -> list[str]:
    found = []
    layer = nn.Linear(2, 1)

    def said(call: Callable[[], Any]) -> None:
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            call()
        found.append(f"{type(caught.value).__name__}: {caught.value}")

    def sgd(network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(network.parameters(), lr=0.1)

    @contextmanager
    def distributed(network: nn.Module) -> Iterator[DistributedOptimizer]:
        with create("allreduce", communicator=comm) as store:
            optimizer = DistributedOptimizer(sgd(network), store)
            yield optimizer
            optimizer.close()

    with create("allreduce", communicator=comm) as store:
        said(lambda: DistributedOptimizer(torch.optim.LBFGS(layer.parameters()), store))
        said(lambda: DistributedOptimizer("sgd", store))  # type: ignore[arg-type]
        said(lambda: DistributedOptimizer(sgd(layer), None))  # type: ignore[arg-type]
        store.set_optimizer(("sgd", {"learning_rate": 0.1}))
        said(lambda: DistributedOptimizer(sgd(layer), store))
    with distributed(layer) as optimizer:
        said(lambda: setattr(optimizer, "weight", -1.0))
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with distributed(two):
        hidden = checkpoint(two[0], torch.ones(1, 2, requires_grad=True), use_reentrant=True)
        said(lambda: two[1](hidden).sum().backward())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in two.parameters())
    with distributed(layer) as optimizer:
        optimizer.kvstore.set_gradient_compression({"type": "fp16"})
        said(lambda: layer(torch.ones(1, 2)).sum().backward())
    return found


def test_a_state_and_groups_that_are_assigned_are_those_of_the_wrapped_optimizer() -> None:
    weights = []
    for wrap in (lambda optimizer: optimizer, lambda optimizer: DistributedOptimizer(optimizer, "local")):
        weight = nn.Parameter(torch.ones(3))
        optimizer = wrap(torch.optim.SGD([weight], 0.1, momentum=0.9))
        for step in range(4):
            weight.grad = torch.ones(3)
            optimizer.step()
            if step == 1:
                optimizer.state = defaultdict(dict)
            elif step == 2:
                optimizer.param_groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
        weights.append(weight.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize("clips", [True, False])
def test_a_fused_optimizer_takes_unscaled_gradients_and_skips_steps_that_overflow(clips: bool) -> None:
    weights = []
    for wrap in (lambda optimizer: optimizer, lambda optimizer: DistributedOptimizer(optimizer, "local")):
        weight = nn.Parameter(torch.ones(3))
        optimizer = wrap(torch.optim.SGD([weight], 0.1, fused=True))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, math.inf, 2.0):
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_([weight], 1.0)
            scaler.step(optimizer)
            scaler.update()
        weights.append(weight.detach())
        assert scaler.get_scale() == 512
    torch.testing.assert_close(weights[1], weights[0])


def test_what_cannot_be_exact_is_refused_by_name() -> None:
    words = [
        "ValueError: optimizer LBFGS cannot be distributed: it searches along a line",
        "TypeError: optimizer is a str",
        "TypeError: kvstore is None",
        "ValueError: the 'allreduce' store runs an optimizer of its own",
        "ValueError: weight is -1.0",
        "RuntimeError: a backward began inside another one",
        "ValueError: the 'allreduce' store compresses",
    ]
    for found in spawn(refused, 2):
        assert [text[: len(expected)] for text, expected in zip(found, words, strict=True)] == words


def over_async_servers() -> str:
    with create("dist_async") as store, pytest.raises(ValueError, match="'dist_async' store") as caught:
        DistributedOptimizer(torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1), store)
    return str(caught.value)


@pytest.mark.slow
def test_stores_that_add_up_different_steps_are_refused() -> None:
    first, second = run_job(over_async_servers, 2, 1)
    assert first == second


def assigns(store: KVStore) -> list[list[float]]:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = DistributedOptimizer(torch.optim.SGD(weights, 1.0), store)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        optimizer.weight = float(1 + store.rank)
        for weight in weights[: 2 if store.rank else 1]:  # the second has none on rank 0, the third none at all
            weight.grad = torch.full((2,), 3.0 * store.rank - step)
        optimizer.step()
    return [weight.tolist() for weight in weights]


def test_assigned_gradients_are_averaged_as_those_of_backward(told: Told) -> None:
    for found in told[assigns]:
        torch.testing.assert_close(torch.tensor(found), torch.tensor([[-3.0, -3.0], [-4.0, -4.0], [0.0, 0.0]]))
