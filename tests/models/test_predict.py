"""`gangline predict`, on a folder of real images."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import Run, write_digits
from torch import nn

from gangline import Module
from gangline.models.checkpoint import checkpoint
from gangline.models.data.images.folder import ImageFolder
from gangline.models.zoo import create


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with ``images`` of three classes and checkpoints ``net`` of a network trained on them."""
    folder = tmp_path_factory.mktemp("predict")
    write_digits(folder / "images")
    from gangline.cli.training.options import TrainOptions
    from gangline.cli.training.run import run

    options = TrainOptions(network="mlp", data_dir=str(folder / "images"), model_prefix=str(folder / "net"))
    run(replace(options, num_epochs=4, cpus=1, lr=0.1, rgb_mean="0.3", rgb_std="0.4"))
    return folder


def expected(folder: Path, epoch: int) -> torch.Tensor:
    """Return the probabilities of all images, computed by the network alone."""
    network = create("mlp", 3)
    network.load_state_dict(checkpoint.read(folder / "net", epoch).params)
    images = ImageFolder(folder / "images", (1, 28, 28))
    data = torch.stack([(images[index][0] - 0.3) / 0.4 for index in range(len(images))])
    with torch.no_grad():
        return torch.softmax(network.eval()(data).double(), 1)


@pytest.mark.parametrize("where", [["--cpus", "1"], ["--cpus", "3", "--work-load-list", "3,1,2"], ["--context", "cpu"]])
def test_the_table_equals_the_networks_predictions(where: list[str], trained: Path, run: Run) -> None:
    words = ["--data-dir", trained / "images", "--model-prefix", trained / "net", "--batch-size", "7", *where]
    out, _ = run("predict", *words)
    rows = list(csv.reader(out.splitlines()))
    assert rows[0] == ["file", "label", "probability"]
    probabilities = expected(trained, 4)
    values, labels = probabilities.max(1)
    images = ImageFolder(trained / "images", (1, 28, 28))
    assert [row[0] for row in rows[1:]] == [str(file) for file in images.files]
    assert [row[1] for row in rows[1:]] == [f"digit{label}" for label in labels.tolist()]
    assert [float(row[2]) for row in rows[1:]] == pytest.approx(values.tolist(), abs=2e-6)


def test_several_labels_a_file(trained: Path, tmp_path: Path, run: Run) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(sorted((trained / "images").rglob("*.png"))[:5]):
        (flat / f"{number}.png").write_bytes(file.read_bytes())
    words = ["--data-dir", flat, "--model-prefix", trained / "net"]
    out, _ = run("predict", *words, "--load-epoch", "best", "--top-k", "3", "--cpus", "2")
    rows = list(csv.DictReader(out.splitlines()))
    assert [Path(row["file"]).name for row in rows] == [f"{number}.png" for number in range(5)]
    for row in rows:
        assert {row["label"], row["label_2"], row["label_3"]} == {"digit0", "digit1", "digit2"}
        chances = [float(row[name]) for name in ("probability", "probability_2", "probability_3")]
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) == pytest.approx(1, abs=1e-5)


def test_a_file_that_is_passed_over_has_no_row(trained: Path, tmp_path: Path, run: Run) -> None:
    files = write_digits(tmp_path / "images", images=6)
    files[2].write_bytes(files[2].read_bytes()[:40])
    words = ["--data-dir", tmp_path / "images", "--model-prefix", trained / "net"]
    out, err = run("predict", *words, code=1)
    assert out == ""
    assert f"image {files[2]} cannot be read" in err
    out, err = run("predict", *words, "--skip-unreadable", "1")
    named = [row["file"] for row in csv.DictReader(out.splitlines())]
    assert sorted(named) == sorted(str(file) for file in files if file != files[2])
    assert str(files[2]) in err


def test_score_counts_correct_predictions(trained: Path, run: Run) -> None:
    words = ["--data-dir", trained / "images", "--model-prefix", trained / "net", "--load-epoch", "3", "--top-k", "2"]
    out, _ = run("predict", "--score", *words, "--cpus", "2")
    labels = torch.tensor(ImageFolder(trained / "images", (1, 28, 28)).labels)
    best = expected(trained, 3).topk(2, 1).indices
    values = dict(line.split("=") for line in out.splitlines())
    assert float(values["accuracy"]) == pytest.approx((best[:, 0] == labels).double().mean().item())
    assert float(values["top_k_accuracy_2"]) == pytest.approx((best == labels[:, None]).any(1).double().mean().item())


def test_wrong_words_are_one_line(trained: Path, tmp_path: Path, run: Run) -> None:
    images, prefix = trained / "images", trained / "net"
    other = tmp_path / "other"
    write_digits(other, classes=2, images=20)
    module = Module(create("mlp", 3), nn.CrossEntropyLoss())
    module.save_checkpoint(tmp_path / "bare", 1)
    for folder, of, more, message in (
        (images, tmp_path / "nothing", [], "there is no checkpoint"),
        (images, prefix, ["--load-epoch", "77"], "net-0077 does not exist"),
        (images, prefix, ["--load-epoch", "last"], "--load-epoch is 'last'; expected a number of epochs"),
        (images, prefix, ["--top-k", "4"], "--top-k is 4, but there are 3 classes"),
        (tmp_path / "no", prefix, [], "does not exist"),
        (images, prefix, ["--context", "parallel"], "--context parallel is for training"),
        (images, tmp_path / "bare", [], "lacks network, num_classes, image_shape"),
        (other, prefix, ["--score"], "has no digit2"),
    ):
        code = 2 if message.startswith("--") else 1
        out, err = run("predict", "--data-dir", folder, "--model-prefix", of, *more, code=code)
        assert out == ""
        assert message in err.strip().splitlines()[-1]
