"""Fused step: no replica waits between forward and backward; same bits, and errors are raised."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gangline import Module, cpu

LIMIT = 20.0
"""Seconds after which a test that waits has failed."""
FEATURES, CLASSES = 5, 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def module_of(net: nn.Module, loss: Any, normalizer: Callable[[Any], float] | None = None) -> Module:
    module = Module(net, loss, [cpu(0), cpu(1)], loss_normalizer=normalizer)
    module.init_optimizer("device", "sgd", {"lr": 0.1, "momentum": 0.9})
    return module


def batch(step: int, samples: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    data = torch.randn(samples, FEATURES, generator=generator)
    return data, (torch.arange(samples) * 2 + step) % CLASSES


def squares(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - F.one_hot(label, CLASSES)).square().mean()


@pytest.mark.parametrize(
    ("loss", "normalizer"),
    [
        (nn.CrossEntropyLoss(), None),
        (nn.CrossEntropyLoss(ignore_index=1), None),
        (nn.CrossEntropyLoss(weight=torch.tensor([0.3, 1.0, 2.0])), None),
        (nn.CrossEntropyLoss(reduction="sum"), None),
        (squares, None),
        (squares, lambda label: float((label != 1).sum())),
    ],
    ids=["mean", "ignored", "weighted", "sum", "own", "normalizer"],
)
def test_fused_and_separate_passes_give_the_same_bits(loss: Any, normalizer: Callable[[Any], float] | None) -> None:
    with module_of(network(), loss, normalizer) as fused, module_of(network(), loss, normalizer) as separate:
        for step in range(4):
            data, label = batch(step, samples=7 + step)
            fused.forward_backward_update(data, label)
            separate.forward(data, label, is_train=True)
            separate.backward()
            separate.update()
            assert torch.equal(fused.get_loss(), separate.get_loss())
            assert torch.equal(fused.get_outputs(), separate.get_outputs())
            assert (fused.normalizer, fused.step) == (separate.normalizer, separate.step)
            ours, theirs = fused.get_params(), separate.get_params()
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Waiting(nn.Module):
    """Layer of which the second replica's forward waits, if requested, for a gradient of the first replica."""

    waits = False
    came = threading.Event()

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        if Waiting.waits and "cpu(1)" in threading.current_thread().name:
            assert Waiting.came.wait(LIMIT), "no gradient came while this replica was in forward"
        return self.layer(data)  # type: ignore[no-any-return]


def test_a_replica_begins_backward_while_another_is_in_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Waiting()
    with module_of(net, nn.CrossEntropyLoss()) as module:
        module.forward_backward_update(*batch(0))  # the first step shows that the network draws no random numbers
        net.layer.bias.register_post_accumulate_grad_hook(lambda _: Waiting.came.set())  # type: ignore[no-untyped-call]
        monkeypatch.setattr(Waiting, "waits", True)
        module.forward_backward_update(*batch(1))
    assert Waiting.came.is_set()


class Failing(nn.Module):
    """Layer that fails in the second replica's forward while a flag is set."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        if Failing.fails and "cpu(1)" in threading.current_thread().name:
            raise ValueError("no such luck")
        return self.layers(data)  # type: ignore[no-any-return]


def test_after_a_failed_forward_the_others_gradients_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with module_of(Failing(), nn.CrossEntropyLoss()) as module, module_of(Failing(), nn.CrossEntropyLoss()) as other:
        for each in (module, other):
            each.forward_backward_update(*batch(0))
            each.forward_backward_update(*batch(1))
        before = copy.deepcopy(module.get_params())
        monkeypatch.setattr(Failing, "fails", True)
        with pytest.raises(ValueError, match="no such luck") as caught:
            module.forward_backward_update(*batch(2))
        assert any("cpu(1)" in note for note in caught.value.__notes__)
        monkeypatch.setattr(Failing, "fails", False)
        assert all(torch.equal(module.get_params()[name], value) for name, value in before.items())
        with pytest.raises(RuntimeError, match="came before backward"):
            module.update()
        for each in (module, other):
            each.forward_backward_update(*batch(3))
        ours, theirs = module.get_params(), other.get_params()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert module.step == other.step


def test_a_loss_that_depends_on_nothing_trained_is_an_error() -> None:
    detached = False

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return squares(output.detach() if detached else output, label)

    with module_of(network(), loss) as module:
        module.forward_backward_update(*batch(0))
        detached = True
        with pytest.raises(RuntimeError, match="depends on no parameter"):
            module.forward_backward_update(*batch(1))
