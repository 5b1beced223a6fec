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
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gangline import Communicator, DistributedOptimizer, spawn
from gangline.kvstore import KVStore, create
from gangline.kvstore.reducer import reducer
from tests.kvstore.keyed import Told, work
from tests.kvstore.parameter_server.processes import run_job

STEPS, SIZES = 6, (5, 2)
Weights = list[torch.Tensor]


class Branches(nn.Module):
    """Network with two halves, of which a batch uses one, and a layer that none uses."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Linear(5, 4)
        self.left, self.right, self.unused = (nn.Linear(4, 3) for _ in range(3))
        self.double()

    def forward(self, data: torch.Tensor, goes_left: bool) -> torch.Tensor:
        output: torch.Tensor = (self.left if goes_left else self.right)(self.stem(data).tanh())
        return output


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return data, labels and the half of a worker's batch; worker 1 has none in step 3."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    size = 0 if (step, rank) == (3, 1) else SIZES[rank]
    data = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return data, torch.randint(3, (size,), generator=generator), (step + rank) % 2 == 0


def mean_loss(model: nn.Module, own: tuple[torch.Tensor, torch.Tensor, bool]) -> torch.Tensor:
    data, label, goes_left = own
    return F.cross_entropy(model(data, goes_left), label)


def backward(model: nn.Module, optimizer: Any, step: int) -> None:
    """Run one backward; alone, the loss is the mean over the samples of all workers."""
    if isinstance(optimizer, DistributedOptimizer) and optimizer.kvstore.num_workers > 1:
        own = batch(step, optimizer.kvstore.rank)
        optimizer.weight = len(own[0])
        if len(own[0]):
            mean_loss(model, own).backward()  # type: ignore[no-untyped-call]
        else:
            optimizer.synchronize()
        return
    batches = [own for rank in range(2) if len((own := batch(step, rank))[0])]
    total = sum(len(data) for data, _, _ in batches)
    sum(mean_loss(model, own) * len(own[0]) / total for own in batches).backward()  # type: ignore[union-attr]


def closures(model: nn.Module, optimizer: Any) -> None:
    def closure(step: int) -> float:
        optimizer.zero_grad()
        backward(model, optimizer, step)
        return float(step)

    for step in range(STEPS):
        assert optimizer.step(lambda step=step: closure(step)) == step


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01),
    "adam": lambda model: torch.optim.Adam(
        [{"params": model.stem.parameters(), "lr": 0.01}, {"params": [*model.left.parameters()]}, *rest(model)],
        lr=0.02,  # type: ignore[union-attr,operator]
    ),
}


def rest(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": layer.parameters()} for name, layer in model.named_children() if name in ("right", "unused")]


CASES = [("adam", closures), ("sgd", closures)]


def alone(name: str, loop: Callable[..., None]) -> Weights:
    model = Branches()
    loop(model, OPTIMIZERS[name](model))
    return [parameter.detach() for parameter in model.parameters()]


def together(stores: Iterator[KVStore], rank: int) -> list[Weights]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "BUCKET_BYTES", 200)
        for name, loop in CASES:
            with next(stores) as store:
                model = Branches(rank)  # rank 0's weights are used
                loop(model, DistributedOptimizer(OPTIMIZERS[name](model), store))
                found.append([parameter.detach() for parameter in model.parameters()])
    return found


def over_collectives(comm: Communicator) -> list[Weights]:
    return together((create("allreduce", communicator=comm) for _ in CASES), comm.rank)


@pytest.fixture(scope="module")
def told() -> Told:
    return work(2, complex_weights, assigns)


def check(found: list[Weights], cases: list[tuple[str, Callable[..., None]]]) -> None:
    for weights, (name, loop) in zip(found, cases, strict=True):
        for got, expected in zip(weights, alone(name, loop), strict=True):
            assert (got - expected).norm() / expected.norm() <= 1e-12, (name, loop.__name__)


def test_workers_train_as_one_process_with_the_same_loop() -> None:
    first, second = spawn(over_collectives, 2)
    check(first, CASES)
    assert all(
        torch.equal(a, b) for of_a, of_b in zip(first, second, strict=True) for a, b in zip(of_a, of_b, strict=True)
    )


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
    for name, loop in CASES:
        model = Branches()
        inner = OPTIMIZERS[name](model)
        with create("local") as store:
            optimizer = DistributedOptimizer(inner, store)
            loop(model, optimizer)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), alone(name, loop), strict=True))
        assert optimizer.state is inner.state
        assert isinstance(optimizer, torch.optim.Optimizer)


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


def assigns(store: KVStore) -> Weights:
    model = Branches()
    inner = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer = DistributedOptimizer(inner, store)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step != 2)
        optimizer.weight = float(1 + store.rank)
        data, label, _ = batch(step, store.rank) if step != 3 else batch(0, store.rank)
        for one, gradient in zip(model.parameters(), gradients_of(model, data, label), strict=True):
            one.grad = gradient
        optimizer.step()
    return [one.detach() for one in model.parameters()]


def gradients_of(model: nn.Module, data: torch.Tensor, label: torch.Tensor) -> list[Any]:
    return list(torch.autograd.grad(mean_loss(model, (data, label, True)), [*model.parameters()], allow_unused=True))


def test_assigned_gradients_are_averaged_as_those_of_backward(told: Told) -> None:
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(4):
        parts = [gradients_of(model, *batch(step if step != 3 else 0, rank)[:2]) for rank in range(2)]
        for one, first, second in zip(model.parameters(), *parts, strict=True):
            one.grad = None if first is None else (first + 2 * second) / 3
        optimizer.step()
    for weights in told[assigns]:
        for found, expected in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-12)
