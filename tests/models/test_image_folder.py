"""Image folders: classes, unreadable files, URLs, splits, and decoding processes."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Subset

from gangline import Module, cpu
from gangline.models.data.datasets import image_folder, raw_digits, split_each_label
from gangline.models.data.images.augmentation import Augmentation
from gangline.models.data.images.folder import ImageFolder
from gangline.models.data.sources import source
from gangline.models.workers import Workers
from tests.programs import environment

CLASSES = ("eight", "one", "zero")
PER_CLASS = 8
SHAPE = (1, 8, 8)


@cache
def digit(number: int, which: int) -> np.ndarray[Any, Any]:
    levels, labels = raw_digits()
    return (levels[labels == number][which] * 15).numpy()


def write(path: Path, pixels: np.ndarray[Any, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write eight real digits of each of three classes as PNG files."""
    root = tmp_path / "digits"
    for number, name in ((0, "zero"), (8, "eight"), (1, "one")):
        for which in reversed(range(PER_CLASS)):
            write(root / name / f"{which}.png", digit(number, which))
    return root


def spoil(folder: Path, *names: str) -> list[str]:
    """Replace images by text files."""
    for name in names:
        (folder / name).write_text("no image")
    return [str(folder / name) for name in names]


# -- what files hold ------------------------------------------------------------------------------------------------


def test_sub_folders_are_classes_in_alphabetical_order_and_pixels_are_scaled_to_one(folder: Path) -> None:
    dataset = ImageFolder(folder, SHAPE)
    assert tuple(dataset.classes) == CLASSES
    assert [Path(name).parent.name for name in dataset.files] == ["eight"] * 8 + ["one"] * 8 + ["zero"] * 8
    assert len(dataset) == 24
    for index in range(24):
        image, label = dataset[index]
        assert label == index // 8
        assert image.dtype == torch.float32
        assert torch.equal(image[0], torch.from_numpy(digit((8, 1, 0)[label], index % 8)) / 255)
    ordered = ImageFolder(folder, SHAPE, classes=["zero", "one", "eight"])  # as expected
    assert ordered.classes == ["zero", "one", "eight"]
    assert ordered.labels == [2] * 8 + [1] * 8 + [0] * 8
    assert ordered.files == dataset.files


COLOURS = np.arange(2 * 4 * 3, dtype=np.uint8).reshape(2, 4, 3) * 10
FLAT = np.full((5, 7, 3), (51, 102, 204), np.uint8)
DEEP = np.array([[0, 16384], [32768, 65535]], np.uint16)


@pytest.mark.parametrize(
    ("pixels", "shape", "expected", "atol"),
    [
        (COLOURS, (3, 2, 4), torch.from_numpy(COLOURS).permute(2, 0, 1) / 255, 0),
        (FLAT, (3, 16, 12), torch.tensor([51, 102, 204]).reshape(3, 1, 1) / 255, 0),
        (DEEP, (1, 2, 2), torch.tensor([[0.0, 0.25], [0.5, 1.0]]), 0.005),
    ],
    ids=["channels", "one colour resized", "sixteen bits"],
)
def test_colours_keep_their_channels_places_and_range(
    tmp_path: Path, pixels: Any, shape: tuple[int, int, int], expected: torch.Tensor, atol: float
) -> None:
    write(tmp_path / "a" / "image.png", pixels)
    image, _ = ImageFolder(tmp_path, shape)[0]
    assert torch.allclose(image, expected.expand(shape), rtol=0, atol=atol)


def test_images_lie_at_any_depth_under_any_known_ending_and_other_and_hidden_files_do_not_count(tmp_path: Path) -> None:
    for name in ("b.png", "deep/er/a.JPG", "c.bmp", "d.PNG", "../.thumbnails/e.png"):
        write(tmp_path / "class" / name, np.zeros((2, 2), np.uint8))
    for name in ("class/notes.txt", "class/._0.png", "readme.txt"):
        (tmp_path / name).write_text("no image")
    dataset = ImageFolder(tmp_path, (1, 2, 2))
    assert dataset.classes == ["class"]
    assert {Path(name).name for name in dataset.files} == {"a.JPG", "b.png", "c.bmp", "d.PNG"}
    assert all(dataset[index][0].shape == (1, 2, 2) for index in range(4))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow's warning about a damaged TIFF
