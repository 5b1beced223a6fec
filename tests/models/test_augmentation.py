"""Augmentation and patches: effect of each word on pixels, its random numbers, masks, and the segmentation example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from segmentation import digit_scenes, main, predict_image, write_scenes
from torch import nn

from gangline import Module, cpu
from gangline.data import Augmentation, ImagePatches, class_weights

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


# Segmentation: random patches, class weights, and the example: whole images in tiles, and a U-Net that learns


OUTSIDE = -100
TURNS = Augmentation(flip=True, flip_vertical=True, rotate=(-20, 20), scale=(0.9, 1.1), mean=[0.3], std=[0.3])


@pytest.fixture
def scenes(tmp_path: Path) -> tuple[Path, Path]:
    return write_scenes(tmp_path, *digit_scenes(6, 40, per_scene=2))


def test_image_and_mask_are_cut_and_moved_alike(tmp_path: Path) -> None:
    """Each pixel's grey level is its class, so the patch shows whether both went the same way."""
    classes = np.random.default_rng(0).integers(0, 6, (3, 8, 10), dtype=np.uint8).repeat(8, 1).repeat(8, 2)
    for folder, factor in (("images", 40), ("masks", 1)):
        (tmp_path / folder).mkdir()
        for number, one in enumerate(classes):
            Image.fromarray(one * factor).save(tmp_path / folder / f"{number}.png")
    moves = Augmentation(flip=True, flip_vertical=True, rotate=(-40, 40), scale=(0.8, 1.3))
    patches = ImagePatches(tmp_path / "images", tmp_path / "masks", 32, channels=1, augmentation=moves)
    for epoch in range(4):
        for pixels, labels in patches.items_of_epoch(range(3), epoch):
            assert pixels.shape == (1, 32, 32)
            assert labels.shape == (32, 32)
            shown = pixels[0] * 255 / 40
            inside = (shown - shown.round()).abs() < 1e-3  # not blended with a neighbour
            known = inside & (labels != OUTSIDE)
            assert known.double().mean() > 0.4
            assert (shown.round()[known] == labels[known]).double().mean() > 0.97  # a blend may hit a level by chance


def test_patches_depend_on_seed_epoch_and_item_only(scenes: tuple[Path, Path]) -> None:
    patches = ImagePatches(*scenes, 16, channels=1, patches_per_image=3, augmentation=TURNS, seed=4)
    assert len(patches) == 18
    first = patches.items_of_epoch([5, 7], 2)
    again = ImagePatches(*scenes, 16, channels=1, patches_per_image=3, augmentation=TURNS, seed=4).items_of_epoch(
        [7], 2
    )
    assert all(torch.equal(one, other) for one, other in zip(first[1], again[0], strict=True))
    [other] = patches.items_of_epoch([7], 3)
    assert not torch.equal(first[1][0], other[0])
    assert not torch.equal(patches.items_of_epoch([6], 2)[0][0], first[1][0])  # another patch of the same image
    patches.set_epoch(2)
    assert torch.equal(patches[7][0], first[1][0])


def test_without_augmentation_a_patch_is_a_part_of_its_image(scenes: tuple[Path, Path]) -> None:
    patches = ImagePatches(*scenes, (16, 12), channels=1)
    pixels, labels = patches[3]
    image, mask = patches.whole(3)
    windows = image[0].unfold(0, 16, 1).unfold(1, 12, 1)
    match = (windows - pixels[0]).abs().amax((2, 3)) < 1e-4
    [(top, left)] = match.nonzero().tolist()
    assert torch.equal(labels, mask[top : top + 16, left : left + 12])


def test_an_image_that_is_smaller_than_a_patch_is_padded_and_its_margin_is_ignored(scenes: tuple[Path, Path]) -> None:
    pixels, labels = ImagePatches(*scenes, 48, channels=1)[0]
    assert pixels.shape == (1, 48, 48)
    assert (labels[40:] == OUTSIDE).all()
    assert (labels[:40, :40] != OUTSIDE).all()
    assert not pixels[:, 40:].any()


