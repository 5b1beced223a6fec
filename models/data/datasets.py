"""Data to train on and data held out: the digits that ship with scikit-learn, folders of images, random images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

from gangline.models.data.images.augmentation import Augmentation
from gangline.models.data.images.folder import ImageFolder
from gangline.models.data.images.splitting import split_each_label


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


def image_folder(
    root: str | Path,
    image_shape: Sequence[int],
    dtype: torch.dtype,
    seed: int,
    *,
    validation: str | Path | None = None,
    augmentation: Augmentation | None = None,
    num_workers: int = 0,
    skip_unreadable: int = 0,
) -> Splits:
    """An `ImageFolder` to train on, and held-out images, which are resized and normalised alone.

    Args:
        root: the folder, one sub-folder a class.
        image_shape: (channels, height, width) that the network takes.
        dtype: of the images.
        seed: which fifth of each class is held out, and what is random in the augmentation.
        validation: another folder, with the same classes, whose images are those held out; None: a fifth of ``root``.
        augmentation: what is done to images that are trained on; held-out ones get its `for_evaluation`.
        num_workers: processes that decode, for each of the two.
        skip_unreadable: so many files in each folder may be passed over.

    Raises:
        ValueError, FileNotFoundError, RuntimeError, TypeError: as `ImageFolder`; a class is too small to be split.
    """
    augmentation = augmentation or Augmentation()
    options: dict[str, Any] = {"num_workers": num_workers, "skip_unreadable": skip_unreadable, "seed": seed}
    folder = ImageFolder(root, image_shape, dtype, augmentation=augmentation, **options)
    evaluation = augmentation.for_evaluation()
    if validation is not None:
        held_out = ImageFolder(
            validation, image_shape, dtype, augmentation=evaluation, classes=folder.classes, **options
        )
        return Splits(folder, held_out, len(folder.classes))
    try:
        train, rest = split_each_label(folder, 0.8, seed=seed)
    except ValueError as error:
        raise ValueError(f"image folder {folder.shown} cannot be split into four fifths and one: {error}") from None
    return Splits(train, Subset(folder.augmented(evaluation), rest.indices), len(folder.classes))


DATASETS: dict[str, Callable[[Sequence[int], torch.dtype, int], Splits]] = {"digits": digits}
"""What ``--dataset`` can name."""