@pytest.mark.parametrize("ending", [".png", ".jpg", ".bmp", ".gif", ".tiff", ".webp", ".ppm"])
def test_a_torn_image_or_one_of_a_size_beyond_reason_is_refused_by_its_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "class" / f"torn{ending}"
    write(path, np.random.default_rng(0).integers(0, 255, (16, 16), dtype=np.uint8))
    content = path.read_bytes()
    dataset = ImageFolder(tmp_path, (1, 16, 16))
    assert dataset[0][0].shape == (1, 16, 16)
    damaged = [content[:length] for length in (0, 1, 10, len(content) // 2, len(content) * 9 // 10)]
    if ending == ".bmp":
        damaged.append(content[:18] + (2**24).to_bytes(4, "little") + content[22:])  # the width in the header
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(ValueError, match="cannot be read") as caught:
            dataset[0]
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "P with transparency", "I;16", "1", "CMYK"])
def test_every_kind_of_image_gives_the_same_grey(tmp_path: Path, mode: str) -> None:
    pixels = np.where(digit(0, 0) > 100, 255, 0).astype(np.uint8)
    image = Image.fromarray(pixels)
    options: dict[str, Any] = {}
    if mode == "I;16":
        image = Image.fromarray(pixels.astype(np.uint16) * 257)
    elif mode.startswith("P"):
        image = image.convert("P")
        options = {"transparency": bytes([0, 128])} if "transparency" in mode else {}
    else:
        image = image.convert(mode)
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / f"image.{'tiff' if mode == 'CMYK' else 'png'}", **options)
    for channels in (1, 3):
        found, _ = ImageFolder(tmp_path, (channels, 8, 8))[0]
        assert torch.allclose(found, torch.from_numpy(pixels).expand(channels, 8, 8) / 255, atol=0.01)


# -- images without labels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_images_without_labels_are_predicted_in_the_order_of_their_files(folder: Path, num_workers: int) -> None:
    for number, name in enumerate(CLASSES):  # images of the folder itself too
        (folder / name / "0.png").rename(folder / f"{number}.png")
    images = ImageFolder.unlabelled(folder, SHAPE, num_workers=num_workers)
    assert [str(Path(file).relative_to(folder)) for file in images.files[:4]] == [
        "0.png",
        "1.png",
        "2.png",
        "eight/1.png",
    ]
    module = Module(nn.Flatten(), context=[cpu(0), cpu(1)])
    predicted = module.predict(images, batch_size=7)
    module.close()
    assert torch.equal(predicted, torch.stack([images[index] for index in range(24)]).flatten(1))


# -- files that cannot be read --------------------------------------------------------------------------------------


def test_unreadable_files_are_left_out_of_their_batches_and_listed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = spoil(folder, "one/3.png", "zero/7.png")
    image = folder / "eight" / "0.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64), np.uint8)).save(image)
    image.write_bytes(image.read_bytes()[:1500])
    dataset = ImageFolder(folder, SHAPE, skip_unreadable=3)
    batches = source(dataset, 5, shuffle=False, seed=0)
    with caplog.at_level(logging.WARNING, "gangline"):
        for epoch in range(2):
            sizes = [len(labels) for _, labels in batches.epoch(epoch)]
            assert sum(sizes) == 22
            assert max(sizes) == 5
    assert [file for file, _ in dataset.skipped] == [str(image), *bad]
    assert "truncated" in dataset.skipped[0][1]
    assert "cannot identify" in dataset.skipped[1][1]
    assert [str(image) in caplog.messages[0], bad[0] in caplog.messages[1], bad[1] in caplog.messages[2]] == [True] * 3
    assert len(caplog.messages) == 3


