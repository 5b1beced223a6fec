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
"""Smallest height and width in pixels: the third pooling leaves one pixel of them."""


@register("alexnet")
class AlexNet(nn.Module):
    """Five convolutions, pooling to 6x6, and three linear layers, two after dropout: 61.1 million parameters."""

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
        """Return logits (batch, num_classes) for images (batch, 3, height, width) of at least 63 x 63 pixels.

        Raises:
            ValueError: if the images have another shape or are smaller.
        """
        if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < _LEAST:
            raise ValueError(
                f"alexnet got images of shape {tuple(images.shape)}; expected (batch, 3, height, width) with "
                f"height and width of at least {_LEAST} pixels: resize them"
            )
        logits: torch.Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return logits
