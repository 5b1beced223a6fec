"""LeNet and perceptrons as in MXNet's examples; AlexNet and residual networks with torchvision's parameter names.

torchvision's weights of AlexNet and of the residual networks load.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from functools import partial

import torch
from torch import nn

from gangline.models.zoo.registry import register

_LEAST = 63
"""Smallest height and width of AlexNet's images in pixels: the third pooling leaves one pixel of them."""


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


@register("alexnet")
class AlexNet(nn.Module):
    """Five convolutions, pooling to 6x6, and three linear layers, two after dropout: 61.1 million parameters.

    After Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014: the one-tower form of the
    network of Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural networks",
    2012.
    """

    def __init__(self, num_classes: int = 1000, dropout: float = 0.5) -> None:
        """Build the layers; weights are initialised by He et al. 2015 ("Delving deep into rectifiers"), biases are 0.

        Args:
            num_classes: number of outputs.
            dropout: probability that an input of the first two linear layers is zeroed in training.

        Raises:
            ValueError: if ``dropout`` is not in [0, 1].
        """
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2)),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2)),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True)),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2)),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            *(nn.Dropout(dropout), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True)),
            *(nn.Dropout(dropout), nn.Linear(4096, 4096), nn.ReLU(inplace=True)),
            nn.Linear(4096, num_classes),
        )
        with torch.no_grad():
            for name, parameter in self.named_parameters():  # torch's bound is 1/sqrt(fan_in), He's sqrt(6) wider
                parameter.mul_(0.0 if name.endswith("bias") else math.sqrt(6))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, num_classes) for images (batch, 3, height, width) of at least 63 x 63 pixels."""
        if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < _LEAST:
            raise ValueError(
                f"alexnet got images of shape {tuple(images.shape)}; expected (batch, 3, height, width) with "
                f"height and width of at least {_LEAST} pixels: resize them"
            )
        logits: torch.Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return logits


class ResNet(nn.Module):
    """A 7x7 convolution, four stages of residual blocks at 1/4 to 1/32 of the image's size, and a linear classifier.

    After He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2015, with the stride of bottlenecks
    on the 3x3 convolution, as in torchvision. Images may have any height and width of at least 32 pixels.
    """

    def __init__(self, depths: tuple[int, int, int, int], bottleneck: bool, num_classes: int = 1000) -> None:
        """Build the layers; convolutions are initialised by He et al. 2015 ("Delving deep into rectifiers"), fan-out.

        ``depths`` are the blocks in each stage. With ``bottleneck`` a block has three convolutions, 1x1, 3x3 and 1x1 to
        four times the width; else two, 3x3.
        """
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        channels, stages = 64, []
        for stage, depth in enumerate(depths):
            width = 64 * 2**stage
            blocks = [_Block(channels, width, 1 if stage == 0 else 2, bottleneck)]
            channels = 4 * width if bottleneck else width
            blocks += [_Block(channels, width, 1, bottleneck) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, num_classes) for images (batch, 3, height, width)."""
        features = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            features = stage(features)
        logits: torch.Tensor = self.fc(self.avgpool(features).flatten(1))
        return logits


class _Block(nn.Module):
    """Residual block, whose first 3x3 convolution divides height and width by ``stride``, rounded up."""

    def __init__(self, channels: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        kernels = ((1, 1), (3, stride), (1, 1)) if bottleneck else ((3, stride), (3, 1))
        widths = [channels, *[width] * (len(kernels) - 1), 4 * width if bottleneck else width]
        for number, (kernel, step) in enumerate(kernels):
            before, after = widths[number : number + 2]
            conv = nn.Conv2d(before, after, kernel, step, padding=kernel // 2, bias=False)
            self.add_module(f"conv{number + 1}", conv)
            self.add_module(f"bn{number + 1}", nn.BatchNorm2d(after))
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != widths[-1]:
            projection = nn.Conv2d(channels, widths[-1], 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(widths[-1]))
        self.depth = len(kernels)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        residual = features
        for number in range(1, self.depth + 1):
            convolved = getattr(self, f"conv{number}")(residual if number == 1 else self.relu(residual))
            residual = getattr(self, f"bn{number}")(convolved)
        shortcut = features if self.downsample is None else self.downsample(features)
        output: torch.Tensor = self.relu(residual + shortcut)
        return output


for _layers, _depths in (
    (18, (2, 2, 2, 2)),
    (34, (3, 4, 6, 3)),
    (50, (3, 4, 6, 3)),
    (101, (3, 4, 23, 3)),
    (152, (3, 8, 36, 3)),
):
    register(f"resnet{_layers}")(partial(ResNet, _depths, _layers >= 50))