def test_a_batch_without_any_readable_image_is_a_step_without_an_update(folder: Path) -> None:
    spoil(folder, *(f"one/{number}.png" for number in range(8)), "zero/0.png")
    dataset = ImageFolder(folder, SHAPE, skip_unreadable=9)
    batches = source(dataset, 8, shuffle=False, seed=0)
    assert [None if part is None else len(part[1]) for part in batches.parts(Workers(), 0)] == [8, None, 7]
    updates = []
    module = Module(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), nn.CrossEntropyLoss(), cpu())
    module.fit(dataset, dataset, num_epoch=1, batch_size=8, shuffle=False, batch_end_callback=updates.append)
    assert [param.nbatch for param in updates] == [0, 2]
    assert len(module.predict(dataset, batch_size=8)) == 15
    module.close()


@pytest.mark.parametrize(
    ("bad", "limit", "message"),
    [
        (["one/3.png"], None, "cannot be read"),
        (["one/3.png", "zero/2.png", "zero/7.png"], 2, "3 images cannot be read, more than the 2 that skip_unreadable"),
    ],
)
def test_one_more_unreadable_file_than_the_limit_is_an_error_that_lists_them_all(
    folder: Path, bad: list[str], limit: int | None, message: str
) -> None:
    bad = spoil(folder, *bad)
    dataset = ImageFolder(folder, SHAPE, **({} if limit is None else {"skip_unreadable": limit}))
    with pytest.raises(ValueError, match=message) as caught:
        list(source(dataset, 5, shuffle=False, seed=0).epoch(0))
    assert all(file in str(caught.value) for file in bad)


# -- folders and options that are refused ---------------------------------------------------------------------------


REFUSED: list[Any] = [
    ("", {"classes": ["eight", "one"]}, ValueError, "{folder} has also zero; expected the 2 classes eight, one"),
    ("", {"classes": [*CLASSES, "nine"]}, ValueError, "{folder} has no nine; expected the 4 classes"),
    ("", {"classes": ["eight", "one", "nine"]}, ValueError, "{folder} has no nine and has also zero"),
    ("", {"skip_unreadable": -1}, ValueError, "skip_unreadable is -1; expected 0 or more"),
    ("", {"num_workers": True}, TypeError, "num_workers is True"),
    ("", {"augmentation": Augmentation(crop=9)}, ValueError, "crop is 9x9, but images are resized to 8x8"),
    ("", {"image_shape": (2, 8, 8)}, ValueError, "expected 1 or 3 channels, height and width"),
    ("nowhere", {}, FileNotFoundError, "{folder}/nowhere does not exist"),
    ("one/0.png", {}, FileNotFoundError, "{folder}/one/0.png does not exist"),
    ("one", {}, ValueError, "{folder}/one has no sub-folders; expected one for each class"),
    ("memory://gangline-nowhere", {}, FileNotFoundError, "image folder {folder} does not exist"),
    ("file:///gangline/nowhere", {}, FileNotFoundError, "image folder {folder} does not exist"),
    ("nothing://me:pass-word-1@host/x", {}, ValueError, "image folder nothing://***@host/x cannot be opened"),
]


def test_folders_and_options_that_do_not_fit_are_refused(folder: Path) -> None:
    for where, options, error, message in REFUSED:
        place = where if "://" in where else folder / where
        text = message.replace("{folder}", where if "://" in where else str(folder))
        with pytest.raises(error, match=re.escape(text)) as caught:
            ImageFolder(place, **{"image_shape": SHAPE, **options})
        assert "pass-word-1" not in str(caught.value)


