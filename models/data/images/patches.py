"""Segmentation: random patches of images and masks with equal crops and warps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gangline.models.arguments import check_int
from gangline.models.data.images.augmentation import Augmentation, warp
from gangline.models.data.images.folder import FolderListing, Images, decoded_image, read

OUTSIDE = -100
"""Label of pixels outside the image; `nn.CrossEntropyLoss` ignores it by default."""


class ImagePatches(Images):
    """Patches of images and masks, for `Module.fit`: (pixels of (channels, *size), labels, int64 of size).

    An image and its mask have the same path in the two folders but for the suffix. A mask is an image of one channel
    whose values are the classes, or ``ignored``. Each item of an epoch is cut at a random place and augmented; random
    numbers depend on (seed, epoch, item) only, and image and mask are moved by the same matrix: bilinearly the image,
    to the nearest pixel the mask. Pixels from outside the image are black, and their label is -100.
    """

    def __init__(
        self,
        images: str | Path,
        masks: str | Path,
        size: int | tuple[int, int],
        *,
        channels: int = 3,
        patches_per_image: int = 1,
        augmentation: Augmentation | None = None,
        ignored: int | None = 255,
        num_classes: int | None = None,
        dtype: torch.dtype = torch.float32,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        """List the files.

        Args:
            images: path or URL of the folder of images, at any depth.
            masks: path or URL of the folder of masks.
            size: side or (height, width) of the patches, in pixels; images may have any size.
            channels: 1 for grey images, 3 for RGB.
            patches_per_image: patches of each image in an epoch.
            augmentation: flips, rotations, scalings and normalisation; without resize and crop.
            ignored: value in masks that has no class; its label is -100. None: no such value.
            num_classes: number of classes; a mask with another value is then an error that names it. Masks without an
                image are left out.
            dtype: dtype of the pixels, in [0, 1] before they are normalised.
            num_workers: number of processes that read for `Module.fit`; 0: the training process reads.
            seed: seed of places and augmentation.

        Raises:
            FileNotFoundError: if a folder, or the mask of an image, does not exist.
            ValueError: if there are no images, or an argument is out of range or does not fit the augmentation.
        """
        if augmentation is not None and (augmentation.resize is not None or augmentation.crop is not None):
            raise ValueError("the augmentation of patches has resize or crop; expected none: size is that of the patch")
        check_int("patches_per_image", patches_per_image)
        if channels not in (1, 3):
            raise ValueError(f"channels is {channels}; expected 1 or 3")
        height, width = (size, size) if isinstance(size, int) else size
        self._masks = masks
        options: dict[str, Any] = {"num_workers": num_workers, "augmentation": augmentation, "seed": seed}
        super().__init__(images, (channels, height, width), dtype, **options)
        self.names = self._names
        """Paths of the images within their folder."""
        self._per_image, self._ignored, self._num_classes = patches_per_image, ignored, num_classes

    def _select(self, listing: FolderListing) -> list[str]:
        try:
            masks = FolderListing(self._masks)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"masks: {error}") from error
        names = super()._select(listing)
        by_stem = {name.rpartition(".")[0]: name for name in masks.names}
        missing = [name for name in names if name.rpartition(".")[0] not in by_stem]
        if missing:
            raise FileNotFoundError(
                f"{len(missing)} of {len(names)} images have no mask in {masks.shown}: {missing[0]}"
            )
        self._masks, self._mask_names = masks.root, [by_stem[name.rpartition(".")[0]] for name in names]
        return names

    def __len__(self) -> int:
        return len(self.names) * self._per_image

    def items_of_epoch(self, indices: Sequence[int], epoch: int) -> list[Any]:
        """Return the patches of an epoch."""
        return [self._patch(index, epoch) for index in indices]

    def whole(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return an image, normalised, and its labels: (channels, height, width) and (height, width).

        Raises:
            ValueError: if a file cannot be read, or image and mask differ in size.
        """
        pixels, labels = self._pair(number)
        evaluation = self.augmentation.for_evaluation()
        return evaluation(pixels[None], pixels.shape, self._seed, 0, [number])[0], labels

    def class_counts(self, num_classes: int) -> torch.Tensor:
        """Return the number of pixels of each class over all masks, int64 of (num_classes,).

        Raises:
            ValueError: if a mask has another class.
        """
        counts = torch.zeros(num_classes, dtype=torch.int64, device="cpu")
        for number in range(len(self.names)):
            labels = self._mask(number)
            _check_classes(labels, num_classes, self._mask_names[number])
            counts += torch.bincount(labels[labels != OUTSIDE], minlength=num_classes)
        return counts

    def _patch(self, index: int, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels, labels = self._pair(index // self._per_image)
        (_, height, width), before = self._shape, (pixels.shape[1], pixels.shape[2])
        crop = (min(height, before[0]), min(width, before[1]))
        moving = replace(self.augmentation, resize=before, crop=crop)
        [matrix] = moving.matrices((self._shape[0], *crop), self._seed, epoch, [index])
        patch = warp(pixels[None], matrix[None], crop)
        # Labels are shifted by one, because warp gives 0 to pixels from outside.
        moved = warp((labels - OUTSIDE)[None, None].to(torch.float64), matrix[None], crop, mode="nearest")
        patch = self.augmentation.for_evaluation()(patch, self._shape, self._seed, epoch, [index])[0]
        cut = moved[0, 0].to(torch.int64) + OUTSIDE
        if crop != (height, width):  # the image is smaller than a patch
            margin = (0, width - crop[1], 0, height - crop[0])
            patch = torch.nn.functional.pad(patch, margin)
            cut = torch.nn.functional.pad(cut, margin, value=OUTSIDE)
        return patch, cut

    def _pair(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pixels in [0, 1] and labels of an image."""
        name = self.names[number]
        [content] = read(self.root, [name])
        try:
            pixels = decoded_image(content, self._shape[0]).to(self._dtype) / 255
        except Exception as error:  # decoders raise many types
            raise ValueError(f"image {name} cannot be read: {error or type(error).__name__}") from error
        labels = self._mask(number)
        if labels.shape != pixels.shape[1:]:
            raise ValueError(
                f"image {name} has {pixels.shape[1]}x{pixels.shape[2]} pixels, but its mask {self._mask_names[number]} "
                f"{labels.shape[0]}x{labels.shape[1]}"
            )
        return pixels, labels

    def _mask(self, number: int) -> torch.Tensor:
        """Return the labels of an image, int64 of (height, width)."""
        from PIL import Image

        name = self._mask_names[number]
        [content] = read(self._masks, [name])
        try:
            if isinstance(content, Exception):
                raise content
            with Image.open(BytesIO(content) if isinstance(content, bytes) else content) as file:
                values = np.asarray(file)
        except Exception as error:  # decoders raise many types
            raise ValueError(f"mask {name} cannot be read: {error or type(error).__name__}") from error
        if values.ndim != 2:
            raise ValueError(f"mask {name} has {values.shape[2]} channels; expected one, whose values are the classes")
        labels = torch.from_numpy(values.astype(np.int64))
        if self._ignored is not None:
            labels = labels.masked_fill(labels == self._ignored, OUTSIDE)
        if self._num_classes is not None:
            _check_classes(labels, self._num_classes, name)
        return labels


def _check_classes(labels: torch.Tensor, num_classes: int, name: str) -> None:
    largest = int(labels.max()) if labels.numel() else 0
    if largest >= num_classes:
        raise ValueError(f"mask {name} has class {largest}; expected 0 to {num_classes - 1}")


def class_weights(counts: torch.Tensor) -> torch.Tensor:
    """Return a weight for each class, for `nn.CrossEntropyLoss`: median frequency / its frequency, float32.

    Median frequency balancing (Eigen and Fergus, 2015). A class without pixels gets 0.

    Args:
        counts: pixels of each class, as `ImagePatches.class_counts` returns them.
    """
    present = counts > 0
    if not bool(present.any()):
        raise ValueError("no class has a pixel; expected masks with classes")
    weights = counts[present].double().median() / counts.double()
    return torch.where(present, weights, 0.0).float()
