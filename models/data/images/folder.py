"""Datasets of image files: decoded on access, labelled by sub-folder."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch.utils.data import Dataset

from gangline.models.arguments import check_int
from gangline.models.data.images.augmentation import Augmentation
from gangline.models.data.images.files import IMAGE_SUFFIXES, FolderListing, read
from gangline.models.data.reader import Unreadable

_log = logging.getLogger("gangline")


class ImageOptions(TypedDict, total=False):
    """Options of `Images`."""

    skip_unreadable: int
    num_workers: int
    augmentation: Augmentation | None
    seed: int


class Images(Dataset[Any]):
    """Images at any depth under a folder, in order of their names; items are tensors of ``image_shape``.

    Only the file names are kept in memory.
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
            root: path of the folder, or a URL that fsspec can open (``s3://bucket/train`` through s3fs, with its
                credentials from the environment).
            image_shape: (channels, height, width) of the items; 1 channel is grey, 3 channels are RGB.
            dtype: dtype of the items; pixels are in [0, 1] before ``augmentation`` normalises them.
            skip_unreadable: number of unreadable files to leave out of their batches, and to list in `skipped`, before
                failing. Each worker process of a DataLoader of your own counts by itself.
            num_workers: number of processes that read and decode for `Module.fit`, `score` and `predict`; 0: read in
                the training process.
            augmentation: augmentation of the images.
            seed: seed of the augmentation.

        Raises:
            FileNotFoundError: if there is no such folder or bucket.
            ValueError: if the folder has no images, or the augmentation does not fit this shape.
            RuntimeError: if a store refuses to be listed.
            TypeError: if an argument has a wrong type.
        """
        if len(image_shape) != 3:
            raise ValueError(f"image_shape is {tuple(image_shape)}; expected (channels, height, width)")
        channels, height, width = image_shape
        if channels not in (1, 3) or min(height, width) < 1:
            raise ValueError(f"image_shape is {tuple(image_shape)}; expected 1 or 3 channels, height and width")
        check_int("num_workers", num_workers, 0)
        check_int("skip_unreadable", skip_unreadable, 0)
        listing = FolderListing(root)
        self.root, self.shown = listing.root, listing.shown
        self._names = self._select(listing)
        self.files: list[Any] = [listing.file(name) for name in self._names]
        """The Path or the URL of each image, without secrets."""
        self.num_workers = num_workers
        self.augmentation = augmentation or Augmentation()
        self.augmentation.check(image_shape)
        self._shape, self._dtype, self._seed = (channels, height, width), dtype, seed
        self._skip_limit = skip_unreadable
        self._skipped: dict[str, str] = {}
        # In shared memory, so that persistent workers of a DataLoader see it change.
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu").share_memory_()  # type: ignore[no-untyped-call]

    def _select(self, listing: FolderListing) -> list[str]:
        """Return the names of the images of a folder that belong to the dataset."""
        if not listing.names:
            raise ValueError(f"image folder {listing.shown} has no images ({', '.join(IMAGE_SUFFIXES)})")
        return listing.names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Any:
        [item] = self.items_of_epoch([index], int(self._epoch))
        if isinstance(item, Unreadable):
            raise ValueError(f"image {item.file} cannot be read: {item.reason}")
        return item

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the items that are not skipped; torch's DataLoader calls this for a batch."""
        items = self.items_of_epoch(indices, int(self._epoch))
        self.note_unreadable(item for item in items if isinstance(item, Unreadable))
        return [item for item in items if not isinstance(item, Unreadable)]

    def items_of_epoch(self, indices: Sequence[int], epoch: int) -> list[Any]:
        """Return the items with an epoch's augmentation; `Unreadable` in place of items to skip.

        Raises:
            ValueError: if an image cannot be read and ``skip_unreadable`` is 0.
            RuntimeError: if a store fails to return a file.
        """
        items: list[Any] = [None] * len(indices)
        decoded: dict[int, torch.Tensor] = {}  # by position
        size = self.augmentation.size_before(self._shape)
        contents = read(self.root, [self._names[index] for index in indices])
        for position, (index, content) in enumerate(zip(indices, contents, strict=True)):
            try:
                decoded[position] = decoded_image(content, self._shape[0], size)
            except Exception as error:  # decoders raise many types
                file, reason = str(self.files[index]), str(error) or type(error).__name__
                if not self._skip_limit:
                    raise ValueError(f"image {file} cannot be read: {reason}") from error
                items[position] = Unreadable(file, reason)
        if decoded:
            images = torch.stack(list(decoded.values())).to(self._dtype) / 255
            samples = [indices[position] for position in decoded]
            images = self.augmentation(images, self._shape, self._seed, epoch, samples)
            for position, image in zip(decoded, images, strict=True):
                items[position] = self._item(image, indices[position])
        return items

    def note_unreadable(self, files: Iterable[Unreadable]) -> None:
        """Add files to `skipped` and log a warning for each new one.

        Raises:
            ValueError: if there are more than ``skip_unreadable``; the message lists them.
        """
        for file, reason in files:
            if file not in self._skipped:
                self._skipped[file] = reason
                _log.warning("image %s cannot be read and is skipped: %s", file, reason)
        if len(self._skipped) > self._skip_limit:
            listed = "".join(f"\n  {file}: {reason}" for file, reason in self._skipped.items())
            raise ValueError(
                f"{len(self._skipped)} images cannot be read, more than the {self._skip_limit} that skip_unreadable "
                f"allows:{listed}"
            )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the augmentation, also in running worker processes of a DataLoader."""
        self._epoch.fill_(epoch)

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """(file, reason) of the files skipped so far."""
        return list(self._skipped.items())

    def augmented(self, augmentation: Augmentation) -> Any:
        """Return the same images with another augmentation; both share one list of skipped files."""
        augmentation.check(self._shape)
        other = copy.copy(self)
        other.augmentation = augmentation
        return other

    def _item(self, image: torch.Tensor, index: int) -> Any:  # noqa: ARG002  ImageFolder adds the label
        return image


def decoded_image(
    content: bytes | Path | Exception, channels: int, size: tuple[int, int] | None = None
) -> torch.Tensor:
    """Return the pixels of a result of `files.read`, uint8 of (channels, height, width), resized if a size is given."""
    from PIL import Image, ImageOps

    if isinstance(content, Exception):
        raise content
    with Image.open(BytesIO(content) if isinstance(content, bytes) else content) as file:
        file.load()
        with suppress(Exception):  # damaged metadata are no reason to refuse the pixels
            ImageOps.exif_transpose(file, in_place=True)
        image: Image.Image = file
        if file.mode.startswith("I"):  # 16 bits per pixel, which convert() would clip at 255
            image = Image.fromarray((np.asarray(file, np.float32) / 257).round().astype(np.uint8))
        elif file.mode == "P" and "transparency" in file.info:
            image = file.convert("RGBA")  # else Pillow warns about the unused transparency
        image = image.convert("L" if channels == 1 else "RGB")
        if size is not None:
            image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image))
    return pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1).contiguous()


class ImageFolder(Images):
    """The images of a folder with one sub-folder per class.

    Items are (image, label): a tensor of ``image_shape`` and the index of the sub-folder in alphabetical order.
    """

    def __init__(
        self,
        root: str | Path,
        image_shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        classes: Sequence[str] | None = None,
        **options: Unpack[ImageOptions],
    ) -> None:
        """List the files; arguments and errors are those of `Images`, and these.

        The sub-folders must be ``classes``, in label order, such as those a network was trained on; None: the
        sub-folders that there are, in alphabetical order.

        Raises:
            ValueError: if there are no sub-folders, a class has no images, or the sub-folders are not ``classes``.
        """
        self.classes = list(classes or ())
        super().__init__(root, image_shape, dtype, **options)

    def _select(self, listing: FolderListing) -> list[str]:
        if not listing.folders:
            raise ValueError(f"image folder {listing.shown} has no sub-folders; expected one for each class")
        self.classes = self.classes or listing.folders
        _check_classes(listing, self.classes)
        number = {name: label for label, name in enumerate(self.classes)}
        names = [name for name in listing.names if name.split("/")[0] in number and "/" in name]
        self.labels = [number[name.split("/")[0]] for name in names]
        for label in sorted(set(range(len(self.classes))) - set(self.labels)):
            folder = listing.file(self.classes[label])
            raise ValueError(f"class folder {folder} has no images ({', '.join(IMAGE_SUFFIXES)})")
        return names

    @staticmethod
    def unlabelled(
        root: str | Path,
        image_shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        **options: Unpack[ImageOptions],
    ) -> Images:
        """Return all images under a folder, with or without sub-folders, for `Module.predict`: without labels."""
        return Images(root, image_shape, dtype, **options)

    def _item(self, image: torch.Tensor, index: int) -> tuple[torch.Tensor, int]:
        return image, self.labels[index]


def _check_classes(listing: FolderListing, classes: Sequence[str]) -> None:
    missing = [name for name in classes if name not in listing.folders]
    extra = [name for name in listing.folders if name not in classes]
    if missing or extra:
        differences = [f"has no {', '.join(missing)}"] * bool(missing) + [f"has also {', '.join(extra)}"] * bool(extra)
        raise ValueError(
            f"image folder {listing.shown} {' and '.join(differences)}; expected the {len(classes)} classes "
            f"{', '.join(classes)}"
        )
