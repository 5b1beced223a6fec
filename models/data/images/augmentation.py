"""Augmentation: random flips, rotations, translations, scalings and crops of images, and normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from gangline.models.random_streams import mixed_seed

Size = int | tuple[int, int]
"""Pixels of a side of a square, or (height, width)."""
Range = tuple[float, float]
_GRAMMAR = "flip, flip-vertical, rotate=LOW:HIGH, translate=LOW:HIGH, scale=LOW:HIGH, resize=N or HxW, crop=N or HxW"


@dataclass(frozen=True)
class Augmentation:
    """Random geometric changes of each image in a batch, and normalisation.

    An image is resized, cropped, flipped, scaled and rotated about its centre, brought to the network's input size, and
    translated. All of it is one affine matrix per image, applied in one bilinear interpolation; pixels from outside the
    image are black. Then the image is normalised.

    Random numbers depend on (seed, epoch, sample index) only: not on the number of reading processes, the split of a
    batch, or the point where a run resumed.

    Args:
        flip: swap left and right in every second image, at random.
        flip_vertical: swap top and bottom in every second image, at random.
        rotate: range of degrees, counter-clockwise.
        translate: range of pixels of the output, drawn once to the right and once down.
        scale: range of factors; above 1 enlarges.
        resize: size of the images before anything else; None: the network's input size.
        crop: size of a part of the resized image at a random position, which is scaled to the network's input size;
            None: all of it.
        mean: value per channel to subtract, for pixels in [0, 1]; None: nothing.
        std: value per channel to divide by; None: 1.

    Raises:
        ValueError: if a range, a size or a number is invalid.
        TypeError: if an argument has a wrong type.
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
        """Check the values that do not depend on the images."""
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
                    raise ValueError(f"{name} is {tuple(values)}; expected finite numbers, one per channel")
        if self.mean is not None and max(self.mean, default=0) > 1:
            raise ValueError(
                f"mean is {self.mean}; expected numbers up to 1, as pixels are from 0 to 1 (divide by 255)"
            )
        if self.std is not None and min(self.std, default=0) <= 0:
            raise ValueError(f"std is {tuple(self.std)}; expected numbers above 0, one per channel")
        if self.resize is not None:
            self._check_crop(_sides(self.resize))

    def _check_crop(self, size: tuple[int, int]) -> None:
        if self.crop is None:
            return
        height, width = _sides(self.crop)
        if height > size[0] or width > size[1]:
            raise ValueError(
                f"crop is {height}x{width}, but images are resized to {size[0]}x{size[1]}; expected a smaller crop "
                "(or a larger resize, by default the network's image size)"
            )

    @classmethod
    def parse(
        cls, words: str, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> Augmentation:
        """Parse comma-separated words such as ``flip,rotate=-10:10,translate=-2:2,scale=0.9:1.1,resize=72,crop=64``.

        The words are the names of the arguments; ``flip`` and ``flip-vertical`` have no value, a range is LOW:HIGH, a
        size is N or HEIGHTxWIDTH. An empty string means no augmentation.

        Raises:
            ValueError: if a word is unknown, given twice, or has an invalid value.
        """
        given: dict[str, Any] = {}
        for word in (part.strip() for part in words.split(",") if part.strip()):
            name, has_value, value = word.partition("=")
            field = name.replace("-", "_")
            if field in given:
                raise ValueError(f"augmentation {words!r} has {name} twice; expected it once")
            try:
                given[field] = _READERS[name](value) if has_value else _FLAGS[name]
            except (KeyError, ValueError):
                raise ValueError(f"augmentation {words!r} has {word!r}; expected {_GRAMMAR}") from None
        return cls(**given, mean=mean, std=std)

    def for_evaluation(self) -> Augmentation:
        """Return the augmentation of held-out images: resized to the network's input size and normalised only."""
        return Augmentation(mean=self.mean, std=self.std)

    def check(self, image_shape: Sequence[int]) -> None:
        """Check that the augmentation can be applied to images of (channels, height, width).

        Raises:
            ValueError: if it cannot.
        """
        channels, height, width = image_shape
        for name in ("mean", "std"):
            values = getattr(self, name)
            if values is not None and len(values) != channels:
                raise ValueError(f"{name} has {len(values)} numbers; expected {channels}, one per channel")
        self._check_crop(self.size_before(image_shape))
        if self.translate is not None and max(map(abs, self.translate)) >= min(height, width):
            low, high = self.translate
            raise ValueError(
                f"translate is from {low:g} to {high:g} pixels, which moves an image of {height}x{width} out of the "
                f"frame; expected less than {min(height, width)}"
            )

    def size_before(self, image_shape: Sequence[int]) -> tuple[int, int]:
        """Return the (height, width) that images must be resized to before the call."""
        return _sides(self.resize) if self.resize is not None else (image_shape[1], image_shape[2])

    @property
    def moves_pixels(self) -> bool:
        """True if images are warped, not only resized and normalised."""
        return self != self.for_evaluation()

    def __call__(
        self, images: torch.Tensor, image_shape: Sequence[int], seed: int, epoch: int, samples: Sequence[int]
    ) -> torch.Tensor:
        """Augment a batch.

        Args:
            images: (N, channels, height, width) of `size_before`, pixels in [0, 1], on any device.
            image_shape: (channels, height, width) of the output.
            seed: seed of the random numbers.
            epoch: epoch, which changes the random numbers.
            samples: index of each image in its dataset, which changes them too.

        Returns:
            (N, *image_shape), of the same dtype.
        """
        if self.moves_pixels and len(images):
            compute = torch.float64 if images.dtype == torch.float64 else torch.float32  # half cannot index pixels
            matrices = self.matrices(image_shape, seed, epoch, samples)
            images = warp(images.to(compute), matrices, (image_shape[1], image_shape[2])).to(images.dtype)
        for values, apply in ((self.mean, torch.Tensor.sub), (self.std, torch.Tensor.div)):
            if values is not None:
                images = apply(images, torch.tensor(values, dtype=images.dtype, device=images.device)[:, None, None])
        return images

    def matrices(self, image_shape: Sequence[int], seed: int, epoch: int, samples: Sequence[int]) -> torch.Tensor:
        """Return the (N, 2, 3) matrices in float64, from pixels of the resized image to pixels of the output."""
        before = self.size_before(image_shape)
        return torch.stack([self._matrix(before, image_shape, seed, epoch, sample) for sample in samples])

    def _matrix(
        self, before: tuple[int, int], image_shape: Sequence[int], seed: int, epoch: int, sample: int
    ) -> torch.Tensor:
        generator = torch.Generator().manual_seed(mixed_seed(seed, epoch, sample))
        drawn: list[float] = torch.rand(8, generator=generator, dtype=torch.float64, device="cpu").tolist()
        flip, flip_vertical, rotate, right, down, scale, across, along = drawn  # always all: each keeps its number
        (_, height, width), (crop_height, crop_width) = image_shape, _sides(self.crop or before)
        left = math.floor(across * (before[1] - crop_width + 1))
        top = math.floor(along * (before[0] - crop_height + 1))
        angle = math.radians(_between(self.rotate, rotate, 0.0))
        factor = _between(self.scale, scale, 1.0)
        mirror_x = -1.0 if self.flip and flip < 0.5 else 1.0
        mirror_y = -1.0 if self.flip_vertical and flip_vertical < 0.5 else 1.0
        # Pixel i covers i - 0.5 to i + 0.5. The y axis points down, so a counter-clockwise rotation has its minus sign
        # in the second row.
        cos, sin = factor * math.cos(angle), factor * math.sin(angle)
        wider, higher = width / crop_width, height / crop_height
        a, b = wider * cos * mirror_x, wider * sin * mirror_y
        c, d = -higher * sin * mirror_x, higher * cos * mirror_y
        centre_x, centre_y = left + crop_width / 2 - 0.5, top + crop_height / 2 - 0.5
        to_x = width / 2 - 0.5 + _between(self.translate, right, 0.0)
        to_y = height / 2 - 0.5 + _between(self.translate, down, 0.0)
        rows = [[a, b, to_x - a * centre_x - b * centre_y], [c, d, to_y - c * centre_x - d * centre_y]]
        return torch.tensor(rows, dtype=torch.float64, device="cpu")


def warp(images: torch.Tensor, matrices: torch.Tensor, size: tuple[int, int], mode: str = "bilinear") -> torch.Tensor:
    """Warp images (N, channels, height, width) to a size by their (N, 2, 3) matrices, from input to output pixels.

    The matrices are float64. Pixels from outside are 0. The mode is "bilinear" or "nearest".
    """
    height, width = size
    a, b, right, c, d, down = matrices.flatten(1).unbind(1)
    determinant = a * d - b * c
    inverse_x = d / determinant, -b / determinant, (b * down - d * right) / determinant
    inverse_y = -c / determinant, a / determinant, (c * right - a * down) / determinant

    # grid_sample's coordinates (align_corners=False) put the centre of pixel i of n at (2 i + 1) / n - 1. The grid is
    # computed elementwise, because the product in F.affine_grid can round differently for different batch sizes.
    x, y = (((2 * torch.arange(n, dtype=torch.float64, device="cpu") + 1) / n - 1).to(images) for n in (width, height))
    grid = []
    for (by_x, by_y, offset), side in ((inverse_x, images.shape[3]), (inverse_y, images.shape[2])):
        offset = (by_x * (width - 1) + by_y * (height - 1) + 2 * offset + 1) / side - 1
        of_x, of_y, constant = (
            value.to(images)[:, None, None] for value in (by_x * width / side, by_y * height / side, offset)
        )
        grid.append(of_x * x + of_y * y[:, None] + constant)
    return F.grid_sample(images, torch.stack(grid, dim=-1), mode=mode, align_corners=False)


def _between(limits: Range | None, drawn: float, otherwise: float) -> float:
    return otherwise if limits is None else limits[0] + drawn * (limits[1] - limits[0])


def _sides(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _check_range(name: str, limits: Any) -> None:
    if limits is None:
        return
    if not (isinstance(limits, tuple) and len(limits) == 2 and all(isinstance(x, (int, float)) for x in limits)):
        raise TypeError(f"{name} is {limits!r}; expected (low, high)")
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


def _range(value: str) -> Range:
    low, high = value.split(":")
    return float(low), float(high)


def _size(value: str) -> Size:
    sides = tuple(int(side) for side in value.split("x"))
    if len(sides) > 2:
        raise ValueError(value)
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


_FLAGS = {"flip": True, "flip-vertical": True}
_READERS: dict[str, Callable[[str], Any]] = {
    "rotate": _range,
    "translate": _range,
    "scale": _range,
    "resize": _size,
    "crop": _size,
}
