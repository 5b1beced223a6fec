"""Data sets by name: the digits that ship with scikit-learn, folders of images, random images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


class Splits(NamedTuple):
    """Training and held-out data, each as `fit` takes it, and how many classes there are."""

    train: Any
    validation: Any
    num_classes: int


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


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """The images of a folder, one sub-folder a class, read when they are asked for.

    Items are (image, label): a tensor of ``image_shape`` scaled to [0, 1], and the number of the sub-folder in
    alphabetical order.
    """

    def __init__(self, root: str | Path, image_shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        """List the files.

        Raises:
            FileNotFoundError: no such folder.
            ValueError: it has no sub-folders, or a class has no images.
        """
        self.root = Path(root)
        if not self.root.is_dir():
            raise FileNotFoundError(f"image folder {self.root} is not there")
        self.classes = sorted(path.name for path in self.root.iterdir() if path.is_dir() and path.name[0] != ".")
        if not self.classes:
            raise ValueError(f"image folder {self.root} has no sub-folders; expected one for each class")
        self._shape, self._dtype = tuple(image_shape), dtype
        self.files: list[Path] = []
        self.labels: list[int] = []
        for label, name in enumerate(self.classes):
            found = sorted(path for path in (self.root / name).rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
            if not found:
                raise ValueError(f"class folder {self.root / name} has no images ({', '.join(IMAGE_SUFFIXES)})")
            self.files += found
            self.labels += [label] * len(found)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        channels, height, width = self._shape
        path = self.files[index]
        try:
            with Image.open(path) as file:
                image: Image.Image = file
                if file.mode.startswith("I"):  # 16 bits a pixel, which convert() would cut off at 255
                    image = Image.fromarray((np.asarray(file, np.float32) / 257).round().astype(np.uint8))
                image = image.convert("L" if channels == 1 else "RGB")
                image = image.resize((width, height), Image.Resampling.BILINEAR)
        except Exception as error:
            raise ValueError(f"image {path} cannot be read: {error}") from error
        pixels = torch.from_numpy(np.array(image)).to(self._dtype) / 255
        return (pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1).contiguous()), self.labels[index]


def image_folder(root: str | Path, image_shape: Sequence[int], dtype: torch.dtype, seed: int) -> Splits:
    """An `ImageFolder` with a stratified fifth held out by seed."""
    from sklearn.model_selection import train_test_split

    dataset = ImageFolder(root, image_shape, dtype)
    try:
        train, held_out = train_test_split(
            np.arange(len(dataset)), test_size=0.2, stratify=dataset.labels, random_state=seed
        )
    except ValueError as error:
        raise ValueError(f"image folder {root} cannot be split into four fifths and one: {error}") from error
    return Splits(Subset(dataset, train.tolist()), Subset(dataset, held_out.tolist()), len(dataset.classes))


DATASETS: dict[str, Callable[[Sequence[int], torch.dtype, int], Splits]] = {"digits": digits}
"""What ``--dataset`` can name."""
