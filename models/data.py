"""Data sets by name: the digits that ship with scikit-learn, random images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

from models.images.folder import ImageFolder as ImageFolder
from models.images.folder import image_folder as image_folder


class Splits(NamedTuple):
    """Training and held-out data, each as `fit` takes it, and how many classes there are (None: not known)."""

    train: Any
    validation: Any
    num_classes: int | None

    @property
    def classes(self) -> list[str] | None:
        """What the classes are called, where the data have names for them, as folders of images do."""
        data = self.train.dataset if isinstance(self.train, Subset) else self.train
        return getattr(data, "classes", None)


def digits(image_shape: Sequence[int], dtype: torch.dtype, seed: int) -> Splits:
    """The UCI handwritten digits that ship inside scikit-learn: 1,797 real images of 8x8, 10 classes.

    Args:
        image_shape: (1, height, width) to resize to, bilinearly; pixels are scaled to [0, 1].
        dtype: of the images.
        seed: which fifth, stratified by class, is held out.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    channels, height, width = image_shape
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).unsqueeze(1) / 16
    images = torch.nn.functional.interpolate(images, (height, width), mode="bilinear", align_corners=False)
    images = images.expand(-1, channels, -1, -1).to(dtype).contiguous()
    labels = torch.from_numpy(bunch.target).long()
    train, held_out = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=bunch.target, random_state=seed)
    return Splits((images[train], labels[train]), (images[held_out], labels[held_out]), 10)


def synthetic(image_shape: Sequence[int], dtype: torch.dtype, seed: int, samples: int, num_classes: int) -> Splits:
    """Random images and labels, for measuring speed alone."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(samples, *image_shape, generator=generator, dtype=dtype)
    labels = torch.randint(num_classes, (samples,), generator=generator)
    return Splits((images, labels), (images[: max(1, samples // 5)], labels[: max(1, samples // 5)]), num_classes)


DATASETS: dict[str, Callable[[Sequence[int], torch.dtype, int], Splits]] = {"digits": digits}
"""What ``--dataset`` can name."""
