"""LeNet of MXNet's examples: tanh, 20 and 50 channels of 5x5, 500 hidden units.

After LeCun, Bottou, Bengio and Haffner, "Gradient-based learning applied to document recognition", 1998.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from gangline.models.zoo.registry import register


@register("lenet", image_shape=(1, 28, 28))
def lenet(num_classes: int = 10) -> nn.Module:
    """Build LeNet: images (batch, 1, 28, 28) to logits (batch, num_classes)."""
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
