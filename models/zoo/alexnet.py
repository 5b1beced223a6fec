"""AlexNet with torchvision's parameter names and shapes, so that its weights load.

After Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014: the one-tower form of the
network of Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural networks", 2012.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from gangline.models.zoo.registry import register

_LEAST = 63
"""Pixels an edge, of which the third pooling leaves one; one pixel less leaves none."""


@register("alexnet", image_shape=(3, 224, 224))
def alexnet(num_classes: int = 1000, dropout: float = 0.5) -> nn.Module:
    """AlexNet, 61.1 million parameters for 1,000 classes; arguments as of `AlexNet`."""
    return AlexNet(num_classes, dropout)


class AlexNet(nn.Module):
    """Five convolutions, pooling to 6x6 whatever the image's size, and three linear layers with dropout before two."""

    def __init__(self, num_classes: int = 1000, dropout: float = 0.5) -> None:
        """Build the layers; weights begin as He et al. 2015 ("Delving deep into rectifiers") say, biases at 0.

        Args:
            num_classes: how many outputs there are.
            dropout: the share of its inputs that each of the first two linear layers goes without in training.

        Raises:
            ValueError: ``dropout`` is not from 0 to 1.
        """
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )
        with torch.no_grad():
            for (
                name,
                parameter,
            ) in self.named_parameters():  # drawn by torch from +-1/sqrt(inputs), He's is sqrt(6) wider
                parameter.mul_(0.0 if name.endswith("bias") else math.sqrt(6))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits of shape (batch, num_classes) for images of (batch, 3, height, width), both of at least 63 pixels.

        Raises:
            ValueError: the images have another shape or are smaller.
        """
        if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < _LEAST:
            raise ValueError(
                f"alexnet got images of shape {tuple(images.shape)}; expected (batch, 3, height, width), both edges of "
                f"at least {_LEAST} pixels: resize them"
            )
        logits: torch.Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return logits
