"""Augmentation: effect of each word on pixels, its random numbers, and invalid words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gangline.models.data.images.augmentation import Augmentation

SHAPE = (3, 8, 8)


def images(samples: int = 6, height: int = 8, width: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(samples, 3, height, width, dtype=dtype)


def augmented(augmentation: Augmentation, given: torch.Tensor, shape: tuple[int, int, int] = SHAPE) -> torch.Tensor:
    return augmentation(given, shape, 0, 0, range(len(given)))


@pytest.mark.parametrize(("word", "axis"), [("flip", 3), ("flip-vertical", 2)])
def test_about_every_second_image_is_flipped(word: str, axis: int) -> None:
    given = images(64)
    result = augmented(Augmentation.parse(word), given)
    flipped = [torch.allclose(new, old.flip(axis - 1), atol=1e-5) for old, new in zip(given, result, strict=True)]
    kept = [torch.allclose(new, old, atol=1e-5) for old, new in zip(given, result, strict=True)]
    assert [one != other for one, other in zip(flipped, kept, strict=True)] == [True] * 64
    assert 20 <= sum(flipped) <= 44


def test_a_crop_is_a_part_of_the_resized_image() -> None:
    augmentation = Augmentation.parse("resize=10x12,crop=8")
    assert augmentation.size_before(SHAPE) == (10, 12)
    given = images(32, 10, 12)
    places = set()
    for old, new in zip(given, augmented(augmentation, given), strict=True):
        at = [
            (top, left)
            for top in range(3)
            for left in range(5)
            if torch.allclose(new, old[:, top : top + 8, left : left + 8], atol=1e-4)
        ]
        assert len(at) == 1
        places.add(at[0])
    assert {top for top, _ in places} == {0, 1, 2}
    assert {left for _, left in places} == {0, 1, 2, 3, 4}


def test_all_geometry_is_one_matrix_in_the_order_that_is_documented() -> None:
    augmentation = Augmentation(rotate=(90, 90), translate=(1, 1), scale=(2, 2))
    [matrix] = augmentation.matrices(SHAPE, 0, 0, [0])
    corner = matrix @ torch.tensor([7.0, 3.5, 1.0], dtype=torch.float64)  # the middle of the right side
    assert corner.tolist() == pytest.approx([3.5 + 1, 3.5 - 2 * 3.5 + 1])  # enlarged, turned to the top, moved


# warp_affine(images, matrices, (4, 3), align_corners=False) of kornia 0.9.0, the rows of two images
KORNIA = [
    [0.00220596694, 0.00134332478, 0.002535417562],
    [0.01456544762, 0.01626894046, 0.01927666024],
    [0.04404629248, 0.04855215157, 0.05259125108],
    [0.0921902844, 0.09772752322, 0.1028375532],
    [0.2559298516, 0.2419678568, 0.2208763884],
    [0.3877742096, 0.4062322938, 0.3964780228],
    [0.5291236248, 0.5505304178, 0.4735197166],
    [0.6928139163, 0.7168239271, 0.5366684443],
]


def test_images_are_warped_as_kornia_warps_them() -> None:
    augmentation = Augmentation(flip=True, rotate=(-30, 30), translate=(-1, 1), scale=(0.8, 1.2), resize=5, crop=4)
    given = torch.arange(50, dtype=torch.float64).reshape(2, 1, 5, 5) ** 2 / 2500
    result = augmentation(given, (1, 4, 3), 0, 0, range(2))
    torch.testing.assert_close(result.reshape(8, 3), torch.tensor(KORNIA, dtype=torch.float64), rtol=0, atol=1e-9)


def test_channels_are_normalised_last() -> None:
    given = images()
    mean, std = [0.1, 0.2, 0.3], [0.5, 1.0, 2.0]
    result = augmented(Augmentation(mean=mean, std=std), given)
    expected = (given - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert torch.allclose(result, expected)
    moved = augmented(Augmentation(translate=(3, 3), mean=mean, std=std), given)
    assert torch.allclose(
        moved[0, :, 0, 0], -torch.tensor(mean) / torch.tensor(std)
    )  # pixels from outside the image are black


WORDS = "flip,flip-vertical,rotate=-30:30,translate=-2:2,scale=0.8:1.2,resize=10,crop=9"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_sample_is_the_same_in_any_batch_to_the_bit(dtype: torch.dtype) -> None:
    augmentation = Augmentation.parse(WORDS)
    given = images(9, 10, 10, dtype)
    together = augmentation(given, SHAPE, 3, 5, range(9))
    assert together.dtype == dtype
    for begin, end in ((0, 1), (1, 4), (4, 9)):
        part = augmentation(given[begin:end], SHAPE, 3, 5, range(begin, end))
        assert torch.equal(part, together[begin:end])


def test_numbers_follow_from_seed_epoch_and_sample_and_from_nothing_else() -> None:
    augmentation = Augmentation.parse(WORDS)
    first = augmentation.matrices(SHAPE, 1, 2, [3, 4])
    torch.rand(100)
    assert torch.equal(augmentation.matrices(SHAPE, 1, 2, [4, 3]).flip(0), first)
    for other in ((0, 2, [3, 4]), (1, 0, [3, 4]), (1, 2, [5, 6])):
        assert not torch.isclose(augmentation.matrices(SHAPE, *other), first).all(2).all(1).any()


def test_words_are_the_arguments() -> None:
    assert Augmentation.parse(
        " flip, rotate=-10:10 ,translate=-2:2,scale=0.9:1.1,resize=72x80,crop=64"
    ) == Augmentation(flip=True, rotate=(-10, 10), translate=(-2, 2), scale=(0.9, 1.1), resize=(72, 80), crop=64)


REFUSED: list[Any] = [
    ("flop", ValueError, r"augmentation 'flop' has 'flop'; expected flip, flip-vertical, rotate=LOW:HIGH"),
    ("flip=1", ValueError, "has 'flip=1'; expected flip"),
    ("rotate", ValueError, "has 'rotate'; expected flip"),
    ("rotate=1:2:3", ValueError, "has 'rotate=1:2:3'"),
    ("scale=a:b", ValueError, "has 'scale=a:b'"),
    ("crop=8x8x8", ValueError, "has 'crop=8x8x8'"),
    ("crop=3.5", ValueError, "has 'crop=3.5'"),
    ("flip,flip", ValueError, "has flip twice"),
    ("mean=0:1", ValueError, "has 'mean=0:1'"),
    ("rotate=10:-10", ValueError, "rotate is from 10 to -10; expected the lower number first"),
    ("rotate=nan:1", ValueError, "rotate is from nan to 1.0; expected finite numbers"),
    ("scale=0:1", ValueError, "scale is from 0 to 1; expected factors above 0"),
    ("crop=0", ValueError, "crop is 0x0 pixels; expected 1 or more"),
    ("resize=8,crop=9", ValueError, "crop is 9x9, but images are resized to 8x8; expected a smaller crop"),
    ({"std": (0.1, -0.1, 0.1)}, ValueError, r"std is \(0.1, -0.1, 0.1\); expected numbers above 0"),
    ({"mean": (123.68, 0.5)}, ValueError, r"mean is \(123.68, 0.5\); expected numbers up to 1.*divide by 255"),
    ({"mean": (float("nan"),)}, ValueError, "mean is .*; expected finite numbers"),
    ({"rotate": 10}, TypeError, r"rotate is 10; expected \(low, high\)"),
    ({"crop": 2.5}, TypeError, "crop is 2.5; expected a number of pixels"),
    ({"resize": True}, TypeError, "resize is True"),
    ({"crop": (8, 8, 8)}, TypeError, "crop is"),
    ({"crop": 9}, ValueError, "crop is 9x9, but images are resized to 8x8"),  # from here on for images of 8x8
    ({"mean": (0.5,)}, ValueError, "mean has 1 numbers; expected 3, one per channel"),
    ({"translate": (-9, 0)}, ValueError, "translate is from -9 to 0 pixels, which moves an image of 8x8 out of"),
]


def test_invalid_words_and_arguments_are_refused() -> None:
    for given, error, message in REFUSED:
        with pytest.raises(error, match=message):
            (Augmentation.parse(given) if isinstance(given, str) else Augmentation(**given)).check(SHAPE)
