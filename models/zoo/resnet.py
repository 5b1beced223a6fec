"""Residual networks of 18 to 152 layers with torchvision's parameter names, so that its weights load.

After He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2015. Bottlenecks differ from the paper as
torchvision's do: the stride is on the 3x3 convolution, not on the 1x1 before it, which would skip three quarters of its
input. Images may have any height and width of at least 32 pixels, because the last features are averaged.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from gangline.models.zoo.registry import register


class ResNet(nn.Module):
    """A 7x7 convolution, four stages of residual blocks at 1/4 to 1/32 of the image's size, and a linear classifier."""

    def __init__(self, depths: tuple[int, int, int, int], bottleneck: bool, num_classes: int = 1000) -> None:
        """Build the layers; convolutions are initialised by He et al. 2015 ("Delving deep into rectifiers"), fan-out.

        Args:
            depths: number of blocks in each stage.
            bottleneck: True: blocks have three convolutions, 1x1, 3x3 and 1x1 to four times the width; else two, 3x3.
            num_classes: number of outputs.
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
