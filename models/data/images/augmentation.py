"""Augmentation: images turned, moved, scaled, cropped and flipped at random, and normalised."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gangline.models.random_streams import mixed_seed

Size = int | tuple[int, int]
"""Pixels of a side of a square, or (height, width)."""
Range = tuple[float, float]
_GRAMMAR = "flip, flip-vertical, rotate=LOW:HIGH, translate=LOW:HIGH, scale=LOW:HIGH, resize=N or HxW, crop=N or HxW"


@dataclass(frozen=True)
class Augmentation:
    """What is done to each image of a batch, by numbers drawn from its ranges.

    An image is resized, a part of it is taken, flipped, scaled and rotated about its centre, brought to the size that
    the network takes, and translated; all of it composed into one affine matrix, by which a batch is warped once, with
    bilinear interpolation (kornia's ``warp_affine``). What lies outside the image is black. Then it is normalised.

    The numbers depend on (seed, epoch, index of the sample) alone: not on how many processes decode, on how a batch is
    split, or on where a run was resumed.

    Args:
        flip: left and right change places, for every second image.
        flip_vertical: top and bottom do, for every second image.
        rotate: degrees, counter-clockwise.
        translate: pixels of the output, to the right and, drawn by itself, down.
        scale: factors; above 1 enlarges.
        resize: what images are resized to before anything else; None: the size that the network takes.
        crop: the size of the part that is taken of the resized image, at a random place; None: all of it. It is scaled
            to the size that the network takes, if that is another.
        mean: what is taken off each channel, of pixels from 0 to 1; None: nothing.
        std: what each channel is divided by then; None: 1.

    Raises:
        ValueError: a range, a size or a number that is impossible.
        TypeError: no such things.
    """

    flip: bool = False
    flip_vertical: bool = False
    rotate: Range | None = None
    translate: Range | None = None
    scale: Range | None = None
    resize: Size | None = None
    crop: Size | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without the images."""
        for name in ("rotate", "translate", "scale"):
            _check_range(name, getattr(self, name))
        if self.scale is not None and self.scale[0] <= 0:
            raise ValueError(f"scale is from {self.scale[0]:g} to {self.scale[1]:g}; expected factors above 0")
        for name in ("resize", "crop"):
            _check_size(name, getattr(self, name))
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, tuple(float(value) for value in values))
                if not all(math.isfinite(value) for value in getattr(self, name)):
                    raise ValueError(f"{name} is {tuple(values)}; expected finite numbers, one a channel")
        if self.std is not None and min(self.std, default=0) <= 0:
            raise ValueError(f"std is {tuple(self.std)}; expected numbers above 0, one a channel")
        if self.resize is not None:
            self._check_crop(_sides(self.resize))

    def _check_crop(self, size: tuple[int, int]) -> None:
        if self.crop is None:
            return
        height, width = _sides(self.crop)
        if height > size[0] or width > size[1]:
            raise ValueError(
                f"crop is {height}x{width}, but images are resized to {size[0]}x{size[1]}; expected a part of that "
                "(set resize, which is the network's image size unless given)"
            )

    @classmethod
    def parse(
        cls, words: str, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> Augmentation:
        """From words with commas, such as ``flip,rotate=-10:10,translate=-2:2,scale=0.9:1.1,resize=72,crop=64``.

        The words are the names of the arguments; ``flip`` and ``flip-vertical`` stand alone, a range is LOW:HIGH, a
        size is N or HEIGHTxWIDTH. No words: no augmentation.

        Raises:
            ValueError: an unknown word, one given twice, or one whose value makes no sense.
        """
        given: dict[str, Any] = {}
        for word in (part.strip() for part in words.split(",") if part.strip()):
            name, has_value, value = word.partition("=")
            read = _READERS.get(name)
            if read is None or bool(has_value) != (read is not _flag):
                raise ValueError(f"augmentation {words!r} has {word!r}; expected of {_GRAMMAR}")
            field = name.replace("-", "_")
            if field in given:
                raise ValueError(f"augmentation {words!r} has {name} twice; expected it once")
            try:
                given[field] = read(value)
            except ValueError:
                raise ValueError(f"augmentation {words!r} has {word!r}; expected of {_GRAMMAR}") from None
        return cls(**given, mean=mean, std=std)

    def for_evaluation(self) -> Augmentation:
        """What held-out images get: they are resized to the network's size and normalised, and nothing is random."""
        return Augmentation(mean=self.mean, std=self.std)

    def check(self, image_shape: Sequence[int]) -> None:
        """See that it can be done for images of (channels, height, width).

        Raises:
            ValueError: it cannot.
        """
        channels, height, width = image_shape
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None and len(values) != channels:
                raise ValueError(f"{name} has {len(values)} numbers; expected {channels}, one a channel")
        self._check_crop(self.size_before(image_shape))
        if self.translate is not None and max(map(abs, self.translate)) >= min(height, width):
            low, high = self.translate
            raise ValueError(
                f"translate is from {low:g} to {high:g} pixels, which moves an image of {height}x{width} out of sight; "
                f"expected less than {min(height, width)}"
            )

    def size_before(self, image_shape: Sequence[int]) -> tuple[int, int]:
        """The (height, width) that an image is to be resized to before it comes here."""
        return _sides(self.resize) if self.resize is not None else (image_shape[1], image_shape[2])

    @property
    def moves_pixels(self) -> bool:
        """Whether there is more to do than to resize and to normalise."""
        return self != replace(self.for_evaluation(), mean=self.mean, std=self.std)

    def __call__(
        self, images: torch.Tensor, image_shape: Sequence[int], seed: int, epoch: int, samples: Sequence[int]
    ) -> torch.Tensor:
        """Augment a batch.

        Args:
            images: (N, channels, height, width) with pixels from 0 to 1, of `size_before`, on any device.
            image_shape: (channels, height, width) of what comes out.
            seed: of the random numbers.
            epoch: likewise.
            samples: likewise, the index of each sample in its data set.

        Returns:
            (N, *image_shape), of the same dtype.
        """
        if self.moves_pixels and len(images):
            from kornia.geometry.transform import warp_affine

            size = (image_shape[1], image_shape[2])
            compute = torch.float64 if images.dtype == torch.float64 else torch.float32
            matrices = self.matrices(image_shape, seed, epoch, samples).to(images.device, compute)
            # Half precision could not tell the pixels of a large image apart.
            images = warp_affine(images.to(compute), matrices, size, align_corners=False).to(images.dtype)
        for values, apply in ((self.mean, torch.Tensor.sub), (self.std, torch.Tensor.div)):
            if values is not None:
                images = apply(images, torch.tensor(values, dtype=images.dtype, device=images.device)[:, None, None])
        return images

    def matrices(self, image_shape: Sequence[int], seed: int, epoch: int, samples: Sequence[int]) -> torch.Tensor:
        """The matrix of each sample, (N, 2, 3) in float64: from pixels of the resized image to pixels of the output."""
        before = self.size_before(image_shape)
        return torch.stack([self._matrix(before, image_shape, seed, epoch, sample) for sample in samples])

    def _matrix(
        self, before: tuple[int, int], image_shape: Sequence[int], seed: int, epoch: int, sample: int
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(mixed_seed(seed, epoch, sample))
        drawn: list[float] = torch.rand(8, generator=generator, dtype=torch.float64).tolist()
        flip, flip_vertical, rotate, right, down, scale, across, along = drawn  # always all: each has its own place
        (_, height, width), (crop_height, crop_width) = image_shape, _sides(self.crop or before)
        left = math.floor(across * (before[1] - crop_width + 1))
        top = math.floor(along * (before[0] - crop_height + 1))
        angle = math.radians(_between(self.rotate, rotate, 0.0))
        factor = _between(self.scale, scale, 1.0)
        mirror_x = -1.0 if self.flip and flip < 0.5 else 1.0
        mirror_y = -1.0 if self.flip_vertical and flip_vertical < 0.5 else 1.0
        # Coordinates in which the pixel i reaches from i to i + 1, about the centre of the part that is taken; y points
        # down, so that a turn against the clock has its minus sign in the second row.
        cos, sin = factor * math.cos(angle), factor * math.sin(angle)
        wider, higher = width / crop_width, height / crop_height
        a, b = wider * cos * mirror_x, wider * sin * mirror_y
        c, d = -higher * sin * mirror_x, higher * cos * mirror_y
        centre_x, centre_y = left + crop_width / 2 - 0.5, top + crop_height / 2 - 0.5
        to_x = width / 2 - 0.5 + _between(self.translate, right, 0.0)
        to_y = height / 2 - 0.5 + _between(self.translate, down, 0.0)
        rows = [[a, b, to_x - a * centre_x - b * centre_y], [c, d, to_y - c * centre_x - d * centre_y]]
        return torch.tensor(rows, dtype=torch.float64)


def _between(limits: Range | None, drawn: float, otherwise: float) -> float:
    return otherwise if limits is None else limits[0] + drawn * (limits[1] - limits[0])


def _sides(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _check_range(name: str, limits: Any) -> None:
    if limits is None:
        return
    if not (isinstance(limits, tuple) and len(limits) == 2 and all(isinstance(x, (int, float)) for x in limits)):
        raise TypeError(f"{name} is {limits!r}; expected (lowest, highest)")
    if not all(math.isfinite(limit) for limit in limits):
        raise ValueError(f"{name} is from {limits[0]} to {limits[1]}; expected finite numbers")
    if limits[0] > limits[1]:
        raise ValueError(f"{name} is from {limits[0]:g} to {limits[1]:g}; expected the lower number first")


def _check_size(name: str, size: Any) -> None:
    if size is None:
        return
    sides = (size, size) if isinstance(size, int) else size
    if not (isinstance(sides, tuple) and len(sides) == 2 and all(type(side) is int for side in sides)):
        raise TypeError(f"{name} is {size!r}; expected a number of pixels, or (height, width)")
    if min(sides) < 1:
        raise ValueError(f"{name} is {sides[0]}x{sides[1]} pixels; expected 1 or more")


def _flag(_: str) -> bool:
    return True


def _range(value: str) -> Range:
    low, high = value.split(":")
    return float(low), float(high)


def _size(value: str) -> Size:
    sides = tuple(int(side) for side in value.split("x"))
    if len(sides) > 2:
        raise ValueError(value)
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


_READERS: dict[str, Callable[[str], Any]] = {
    "flip": _flag,
    "flip-vertical": _flag,
    "rotate": _range,
    "translate": _range,
    "scale": _range,
    "resize": _size,
    "crop": _size,
}
