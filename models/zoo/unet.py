"""U-Net: an encoder and a decoder with connections between equal resolutions, for segmentation.

After Ronneberger, Fischer and Brox, "U-Net: Convolutional networks for biomedical image segmentation", 2015, with
padded convolutions and batch normalization.
"""

from __future__ import annotations

import torch
from torch import nn

from gangline.models.zoo.registry import register


class UNet(nn.Module):
    """Images (batch, channels, height, width) to logits (batch, num_classes, height, width).

    Height and width must be multiples of 2 ** depth.
    """

    def __init__(self, num_classes: int, channels: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            _block(before, after) for before, after in zip([channels, *widths[:-1]], widths, strict=True)
        )
        self.dropout = nn.Dropout2d(dropout)
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(before, after, 2, stride=2)
            for before, after in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.up = nn.ModuleList(_block(2 * after, after) for after in widths[-2::-1])
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of each pixel."""
        multiple = 2 ** len(self.up)
        if images.shape[2] % multiple or images.shape[3] % multiple:
            raise ValueError(
                f"images have {images.shape[2]}x{images.shape[3]} pixels; expected multiples of {multiple}, for this "
                f"U-Net halves them {len(self.up)} times"
            )
        kept = []
        features = self.down[0](images)
        for block in self.down[1:]:
            kept.append(features)
            features = block(nn.functional.max_pool2d(features, 2))
        features = self.dropout(features)
        for widen, block in zip(self.widen, self.up, strict=True):
            features = block(torch.cat([kept.pop(), widen(features)], dim=1))
        logits: torch.Tensor = self.head(features)
        return logits


@register("unet", image_shape=(1, 64, 64))
def unet(num_classes: int = 2, channels: int = 1, width: int = 16, depth: int = 3, dropout: float = 0.0) -> nn.Module:
    """Build a U-Net.

    Args:
        num_classes: number of classes, background included.
        channels: channels of the images.
        width: channels of the first level; each level below has twice as many.
        depth: number of times that the resolution is halved.
        dropout: share of the deepest level's channels that training drops.
    """
    return UNet(num_classes, channels, width, depth, dropout)


def _block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(),
    )
