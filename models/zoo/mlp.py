"""Perceptrons: 128 and 64 hidden units with ReLU, as in MXNet's examples, and a wide one for benchmarks."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from gangline.models.zoo.registry import register


@register("mlp", image_shape=(1, 28, 28))
def mlp(num_classes: int = 10, num_inputs: int = 28 * 28, hidden: tuple[int, int] = (128, 64)) -> nn.Module:
    """Build a perceptron: inputs flattened to ``num_inputs`` values, to logits (batch, num_classes)."""
    first, second = hidden
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(num_inputs, first),
            relu1=nn.ReLU(),
            fc2=nn.Linear(first, second),
            relu2=nn.ReLU(),
            fc3=nn.Linear(second, num_classes),
        )
    )


@register("wide_mlp", image_shape=(1, 28, 28))
def wide_mlp(num_classes: int = 10, num_inputs: int = 28 * 28) -> nn.Module:
    """Build a perceptron with two hidden layers of 2,048 units: with small batches, communication dominates."""
    return mlp(num_classes, num_inputs, (2048, 2048))
