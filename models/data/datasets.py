"""Datasets with a training and a held-out part: the handwritten digits, image folders, random images, splits."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

from gangline.models.data.batches import as_batch, num_samples, take
from gangline.models.data.images.augmentation import Augmentation
from gangline.models.data.images.folder import ImageFolder
from gangline.models.random_streams import mixed_seed

_DIGITS = Path(__file__).with_name("digits.npz")  # digits.md names the source and the licence


class Splits(NamedTuple):
    """Training and held-out data as `Module.fit` accepts them, and the number of classes (None: unknown)."""

    train: Any
    validation: Any
    num_classes: int | None

    @property
    def classes(self) -> list[str] | None:
        """The class names, if known, as for image folders; else None."""
        data = self.train.dataset if isinstance(self.train, Subset) else self.train
        return getattr(data, "classes", None)


def digits(image_shape: Sequence[int] = (1, 28, 28), dtype: torch.dtype = torch.float32, seed: int = 0) -> Splits:
    """Return the UCI handwritten digits: 1,797 real 8x8 images of 10 classes, a fifth of each class held out.

    Args:
        image_shape: (channels, height, width) of the result: images are resized bilinearly, the grey channel is
            repeated; pixels are scaled to [0, 1].
        dtype: dtype of the images; labels are int64.
        seed: seed of the split.

    Raises:
        ValueError: if ``image_shape`` has not three numbers.
    """
    if len(image_shape) != 3:
        raise ValueError(
            f"image_shape is {tuple(image_shape)}; expected (channels, height, width), such as (1, 28, 28)"
        )
    channels, height, width = image_shape
    levels, labels = raw_digits()
    images = torch.nn.functional.interpolate(
        levels.unsqueeze(1).double() / 16, (height, width), mode="bilinear", align_corners=False
    )
    images = images.expand(-1, channels, -1, -1).to(dtype).contiguous()
    train, held_out = split_each_label((images, labels), 0.8, seed=seed)
    return Splits(train, held_out, 10)


def raw_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the digits as stored: images, uint8 of (1797, 8, 8) with levels 0 to 16, and labels, int64 of (1797,)."""
    with np.load(_DIGITS) as file:
        return torch.from_numpy(file["images"]), torch.from_numpy(file["labels"]).long()


def synthetic(image_shape: Sequence[int], dtype: torch.dtype, seed: int, samples: int, num_classes: int) -> Splits:
    """Return random images and labels, for measurements of speed; the first fifth is also the held-out part."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(samples, *image_shape, generator=generator, dtype=dtype, device="cpu")
    labels = torch.randint(num_classes, (samples,), generator=generator, device="cpu")
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
    """Return an `ImageFolder` for training, and held-out images that are only resized and normalised.

    Args:
        root: path or URL of the folder, with one sub-folder per class.
        image_shape: (channels, height, width) of the network's input.
        dtype: as for `ImageFolder`.
        seed: seed of the split and of the augmentation.
        validation: folder with the held-out images, in the same classes; None: hold out a fifth of each class.
        augmentation: augmentation of the training images; held-out images get its `for_evaluation`.
        num_workers: number of decoding processes for each of the two parts.
        skip_unreadable: number of unreadable files to skip, per folder, before failing.

    Raises:
        ValueError, FileNotFoundError, RuntimeError, TypeError: as `ImageFolder`.
        ValueError: if there is only one class, or a class has too few images to split.
    """
    augmentation = augmentation or Augmentation()
    options: dict[str, Any] = {"num_workers": num_workers, "skip_unreadable": skip_unreadable, "seed": seed}
    folder = ImageFolder(root, image_shape, dtype, augmentation=augmentation, **options)
    if len(folder.classes) == 1:
        raise ValueError(
            f"image folder {folder.shown} has one class, {folder.classes[0]!r}; expected at least two sub-folders, one "
            "for each class"
        )
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


def split_each_label(data: Any, part: float, *, seed: int = 0) -> list[Any]:
    """Split data in two so that the first has this fraction of every label, like MATLAB's ``splitEachLabel``.

    Args:
        data: a dataset with ``labels``, such as an `ImageFolder`, a Subset of one, or a tuple (data, labels).
        part: fraction between 0 and 1.
        seed: seed of the selection.

    Returns:
        Two Subsets, or tuples (data, labels), in the order of ``data``. Both have at least one sample of each label.

    Raises:
        ValueError: if the fraction is invalid or a label has too few samples.
        TypeError: if the data have no labels.
    """
    if not 0 < part < 1:
        raise ValueError(f"part is {part!r}; expected a fraction between 0 and 1, such as 0.9")
    labels, names = _labels_of(data)
    chosen: tuple[list[int], list[int]] = [], []
    for label in np.unique(labels):
        indices = np.flatnonzero(labels == label)
        if len(indices) < 2:
            what = f"label {names[label] if names else label}"
            raise ValueError(f"{what} has 1 sample, too few for 2 parts; expected at least 2")
        generator = torch.Generator().manual_seed(mixed_seed(seed, int(label)))
        shuffled = indices[torch.randperm(len(indices), generator=generator, device="cpu").numpy()]
        exact = Fraction(repr(part)) * len(indices)  # of the decimal: 0.1 is exactly a tenth
        count = min(max(int(exact + Fraction(1, 2)), 1), len(indices) - 1)
        chosen[0].extend(shuffled[:count].tolist())
        chosen[1].extend(shuffled[count:].tolist())
    found = [torch.tensor(sorted(own), device="cpu") for own in chosen]
    if isinstance(data, tuple):
        return [(take(as_batch(data[0], "data"), own), take(as_batch(data[1], "labels"), own)) for own in found]
    return [Subset(data, own.tolist()) for own in found]


def _labels_of(data: Any) -> tuple[np.ndarray[Any, Any], list[str] | None]:
    """Return the labels as numbers, and the class names, if any."""
    if isinstance(data, Subset):
        labels, names = _labels_of(data.dataset)
        return labels[list(data.indices)], names
    if isinstance(data, tuple):
        if len(data) != 2:
            raise ValueError(f"data is a tuple of {len(data)}; expected (data, labels)")
        given: Any = as_batch(data[1], "labels")
        if num_samples(as_batch(data[0], "data"), "data") != len(given):
            raise ValueError(f"data has {num_samples(data[0], 'data')} samples, but {len(given)} labels")
    elif hasattr(data, "labels"):
        given = torch.as_tensor(data.labels, device="cpu")
    else:
        raise TypeError(f"data is a {type(data).__name__} without labels; expected an ImageFolder or (data, labels)")
    if not isinstance(given, torch.Tensor) or given.dim() != 1 or given.is_floating_point():
        raise TypeError("the labels are not one integer per sample; expected integer class numbers")
    return given.cpu().numpy(), getattr(data, "classes", None)
