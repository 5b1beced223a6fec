"""Gradient compression through Module: each replica sends its share of the mean over the global batch."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from measure import contexts, labelled, mlp, same_bits, step_of
from torch import nn

from gangline import Module, cpu

FEATURES, CLASSES = 6, 3
TWO_BITS: dict[str, Any] = {"type": "2bit", "threshold": 0.03}
perceptron = partial(mlp, FEATURES, 16, CLASSES, seed=3, dtype=torch.float32)


def test_one_context_alone_warns_that_nothing_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    data, label = labelled(8, FEATURES, CLASSES)
    found = []
    for params in (TWO_BITS, None):
        with Module(perceptron(), nn.CrossEntropyLoss(), cpu(), compression_params=params) as module:
            caplog.clear()
            with caplog.at_level(logging.WARNING, "gangline"):
                module.init_optimizer("device", "sgd", {"lr": 0.1})
            module.forward_backward_update(data, label)
            assert module.compression_residuals() == {}
            found.append(module.get_params())
            said = ["a single context sends no gradients, so compression_params has no effect"]
            assert caplog.messages == (said if params else [])
    assert same_bits(*found)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_nan_gradient_is_an_error_by_key_and_changes_neither_its_step_nor_the_next(
    early: bool, steps_before: int
) -> None:
    """No buckets exist before the first step; later ones may be pushed while backward runs."""
    data, label = labelled(8, FEATURES, CLASSES)
    bad = data.clone()
    bad[6] = float("nan")  # of the second replica
    found = []
    for refused in (True, False):
        with Module(perceptron(), nn.CrossEntropyLoss(), contexts(2), compression_params=TWO_BITS) as module:
            module.init_optimizer("device", "sgd", {"lr": 0.1, "momentum": 0.9})
            for _ in range(steps_before):
                step_of(module, early, data, label)
            for spoilt in (bad, data * float("nan")) if refused else ():
                before = module.get_params(), module.optimizer_state().tensors, module.compression_residuals()
                with pytest.raises(ValueError, match=r"the gradient of key '[02]\.(weight|bias)' holds NaN"):
                    step_of(module, early, spoilt, label)
                after = module.get_params(), module.optimizer_state().tensors, module.compression_residuals()
                for ours, theirs in zip(after, before, strict=True):  # residuals may be new, and are 0 then
                    assert all(torch.equal(theirs.get(n, torch.zeros_like(v)), v) for n, v in ours.items())
            for _ in range(3):
                step_of(module, early, data, label)
            found.append(module.get_params())
    assert same_bits(*found)
