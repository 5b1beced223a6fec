"""LeNet and perceptrons for images of 28x28 pixels, as in MXNet's examples, and a wide perceptron for benchmarks."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from gangline.models.zoo.registry import register


@register("lenet", image_shape=(1, 28, 28))
def lenet(num_classes: int = 10) -> nn.Module:
    """Build LeNet: images (batch, 1, 28, 28) to logits (batch, num_classes).

    After LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document recognition", 1998, with
    MXNet's widths: 20 and 50 channels, 500 hidden units.
    """
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 20, 5),
            tanh1=nn.Tanh(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(20, 50, 5),
            tanh2=nn.Tanh(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(50 * 4 * 4, 500),
            tanh3=nn.Tanh(),
            fc2=nn.Linear(500, num_classes),
        )
    )


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
