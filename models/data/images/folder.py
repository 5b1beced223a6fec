"""Folders of images: read when they are asked for, labelled by their sub-folders."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from gangline.models.data.images.augmentation import Augmentation
from gangline.models.data.images.files import IMAGE_SUFFIXES, Tree, read
from gangline.models.data.images.unreadable import Unreadable


class Images(Dataset[Any]):
    """Images that lie anywhere under a folder, in order of their names; items are tensors of ``image_shape``.

    ``folder`` is a path, or a URL of any store that fsspec knows (``s3://bucket/train`` through s3fs; its credentials
    come from the environment variables of that store). Nothing is kept in memory but the names.
    """

    def __init__(
        self,
        root: str | Path,
        image_shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        skip_unreadable: int = 0,
        num_workers: int = 0,
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        """List the files.

        Args:
            root: the folder.
            image_shape: (channels, height, width) of the items; 1 channel is grey, 3 are red, green and blue.
            dtype: of the items; pixels are from 0 to 1 before ``augmentation`` normalises them.
            skip_unreadable: so many files that cannot be read are left out of their batches, and listed in `skipped`.
            num_workers: processes that read and decode for `Module.fit`, `score` and `predict`; 0: the one that trains.
            augmentation: what is done to images.
            seed: of what is random in that.

        Raises:
            FileNotFoundError: no such folder or bucket.
            ValueError: it has no images, or the augmentation is impossible for this shape.
            RuntimeError: a store does not let itself be read.
            TypeError: a wrong type.
        """
        self._begin(Tree(root), image_shape, dtype, skip_unreadable, num_workers, augmentation, seed)
        if not self._names:
            raise ValueError(f"image folder {self.shown} has no images ({', '.join(IMAGE_SUFFIXES)})")

    def _begin(
        self,
        tree: Tree,
        image_shape: Sequence[int],
        dtype: torch.dtype,
        skip_unreadable: int,
        num_workers: int,
        augmentation: Augmentation | None,
        seed: int,
    ) -> None:
        channels, height, width = image_shape
        if channels not in (1, 3) or min(height, width) < 1:
            raise ValueError(f"image_shape is {tuple(image_shape)}; expected 1 or 3 channels, height and width")
        if isinstance(num_workers, bool) or not isinstance(num_workers, int):
            raise TypeError(f"num_workers is {num_workers!r}; expected a number of processes")
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}; expected 0 or more")
        self.root, self.shown = tree.root, tree.shown  # as messages name it: without what is secret in a URL
        self._names = tree.names
        self.files: list[Any] = [tree.file(name) for name in tree.names]
        """A Path each, or a URL."""
        self.num_workers = num_workers
        self.augmentation = augmentation or Augmentation()
        self.augmentation.check(image_shape)
        self._shape, self._dtype, self._seed = (channels, height, width), dtype, seed
        self._unreadable = Unreadable(skip_unreadable)
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        # Processes that last several epochs see it change.

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Any:
        return self._items([index], int(self._epoch), skips=False)[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The items, without those that are passed over; torch's DataLoader asks so for a batch."""
        return self.items_of_epoch(indices, int(self._epoch))

    def items_of_epoch(self, indices: Sequence[int], epoch: int) -> list[Any]:
        """The items as they are augmented in an epoch, without those that are passed over.

        Raises:
            ValueError: more files than ``skip_unreadable`` cannot be read; all of them are named.
            RuntimeError: a store did not give a file.
        """
        return self._items(indices, epoch, skips=self._unreadable.limit > 0)

    def set_epoch(self, epoch: int) -> None:
        """Have images be augmented as in this epoch, also by processes of a DataLoader that run already."""
        self._epoch.fill_(epoch)

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """The files passed over so far, with the reason, whichever process met them."""
        return self._unreadable.files()

    def report_skipped(self) -> None:
        """Log a warning for each file passed over that none was logged for yet."""
        self._unreadable.report()

    def augmented(self, augmentation: Augmentation) -> Any:
        """The same images with another augmentation; they share their list of files passed over."""
        augmentation.check(self._shape)
        other = copy.copy(self)
        other.augmentation = augmentation
        return other

    def _items(self, indices: Sequence[int], epoch: int, *, skips: bool) -> list[Any]:
        kept: list[int] = []
        decoded: list[torch.Tensor] = []
        for index, content in zip(indices, read(self.root, [self._names[i] for i in indices]), strict=True):
            try:
                decoded.append(self._decoded(content))
                kept.append(index)
            except Exception as error:  # whatever a decoder finds wrong with a file: it is the file that is named
                reason = str(error) or type(error).__name__
                if not skips:
                    raise ValueError(f"image {self.files[index]} cannot be read: {reason}") from error
                self._unreadable.add(str(self.files[index]), reason)
        if skips and get_worker_info() is None:
            self.report_skipped()
        if not kept:
            return []
        images = torch.stack(decoded).to(self._dtype) / 255
        images = self.augmentation(images, self._shape, self._seed, epoch, kept)
        return [self._item(image, index) for image, index in zip(images, kept, strict=True)]

    def _item(self, image: torch.Tensor, index: int) -> Any:  # noqa: ARG002 - a folder with labels looks at it
        return image

    def _decoded(self, content: bytes | Path | Exception) -> torch.Tensor:
        """The pixels, uint8 of (channels, height, width), resized."""
        from PIL import Image

        if isinstance(content, Exception):
            raise content
        channels = self._shape[0]
        height, width = self.augmentation.size_before(self._shape)
        with Image.open(BytesIO(content) if isinstance(content, bytes) else content) as file:
            image: Image.Image = file
            if file.mode.startswith("I"):  # 16 bits a pixel, which convert() would cut off at 255
                image = Image.fromarray((np.asarray(file, np.float32) / 257).round().astype(np.uint8))
            elif file.mode == "P" and "transparency" in file.info:
                image = file.convert("RGBA")  # else Pillow warns of a transparency that nobody looks at
            image = image.convert("L" if channels == 1 else "RGB")
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.array(image))
        return pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1).contiguous()


