"""Datasets of image files, local or at any URL that fsspec supports: decoded on access, labelled by sub-folder."""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, TypedDict, Unpack
from urllib.parse import quote

import numpy as np
import torch
from torch.utils.data import Dataset

from gangline.models.arguments import check_int
from gangline.models.data.images.augmentation import Augmentation
from gangline.models.data.reader import Unreadable

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_SECRET_NAMES = re.compile("SECRET|TOKEN|PASSWORD|ACCESS_KEY|API_KEY|ACCOUNT_KEY|CREDENTIAL", re.IGNORECASE)
_URL_ARGUMENTS = "x-amz-signature|x-amz-credential|x-amz-security-token|signature|sig|token|password|secret"
_SHORTEST_SECRET = 4  # characters; replacing shorter strings would only garble the message
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

    unlabelled = Images
    """All images under a folder, with or without sub-folders, for `Module.predict`: without labels."""

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


def is_url(root: str | Path) -> bool:
    """Return True for a URL for fsspec, such as ``s3://bucket/train`` or ``zip://train::images.zip``."""
    return isinstance(root, str) and "://" in root


class FolderListing:
    """Image files under a folder, and its direct sub-folders."""

    def __init__(self, root: str | Path) -> None:
        """List a folder; errors as of `Images`, without secrets."""
        self.root: str | Path = root if is_url(root) else Path(root)
        self.shown = without_secrets(str(root))
        """The root for messages, without secrets."""
        names, folders = _list_url(str(root), self.shown) if is_url(root) else _list_path(Path(root))
        self.names = sorted((name for name in names if _is_image(name)), key=lambda name: name.split("/"))
        """Sorted paths of the images, relative to the root, with slashes."""
        inside = {name.split("/")[0] for name in names if "/" in name} | folders
        self.folders = sorted(name for name in inside if name[0] != ".")
        """Sorted names of the sub-folders directly under the root."""

    def file(self, name: str) -> str | Path:
        """Return the path of a file, or its URL without secrets."""
        return self.root / name if isinstance(self.root, Path) else f"{self.shown.rstrip('/')}/{name}"


def _is_image(name: str) -> bool:
    last = name.rpartition("/")[2]
    return not last.startswith(".") and os.path.splitext(last)[1].lower() in IMAGE_SUFFIXES


def _list_path(root: Path) -> tuple[list[str], set[str]]:
    if not root.is_dir():
        raise FileNotFoundError(f"image folder {root} does not exist")
    with os.scandir(root) as entries:
        top = sorted(entries, key=lambda entry: entry.name)
        folders = {entry.name for entry in top if entry.is_dir()}
        names = [entry.name for entry in top if entry.is_file()]
    for folder in sorted(folders):
        for directory, _, files in os.walk(root / folder):
            prefix = os.path.relpath(directory, root).replace(os.sep, "/")
            names += [f"{prefix}/{name}" for name in files]
    return names, folders


def _list_url(url: str, shown: str) -> tuple[list[str], set[str]]:
    try:
        files, path = _open_store(url)
        found: dict[str, Any] = files.find(path, withdirs=True, detail=True)
        exists = bool(found) or files.isdir(path)
    except FileNotFoundError:
        exists, found = False, {}
    except Exception as error:  # noqa: BLE001  stores raise many types
        raise _store_error(shown, without_secrets(str(error), url), error) from None
    if not exists:
        raise FileNotFoundError(f"image folder {shown} does not exist: no such bucket or folder, or it is empty")
    names, folders = [], set()
    for name, entry in found.items():
        inside = name.strip("/").removeprefix(path.strip("/")).strip("/")
        if entry["type"] == "file" and inside:
            names.append(inside)
        elif inside and "/" not in inside:
            folders.add(inside)
    return names, folders


def _open_store(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, which fsspec caches per process, and the path in it."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    files, path = url_to_fs(url)
    return files, str(path)


def _store_error(shown: str, text: str, error: Exception) -> Exception:
    text = text or "no reason given"
    if isinstance(error, ImportError):
        return ValueError(f"image folder {shown} cannot be opened: {text} (s3:// needs `pip install gangline[s3]`)")
    if isinstance(error, ValueError):
        return ValueError(f"image folder {shown} cannot be opened: {text}")
    hint = "check the address, and that the server lists the folder"
    if shown.startswith("s3"):
        hint = (
            "check that the credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE; "
            "AWS_ENDPOINT_URL) permit reading"
        )
    return RuntimeError(f"image folder {shown} cannot be listed: {type(error).__name__}: {text}; {hint}")


def read(root: str | Path, names: Sequence[str]) -> list[bytes | Path | Exception]:
    """Return each file in a form for `PIL.Image.open`: a path, or the bytes behind a URL, fetched concurrently.

    A missing file is returned as a FileNotFoundError; other errors are a RuntimeError without secrets.
    """
    if isinstance(root, Path):
        return [root / name for name in names]
    shown = without_secrets(root).rstrip("/")
    try:
        files, path = _open_store(root)
        paths = [f"{path.rstrip('/')}/{name}" if path.strip("/") else name for name in names]
        contents: dict[str, bytes | Exception] = files.cat(paths, on_error="return")
        # Some file systems return other keys, in the order of the request.
        found: list[bytes | Path | Exception] = (
            [contents[p] for p in paths] if all(p in contents for p in paths) else list(contents.values())
        )
    except Exception as error:  # noqa: BLE001  stores raise many types
        found = [error] * len(names)
    for name, content in zip(names, found, strict=True):
        if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
            text = without_secrets(str(content), root) or "no reason given"
            raise RuntimeError(f"image {shown}/{name} cannot be fetched: {type(content).__name__}: {text}")
    return found


def without_secrets(text: str, url: str = "") -> str:
    """Return the text with secrets replaced by ``***``.

    Secrets are: users and passwords in URLs, and those of ``url`` anywhere in the text; signatures and tokens in URL
    arguments; the values of environment variables whose names contain SECRET, TOKEN, PASSWORD, ACCESS_KEY and the like.
    """
    text = re.sub(r"://[^/@\s]*@", "://***@", text)
    text = re.sub(rf"(?i)\b({_URL_ARGUMENTS})=[^&\s]+", r"\1=***", text)
    secrets = [value for name, value in os.environ.items() if _SECRET_NAMES.search(name)]
    for user in re.findall(r"://([^/@\s]*)@", url):
        secrets += user.split(":", 1)
    for secret in sorted((s for s in secrets if len(s) >= _SHORTEST_SECRET), key=len, reverse=True):
        text = text.replace(secret, "***").replace(quote(secret, safe=""), "***")
    return text
