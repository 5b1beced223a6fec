"""Segmentation: random patches, class weights, and the example: whole images in tiles, and a U-Net that learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from segmentation import digit_scenes, main, predict_image, write_scenes
from torch import nn

from gangline import Module, cpu
from gangline.data import Augmentation, ImagePatches, class_weights

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
