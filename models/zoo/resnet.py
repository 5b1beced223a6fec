"""Residual networks of 18 to 152 layers with torchvision's parameter names, so that its weights load.

After He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2015. Bottlenecks differ from the paper as
torchvision's do: the stride is on the 3x3 convolution, not on the 1x1 before it, which would skip three quarters of its
input. Images may have any height and width of at least 32 pixels, because the last features are averaged.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from gangline.models.zoo.registry import register


@register("resnet18", image_shape=(3, 224, 224))
def resnet18(num_classes: int = 1000, zero_init_residual: bool = False) -> nn.Module:
    """Build ResNet-18, 11.7 million parameters; see `ResNet` for the arguments."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, zero_init_residual)


@register("resnet34", image_shape=(3, 224, 224))
def resnet34(num_classes: int = 1000, zero_init_residual: bool = False) -> nn.Module:
    """Build ResNet-34, 21.8 million parameters; see `ResNet` for the arguments."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, zero_init_residual)


@register("resnet50", image_shape=(3, 224, 224))
def resnet50(num_classes: int = 1000, zero_init_residual: bool = False) -> nn.Module:
    """Build ResNet-50, 25.6 million parameters; see `ResNet` for the arguments."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, zero_init_residual)


@register("resnet101", image_shape=(3, 224, 224))
def resnet101(num_classes: int = 1000, zero_init_residual: bool = False) -> nn.Module:
    """Build ResNet-101, 44.5 million parameters; see `ResNet` for the arguments."""
    return ResNet(Bottleneck, (3, 4, 23, 3), num_classes, zero_init_residual)


@register("resnet152", image_shape=(3, 224, 224))
def resnet152(num_classes: int = 1000, zero_init_residual: bool = False) -> nn.Module:
    """Build ResNet-152, 60.2 million parameters; see `ResNet` for the arguments."""
    return ResNet(Bottleneck, (3, 8, 36, 3), num_classes, zero_init_residual)


class ResNet(nn.Module):
    """A 7x7 convolution, four stages of residual blocks at 1/4 to 1/32 of the image's size, and a linear classifier."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: tuple[int, int, int, int],
        num_classes: int = 1000,
        zero_init_residual: bool = False,
    ) -> None:
        """Build the layers; convolutions are initialised by He et al. 2015 ("Delving deep into rectifiers"), fan-out.

        Args:
            block: class of the residual blocks.
            depths: number of blocks in each stage.
            num_classes: number of outputs.
            zero_init_residual: initialise every block as the identity: the scale of its last BatchNorm is 0, not 1
                (Goyal et al., "Accurate, large minibatch SGD", 2017).
        """
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(block, depths[0], 64, 64, stride=1)
        self.layer2 = _stage(block, depths[1], 64 * block.expansion, 128, stride=2)
        self.layer3 = _stage(block, depths[2], 128 * block.expansion, 256, stride=2)
        self.layer4 = _stage(block, depths[3], 256 * block.expansion, 512, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_residual and isinstance(module, BasicBlock | Bottleneck):
                nn.init.zeros_(module.last_norm.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, num_classes) for images (batch, 3, height, width)."""
        features = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        logits: torch.Tensor = self.fc(self.avgpool(features).flatten(1))
        return logits


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions."""

    expansion: ClassVar[int] = 1
    """Output channels per unit of ``width``."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        """Build a block from ``channels`` to ``width`` channels that divides height and width by ``stride``."""
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels, width, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The BatchNorm before the addition."""
        return self.bn2

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map (batch, channels, height, width) to (batch, width, height / stride, width / stride), rounded up."""
        residual = self.relu(self.bn1(self.conv1(features)))
        residual = self.bn2(self.conv2(residual))
        shortcut = features if self.downsample is None else self.downsample(features)
        output: torch.Tensor = self.relu(residual + shortcut)
        return output


class Bottleneck(nn.Module):
    """Residual block: 1x1 convolution to ``width`` channels, 3x3, then 1x1 to four times ``width``."""

    expansion: ClassVar[int] = 4
    """Output channels per unit of ``width``."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        """Build a block from ``channels`` to 4 ``width`` channels that divides height and width by ``stride``."""
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels, width * self.expansion, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The BatchNorm before the addition."""
        return self.bn3

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map (batch, channels, height, width) to (batch, 4 width, height / stride, width / stride), rounded up."""
        residual = self.relu(self.bn1(self.conv1(features)))
        residual = self.relu(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        shortcut = features if self.downsample is None else self.downsample(features)
        output: torch.Tensor = self.relu(residual + shortcut)
        return output


def _stage(
    block: type[BasicBlock] | type[Bottleneck], depth: int, channels: int, width: int, stride: int
) -> nn.Sequential:
    """Build a stage of ``depth`` blocks; the first has the stride."""
    rest = [block(width * block.expansion, width, stride=1) for _ in range(depth - 1)]
    return nn.Sequential(block(channels, width, stride), *rest)


def _shortcut(channels: int, output_channels: int, stride: int) -> nn.Sequential | None:
    """Build the projection from a block's input shape to its output shape; None if they are equal."""
    if stride == 1 and channels == output_channels:
        return None
    return nn.Sequential(nn.Conv2d(channels, output_channels, 1, stride, bias=False), nn.BatchNorm2d(output_channels))
