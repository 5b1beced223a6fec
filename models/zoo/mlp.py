"""A multi-layer perceptron: 128 and 64 hidden units with ReLU, as in MXNet's examples."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from models.zoo.registry import register


@register("mlp", image_shape=(1, 28, 28))
def mlp(num_classes: int = 10, num_inputs: int = 28 * 28) -> nn.Module:
    """A perceptron over ``num_inputs`` flattened inputs; outputs (batch, num_classes) logits."""
    return nn.Sequential(
        OrderedDict(
            flatten=nn.Flatten(),
            fc1=nn.Linear(num_inputs, 128),
            relu1=nn.ReLU(),
            fc2=nn.Linear(128, 64),
            relu2=nn.ReLU(),
            fc3=nn.Linear(64, num_classes),
        )
    )