class ImageFolder(Images):
    """The images of a folder, one sub-folder a class, read when they are asked for.

    Items are (image, label): a tensor of ``image_shape``, and the number of the sub-folder in alphabetical order.
    """

    def __init__(
        self,
        root: str | Path,
        image_shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        skip_unreadable: int = 0,
        num_workers: int = 0,
        augmentation: Augmentation | None = None,
        classes: Sequence[str] | None = None,
        seed: int = 0,
    ) -> None:
        """List the files, as `Images` does.

        Args:
            root: the folder.
            image_shape: see `Images`.
            dtype: see `Images`.
            skip_unreadable: see `Images`.
            num_workers: see `Images`.
            augmentation: see `Images`.
            classes: the names that the sub-folders must have, in the order of their numbers, such as those that a
                network was trained on; None: the sub-folders' own, in alphabetical order.
            seed: see `Images`.

        Raises:
            ValueError: it has no sub-folders, a class has no images, or its classes are not ``classes``.
        """
        tree = Tree(root)
        if not tree.folders:
            raise ValueError(f"image folder {tree.shown} has no sub-folders; expected one for each class")
        self.classes = list(classes) if classes is not None else tree.folders
        _check_classes(tree, self.classes)
        number = {name: label for label, name in enumerate(self.classes)}
        tree.names = [name for name in tree.names if name.split("/")[0] in number and "/" in name]
        self.labels = [number[name.split("/")[0]] for name in tree.names]
        for label in sorted(set(range(len(self.classes))) - set(self.labels)):
            folder = tree.file(self.classes[label])
            raise ValueError(f"class folder {folder} has no images ({', '.join(IMAGE_SUFFIXES)})")
        self._begin(tree, image_shape, dtype, skip_unreadable, num_workers, augmentation, seed)

    @staticmethod
    def unlabelled(
        root: str | Path,
        image_shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        skip_unreadable: int = 0,
        num_workers: int = 0,
        augmentation: Augmentation | None = None,
    ) -> Images:
        """All images under a folder, with or without sub-folders, as `Module.predict` takes them: without labels."""
        return Images(
            root,
            image_shape,
            dtype,
            skip_unreadable=skip_unreadable,
            num_workers=num_workers,
            augmentation=augmentation,
        )

    def _item(self, image: torch.Tensor, index: int) -> tuple[torch.Tensor, int]:
        return image, self.labels[index]


def _check_classes(tree: Tree, classes: Sequence[str]) -> None:
    missing = [name for name in classes if name not in tree.folders]
    extra = [name for name in tree.folders if name not in classes]
    if missing or extra:
        differences = [f"has no {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(extra)} too"] * bool(extra)
        raise ValueError(
            f"image folder {tree.shown} {' and '.join(differences)}; expected the {len(classes)} classes "
            f"{', '.join(classes)}"
        )