def test_ignored_pixels_have_no_class(scenes: tuple[Path, Path]) -> None:
    path = scenes[1] / "0000.png"
    values = np.array(Image.open(path))
    values[:5] = 255
    Image.fromarray(values).save(path)
    patches = ImagePatches(*scenes, 16, channels=1)
    assert (patches.whole(0)[1][:5] == OUTSIDE).all()
    assert patches.class_counts(5).sum() == 6 * 1600 - 5 * 40


def test_class_weights_are_median_frequency_over_frequency() -> None:
    assert class_weights(torch.tensor([80, 10, 0, 5])).tolist() == [0.125, 1.0, 0.0, 2.0]
    with pytest.raises(ValueError, match="no class has a pixel"):
        class_weights(torch.zeros(3))


def test_what_does_not_fit_is_named(scenes: tuple[Path, Path]) -> None:
    images, masks = scenes
    with pytest.raises(FileNotFoundError, match=r"masks: .*nowhere"):
        ImagePatches(scenes[0], scenes[1] / "nowhere", 8, channels=1)
    with pytest.raises(ValueError, match=r"mask .* has class . *; expected 0 to 0"):
        ImagePatches(scenes[0], scenes[1], 8, channels=1, num_classes=1)[0]
    with pytest.raises(ValueError, match="expected 0 to 1"):
        ImagePatches(images, masks, 16, channels=1).class_counts(2)
    Image.new("L", (40, 39)).save(masks / "0001.png")
    with pytest.raises(ValueError, match=r"image 0001.png has 40x40 pixels, but its mask 0001.png 39x40"):
        ImagePatches(images, masks, 16, channels=1)[1]
    Image.new("RGB", (40, 40)).save(masks / "0001.png")
    with pytest.raises(ValueError, match="3 channels; expected one"):
        ImagePatches(images, masks, 16, channels=1)[1]
    (images / "0002.png").write_text("no image")
    with pytest.raises(ValueError, match=r"image 0002.png cannot be read"):
        ImagePatches(images, masks, 16, channels=1)[2]
    (masks / "0003.png").unlink()
    with pytest.raises(FileNotFoundError, match="1 of 6 images have no mask"):
        ImagePatches(images, masks, 16, channels=1)
    for options, message in (
        ({"augmentation": Augmentation(crop=8)}, "resize or crop"),
        ({"patches_per_image": 0}, "patches_per_image is 0"),
        ({"channels": 2}, "channels is 2; expected 1 or 3"),
    ):
        with pytest.raises(ValueError, match=message):
            ImagePatches(images, masks, 16, **options)


class Coordinates(nn.Module):
    """Logits that depend on each pixel alone."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.cat([images, -images], 1) * 3 + self.bias

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))


@pytest.mark.parametrize(
    ("size", "tile", "overlap"), [((50, 37), (16, 16), 0.5), ((16, 16), (16, 16), 0.0), ((9, 30), (16, 8), 0.3)]
)
def test_tiles_of_a_network_without_surroundings_give_what_the_whole_image_does(
    size: tuple[int, int], tile: tuple[int, int], overlap: float
) -> None:
    image = torch.randn(1, *size, dtype=torch.float64)
    module = Module(Coordinates().double(), nn.CrossEntropyLoss(), [cpu(0), cpu(1)])
    found = predict_image(module, image, tile, overlap=overlap, batch_size=3)
    assert torch.allclose(found, Coordinates().double()(image[None])[0].softmax(0), rtol=0, atol=1e-12)
    module.close()


def test_the_example_trains_and_draws_each_held_out_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert 0 <= main(scenes=4, held_out_scenes=2, epochs=1, width=4) <= 1
    with Image.open("segmentation.png") as drawn:
        assert drawn.size == (3 * 96, 2 * 96)  # image, mask and prediction in a row


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_learns_scenes_of_real_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main() > 0.8
