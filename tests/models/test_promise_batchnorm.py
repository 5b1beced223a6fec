"""Equivalence guarantee with sync_batchnorm: k contexts train a batch-normalised network as one device does.

The reference is a plain torch loop over the whole batches, without gangline's code. Running statistics
are compared too, because whole state dicts are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from measure import distance, replicas_are_equal, same_bits
from torch import nn

from gangline import Module, cpu

SIDE, CLASSES = 5, 3
Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Block(nn.Module):
    """A residual block, as in a ResNet."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, data: torch.Tensor) -> Any:
        return torch.relu(self.main(data) + self.shortcut(data))


def residual() -> nn.Module:
    stem = [nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, CLASSES)]
    return nn.Sequential(*stem, Block(4, 4, 1), Block(4, 6, 2), *head)


def with_dropout() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(0.3),
        nn.Linear(8, CLASSES),
    )


def job(network: Callable[[], nn.Module], sizes: list[int], dtype: torch.dtype, seed: int) -> tuple[nn.Module, Batches]:
    torch.manual_seed(seed)
    made = network().to(dtype)
    generator = torch.Generator().manual_seed(seed)
    batches = [
        (
            torch.randn(size, 1, SIDE, SIDE, generator=generator, dtype=torch.float64).to(dtype),
            torch.randint(CLASSES, (size,), generator=generator),
        )
        for size in sizes
    ]
    return made, batches


def plainly(network: nn.Module, batches: Batches, loss: nn.Module | None = None) -> dict[str, torch.Tensor]:
    network, loss = copy.deepcopy(network), loss or nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    for data, label in batches:
        optimizer.zero_grad()
        loss(network(data), label).backward()
        optimizer.step()
    return network.state_dict()


def by_module(
    network: nn.Module, batches: Batches, loads: list[float], loss: nn.Module | None = None
) -> dict[str, torch.Tensor]:
    contexts = [cpu(index) for index in range(len(loads))]
    network, loss = copy.deepcopy(network), loss or nn.CrossEntropyLoss()
    with Module(network, loss, contexts, loads, sync_batchnorm=True) as module:
        module.init_optimizer("device", "sgd", {"lr": 0.01, "momentum": 0.9})
        for data, label in batches:
            module.forward_backward_update(data, label)
        replicas_are_equal(module)
        return module.get_params()


def test_a_share_without_a_loss_of_its_own_still_counts_through_the_statistics() -> None:
    class Masked(nn.Module):
        def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            keep = label > 0
            return nn.functional.cross_entropy(output[keep], label[keep])

    made, [(data, _)] = job(residual, [6], torch.float64, 6)
    label = torch.tensor([1, 2, 2, 0, 0, 0])
    ignoring = nn.CrossEntropyLoss(ignore_index=0)
    expected = plainly(made, [(data, label)] * 5, ignoring)
    assert distance(by_module(made, [(data, label)] * 5, [1, 1], loss=ignoring), expected) <= 1e-11
    with Module(
        made, Masked(), [cpu(0), cpu(1)], sync_batchnorm=True, loss_normalizer=lambda label: float((label > 0).sum())
    ) as module:
        module.init_optimizer("device", "sgd", {"lr": 0.01, "momentum": 0.9})
        for _ in range(5):
            module.forward_backward_update(data, label)
        assert distance(module.get_params(), expected) <= 1e-11


def test_gradients_of_outputs_and_inputs_are_those_of_one_device() -> None:
    made, [(data, _)] = job(residual, [7], torch.float64, 8)
    reference, inputs = copy.deepcopy(made), data.clone().requires_grad_()
    gradient = torch.randn(7, CLASSES, dtype=torch.float64)
    reference(inputs).backward(gradient)
    with Module(made, None, [cpu(0), cpu(1), cpu(2)], [4, 1, 2], sync_batchnorm=True) as module:
        module.bind((7, 1, SIDE, SIDE), inputs_need_grad=True)
        module.forward(data)
        module.backward(gradient)
        torch.testing.assert_close(module.get_input_grads(), inputs.grad, rtol=1e-12, atol=1e-12)


def test_random_layers_between_repeat_bit_for_bit() -> None:
    made, batches = job(with_dropout, [8, 8, 5, 2], torch.float32, 5)
    torch.manual_seed(11)
    first = by_module(made, batches * 2, [2, 1, 1])
    torch.manual_seed(12)  # the caller's, unrelated to the contexts
    again = by_module(made, batches * 2, [2, 1, 1])
    assert same_bits(first, again)


def test_an_error_in_one_replica_is_raised_and_the_next_batch_works() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(SIDE * SIDE), nn.Linear(SIDE * SIDE, CLASSES)

        def forward(self, data: torch.Tensor) -> Any:
            if data.isnan().any():
                raise ArithmeticError("not a number")
            return self.linear(self.norm(data.flatten(1)))

    made, batches = job(Picky, [6, 6, 6], torch.float64, 2)
    spoilt = batches[0][0].clone()
    spoilt[-1] = torch.nan
    with Module(made, nn.CrossEntropyLoss(), [cpu(0), cpu(1), cpu(2)], sync_batchnorm=True) as module:
        module.init_optimizer("device", "sgd", {"lr": 0.01})
        module.forward_backward_update(*batches[0])
        with pytest.raises(ArithmeticError, match="not a number") as caught:
            module.forward_backward_update(spoilt, batches[0][1])
        assert any("cpu(2)" in note for note in caught.value.__notes__)
        module.forward_backward_update(*batches[1])
        assert module.get_loss().isfinite()


def test_without_it_each_share_is_normalised_by_itself() -> None:
    made, batches = job(residual, [8, 8], torch.float64, 7)
    expected = plainly(made, batches)
    with Module(made, nn.CrossEntropyLoss(), [cpu(0), cpu(1)]) as module:
        module.init_optimizer("device", "sgd", {"lr": 0.01, "momentum": 0.9})
        for batch in batches:
            module.forward_backward_update(*batch)
        assert distance(module.get_params(), expected) > 1e-4
