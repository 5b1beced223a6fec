"""Losses that are functions: which of them count labels as torch does, and what is said of the others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from measure import mlp
from torch import nn
from torch.nn import functional as F

from gangline import Module, cpu

FEATURES, CLASSES = 6, 4
network = partial(mlp, FEATURES, CLASSES, seed=0)


CLASS_LOSSES: dict[str, Any] = {
    "partial": partial(F.cross_entropy, ignore_index=-1),
    "lambda": lambda output, label: F.cross_entropy(output, label, ignore_index=-1),
    "weights": lambda output, label: F.cross_entropy(
        output, label, torch.arange(1.0, CLASSES + 1).double(), ignore_index=-1
    ),
    "nll": lambda output, label: F.nll_loss(output.log_softmax(1), label, ignore_index=-1),
}


@pytest.mark.parametrize("loss", CLASS_LOSSES)
@pytest.mark.parametrize("contexts", [1, 2])
def test_a_function_that_returns_a_torch_mean_counts_the_labels_of_that_mean(loss: str, contexts: int) -> None:
    data = torch.randn(8, FEATURES).double()
    labels = torch.tensor([[0, 1, 2, -1, -1, 1, -1, -1], [3, 0, 1, 1, -1, 2, 0, 3], [-1] * 8])  # one share has none
    with Module(network(), CLASS_LOSSES[loss], [cpu(i) for i in range(contexts)], [3, 1][:contexts]) as module:
        module.init_optimizer("device", "sgd", {"lr": 1.0})
        for label in labels:
            reference = network()
            reference.load_state_dict(module.get_params())
            CLASS_LOSSES[loss](reference(data), label).backward()
            module.forward_backward_update(data, label)
            for name, parameter in reference.named_parameters():
                assert parameter.grad is not None
                assert torch.allclose(module.get_params()[name], parameter - parameter.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("factor", "ignored", "level", "message"),
    [
        (2, -100, "INFO", "counts as a mean over samples"),
        (2, 0, "WARNING", "is weighted by samples"),
        (1, 0, None, "loss"),
    ],
)
def test_what_another_function_is_a_mean_over_is_said_once(
    caplog: pytest.LogCaptureFixture, factor: int, ignored: int, level: str | None, message: str
) -> None:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        mean = F.cross_entropy(output, label, ignore_index=ignored)
        return mean * factor if factor != 1 else mean

    caplog.set_level("INFO", "gangline")
    data, label = torch.randn(8, FEATURES).double(), torch.arange(8) % CLASSES
    with Module(network(), loss, [cpu(0), cpu(1)], [3, 1]) as module:
        module.init_optimizer("local", "sgd", {"lr": 0.1})
        for _ in range(3):
            module.forward_backward_update(data, label)
    assert [record.levelname for record in caplog.records if message in record.message] == [level] * (level is not None)


def test_losses_of_another_form_are_errors() -> None:
    def mean(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        found = F.cross_entropy(output, label)
        return found if len(output) == 8 else found * 2

    data, label = torch.randn(8, FEATURES).double(), torch.arange(8) % CLASSES
    for loss, message in (
        (lambda o, y: F.cross_entropy(o, y, reduction="sum"), r"returns a sum; .*CrossEntropyLoss\(reduction='sum'\)"),
        (mean, "returned the mean of a call of torch for earlier batches"),
    ):
        with Module(network(), loss, cpu()) as module:
            if loss is mean:
                module.forward(data, label, is_train=False)
            with pytest.raises(ValueError, match=message):
                module.forward(data[:4], label[:4], is_train=False)
    with pytest.raises(TypeError, match=r"loss is the class CrossEntropyLoss; .* write CrossEntropyLoss\(\)"):
        Module(network(), nn.CrossEntropyLoss)  # type: ignore[arg-type]
