"""Scenes for segmentation: real handwritten digits on a noisy ground, with the class of each pixel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from gangline.models.data.datasets import raw_digits

_INK = 5
"""Level of a digit's pixel, of 16, from which it belongs to the digit."""


def digit_scenes(
    count: int, size: int = 96, *, digits: tuple[int, ...] = (0, 1, 4, 7), per_scene: int = 6, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compose scenes of digits at random places, 2 to 3 times as large as they are stored.

    Args:
        count: number of scenes.
        size: pixels of a side.
        digits: digits that occur; a pixel's class is 1 + the digit's place in it, and 0 for the ground.
        per_scene: digits in a scene; a later one covers earlier ones.
        seed: seed of the choice; another seed gives other digits and places.

    Returns:
        Pixels, uint8 of (count, size, size), and classes, uint8 of the same shape.
    """
    levels, labels = raw_digits()
    generator = torch.Generator().manual_seed(seed)
    images = (torch.randn(count, size, size, generator=generator) * 12 + 40).clamp(0, 255)
    masks = torch.zeros(count, size, size, dtype=torch.uint8)

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    of_digit = {digit: levels[labels == digit] for digit in digits}
    for image, mask in zip(images, masks, strict=True):
        for _ in range(per_scene):
            kind = draw(len(digits))
            own = of_digit[digits[kind]]
            side = 16 + draw(9)
            stored = own[draw(len(own))][None, None].float()
            digit = F.interpolate(stored, (side, side), mode="bilinear", align_corners=False)[0, 0]
            top, left = draw(size - side + 1), draw(size - side + 1)
            ink = digit >= _INK
            image[top : top + side, left : left + side][ink] = 60 + 12 * digit[ink]
            mask[top : top + side, left : left + side][ink] = kind + 1
    return images.round().clamp(0, 255).to(torch.uint8), masks


def write_scenes(folder: str | Path, images: torch.Tensor, masks: torch.Tensor) -> tuple[Path, Path]:
    """Write images and masks as PNG files, for `ImagePatches`; return the two folders."""
    from PIL import Image

    folders = Path(folder) / "images", Path(folder) / "masks"
    for path, values in zip(folders, (images, masks), strict=True):
        path.mkdir(parents=True, exist_ok=True)
        for number, one in enumerate(values):
            Image.fromarray(np.asarray(one)).save(path / f"{number:04}.png")
    return folders