def test_a_class_that_has_no_images_or_too_few_is_refused_by_its_name(folder: Path) -> None:
    for number in range(1, 8):
        (folder / "one" / f"{number}.png").unlink()
    with pytest.raises(ValueError, match="cannot be split into four fifths and one: label one has 1 sample") as caught:
        image_folder(folder, SHAPE, torch.float32, 0)
    assert str(folder) in str(caught.value)
    (folder / "one" / "0.png").rename(folder / "one" / "notes.txt")
    with pytest.raises(ValueError, match=f"{folder}/one has no images"):
        ImageFolder(folder, SHAPE)
    with pytest.raises(ValueError, match=f"{folder}/one has no images"):
        ImageFolder.unlabelled(folder / "one", SHAPE)
    for name in ("eight", "one"):
        (folder / name).rename(folder.parent / name)
    with pytest.raises(ValueError, match="has one class, 'zero'; expected at least two sub-folders"):
        image_folder(folder, SHAPE, torch.float32, 0)


# -- processes that decode ------------------------------------------------------------------------------------------

WORDS = "flip,rotate=-20:20,translate=-1:1,scale=0.9:1.1,resize=10,crop=9"


@pytest.mark.slow
def test_reading_processes_return_the_same_batches_and_end_with_the_source(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = spoil(folder, "one/3.png", "zero/7.png")

    def dataset(num_workers: int) -> ImageFolder:
        augmentation = Augmentation.parse(WORDS, mean=[0.5], std=[0.2])
        return ImageFolder(folder, SHAPE, skip_unreadable=2, num_workers=num_workers, augmentation=augmentation, seed=4)

    def read(given: Any) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        return [list(given.epoch(epoch)) for epoch in (0, 1)] + [list(given.epoch(1, skip=2))]

    def same(left: Any, right: Any) -> bool:
        return all(
            torch.equal(one, other) for a, b in zip(left, right, strict=True) for one, other in zip(a, b, strict=True)
        )

    alone = read(source(Subset(dataset(0), range(1, 24)), 5, shuffle=True, seed=1))
    assert not same(alone[0], alone[1])
    assert same(alone[1][2:], alone[2])
    many = dataset(2)
    caplog.clear()
    batches = source(Subset(many, range(1, 24)), 5, shuffle=True, seed=1)
    with caplog.at_level(logging.WARNING, "gangline"):
        before = torch.get_rng_state()
        batches.first()
        running = multiprocessing.active_children()
        assert len(running) == 2
        for ours, theirs in zip(alone, read(batches), strict=True):
            assert same(ours, theirs)
        assert torch.equal(torch.get_rng_state(), before)
    assert multiprocessing.active_children() == running  # the same two in every epoch
    assert sorted(file for file, _ in many.skipped) == bad
    assert len(caplog.messages) == 2
    (folder / "eight" / "1.png").write_text("no image")
    with pytest.raises(ValueError, match=r"^3 images cannot be read") as caught:
        read(batches)
    assert str(folder / "eight" / "1.png") in str(caught.value)
    batches.close()
    gc.collect()
    assert not any(process.is_alive() for process in running)


@pytest.mark.slow
def test_a_signal_to_all_of_a_job_leaves_its_readers_at_work(folder: Path) -> None:
    batches = source(ImageFolder(folder, SHAPE, num_workers=1), 4, shuffle=False, seed=0)
    epoch = batches.epoch(0)
    seen = len(next(epoch)[1])
    [reader] = multiprocessing.active_children()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(reader.pid, number)
    seen += sum(len(labels) for _, labels in epoch)
    assert seen == 24
    batches.close()
    gc.collect()
    assert not multiprocessing.active_children()


KILLED = """
import os, signal, sys
from gangline.models.data.images.folder import ImageFolder
from gangline.models.data.sources import source

if __name__ == "__main__":
    batches = source(ImageFolder(sys.argv[1], (1, 8, 8), num_workers=2), 8, shuffle=False, seed=0)
    batches.first()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_processes_end_with_a_trainer_that_is_killed(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(folder)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment())
    output, _ = trainer.communicate(timeout=90)  # it ends once the output is released
    assert (trainer.returncode, output) == (-signal.SIGKILL, b"")


def test_a_users_dataloader_sets_the_epoch_of_the_dataset(folder: Path) -> None:
    dataset = ImageFolder(folder, SHAPE, augmentation=Augmentation.parse(WORDS))
    own = source(DataLoader(Subset(dataset, range(6)), batch_size=6), None, shuffle=False, seed=0)
    ours = source(Subset(dataset, range(6)), 6, shuffle=False, seed=0)
    for epoch in (0, 3):
        [(images, _)], [(expected, _)] = list(own.epoch(epoch)), list(ours.epoch(epoch))
        assert torch.equal(images, expected)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_users_dataloader_leaves_unreadable_images_out(folder: Path, num_workers: int) -> None:
    bad = spoil(folder, "one/3.png")
    dataset = ImageFolder(folder, SHAPE, skip_unreadable=1)
    context = "forkserver" if num_workers else None
    loader = DataLoader(dataset, batch_size=8, num_workers=num_workers, multiprocessing_context=context)
    assert [len(labels) for _, labels in source(loader, None, shuffle=False, seed=0).epoch(0)] == [8, 7, 8]
    assert [file for file, _ in dataset.skipped] == (bad if num_workers == 0 else [])  # workers keep their own list


def test_a_folder_is_split_by_class_and_seed_and_read_in_batches(folder: Path) -> None:
    splits, again, other = (image_folder(folder, (3, 8, 8), torch.float64, seed) for seed in (0, 0, 1))
    assert splits.num_classes == 3
    assert sorted(label for _, label in splits.validation) == [0, 0, 1, 1, 2, 2]
    assert sorted([*splits.train.indices, *splits.validation.indices]) == list(range(24))
    assert again.validation.indices == splits.validation.indices
    assert set(other.validation.indices) != set(splits.validation.indices)
    found = list(source(splits.train, 10, shuffle=True, seed=0).epoch(0))
    assert [tuple(images.shape) for images, _ in found] == [(10, 3, 8, 8), (8, 3, 8, 8)]
    assert found[0][0].dtype == torch.float64


def test_held_out_images_are_not_augmented(folder: Path) -> None:
    augmentation = Augmentation.parse(WORDS, mean=[0.5], std=[0.2])
    splits = image_folder(folder, SHAPE, torch.float32, 0, augmentation=augmentation)
    plain = image_folder(folder, SHAPE, torch.float32, 0)
    assert splits.classes == plain.classes == list(CLASSES)
    assert (len(splits.train), len(splits.validation)) == (18, 6)
    for (image, label), (original, its_label) in zip(splits.validation, plain.validation, strict=True):
        assert label == its_label
        assert torch.allclose(image, (original - 0.5) / 0.2)
    moved = [not torch.allclose(a[0], (b[0] - 0.5) / 0.2) for a, b in zip(splits.train, plain.train, strict=True)]
    assert all(moved)


def test_another_folder_is_held_out_if_it_has_the_same_classes(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for name in reversed(CLASSES):
        (other / name).mkdir(parents=True)
        Image.fromarray(digit(5, 0)).save(other / name / "only.png")
    splits = image_folder(folder, SHAPE, torch.float32, 0, validation=other)
    assert (len(splits.train), len(splits.validation), splits.num_classes) == (24, 3, 3)
    (other / "zero" / "only.png").rename(other / "one" / "two.png")
    (other / "zero").rmdir()
    with pytest.raises(ValueError, match="has no zero; expected the 3 classes"):
        image_folder(folder, SHAPE, torch.float32, 0, validation=other)


# -- URLs -----------------------------------------------------------------------------------------------------------


def same_images(one: ImageFolder, other: ImageFolder) -> bool:
    assert one.classes == other.classes
    assert one.labels == other.labels
    items = [dataset.__getitems__(range(len(dataset))) for dataset in (one, other)]
    return all(torch.equal(a, b) and i == j for (a, i), (b, j) in zip(*items, strict=True))


def test_a_url_and_a_path_give_the_same_images(folder: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/gangline-images", recursive=True)
    try:
        assert same_images(ImageFolder("memory://gangline-images", SHAPE), ImageFolder(folder, SHAPE))
        memory.pipe("/gangline-images/one/3.png", b"no image")
        dataset = ImageFolder("memory://gangline-images", SHAPE, skip_unreadable=1)
        assert len(dataset.__getitems__(range(24))) == 23
        assert [file for file, _ in dataset.skipped] == ["memory://gangline-images/one/3.png"]
        memory.mkdir("/gangline-images/two")
        with pytest.raises(ValueError, match="class folder memory://gangline-images/two has no images"):
            ImageFolder("memory://gangline-images", SHAPE)
    finally:
        memory.rm("/gangline-images", recursive=True)
    with zipfile.ZipFile(tmp_path / "digits.zip", "w") as archive:
        for file in folder.rglob("*.png"):
            archive.write(file, file.relative_to(tmp_path))
    url = f"zip://digits::file://{tmp_path / 'digits.zip'}"
    assert same_images(ImageFolder(url, SHAPE), ImageFolder(folder, SHAPE))
    assert same_images(ImageFolder(f"file://{folder}", SHAPE), ImageFolder(folder, SHAPE))


# -- splits by label ------------------------------------------------------------------------------------------------


def test_arrays_are_split_too_and_every_part_has_every_label() -> None:
    labels = torch.tensor([7] * 100 + [3] * 10 + [5] * 3)
    data = torch.arange(113)
    (first, ours), (second, theirs) = split_each_label((data, labels), 0.9)
    assert torch.cat([first, second]).sort().values.equal(data)
    for part, its_labels in ((first, ours), (second, theirs)):
        assert labels[part].equal(its_labels)
    assert [torch.bincount(part, minlength=8)[[7, 3, 5]].tolist() for part in (ours, theirs)] == [
        [90, 9, 2],
        [10, 1, 1],
    ]


ARRAYS = (torch.zeros(6), torch.tensor([0, 0, 0, 1, 1, 1]))


REFUSED_SPLITS: list[Any] = [
    (ARRAYS, (1.5,), ValueError, "part is 1.5; expected a fraction between 0 and 1"),
    (ARRAYS, (float("nan"),), ValueError, "part is nan"),
    (ARRAYS, (0,), ValueError, "part is 0"),
    ((ARRAYS[0], torch.tensor([0] * 5 + [1])), (0.5,), ValueError, "label 1 has 1 sample, too few for 2 parts"),
    ((ARRAYS[0], ARRAYS[1][:5]), (0.5,), ValueError, "data has 6 samples, but 5 labels"),
    ((ARRAYS[0], ARRAYS[0]), (0.5,), TypeError, "the labels are not one integer per sample"),
    (ARRAYS[0], (0.5,), TypeError, "data is a Tensor without labels"),
]


def test_invalid_splits_are_refused() -> None:
    for data, parts, error, message in REFUSED_SPLITS:
        with pytest.raises(error, match=message):
            split_each_label(data, *parts)


# -- orientation, and a folder that is none of classes --------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tif"])
def test_images_stand_upright_whatever_their_orientation(suffix: str, tmp_path: Path) -> None:
    upright = np.zeros((16, 16), np.uint8)
    upright[:8, :8], upright[8:, :8] = 255, 128
    # The stored pixels of orientations 1 to 8, which the viewer applies.
    half = np.rot90(upright, 2)
    stored = [upright, np.fliplr(upright), half, np.flipud(upright)]
    stored += [upright.T, np.rot90(upright, 1), half.T, np.rot90(upright, -1)]
    exif = Image.Exif()
    for orientation, pixels in enumerate(stored, 1):
        exif[0x0112] = orientation
        Image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / f"{orientation}{suffix}", exif=exif)
    # Damaged metadata do not make an image unreadable.
    Image.fromarray(upright).save(tmp_path / "damaged.png", exif=b"Exif\0\0no tiff at all")
    images = ImageFolder.unlabelled(tmp_path, (1, 16, 16))
    assert len(images) == 9
    for image in images:
        torch.testing.assert_close(image[0] * 255, torch.from_numpy(upright).float(), rtol=0, atol=3)
