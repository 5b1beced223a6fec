"""`gangline bench transfer`, small: real images, real workers from the fork server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from gangline.bench.transfer import Clock, summary, transfer, write_images
from gangline.models.loop.callbacks import BatchEndParam
from gangline.models.metrics.metric import create

FIELDS = {"who", "network", "store", "batch_size", "learning_rate", "epoch", "seconds", "accuracy", "samples_per_s"}
FIELDS |= {"workers", "efficiency", "p50", "p99", "max", "runs"}
SMALL = ["--network", "mlp", "--freeze-until", "fc2", "--source-epochs", "1", "--source-lr", "0.05", "--most", "60"]


def bench(*words: str) -> Any:
    app = typer.Typer()
    app.command()(transfer)
    return CliRunner().invoke(app, words)


def rows_of(tmp_path: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    done = bench(*words, "--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "plot.png"))
    assert done.exit_code == 0, done.exception
    return json.loads((tmp_path / "rows.json").read_text())["rows"], done.output


@pytest.mark.slow
@pytest.mark.parametrize("scale", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_number_of_workers_has_a_row_an_epoch(tmp_path: Path, scale: bool) -> None:
    flags = [
        "--workers",
        "1,2",
        "--epochs",
        "2",
        "--batch-size",
        "8",
        "--lr",
        "0.01",
        "--scale-batch" if scale else "--same-batch",
    ]
    rows, said = rows_of(tmp_path, *SMALL, *flags)
    assert [(row["workers"], row["epoch"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for row in rows:
        assert set(row) >= FIELDS
        factor = row["workers"] if scale else 1
        assert (row["batch_size"], row["learning_rate"]) == (8 * factor, pytest.approx(0.01 * factor))
        assert row["samples_per_s"] == row["p50"] > 0
        assert 0 < row["accuracy"] <= 1
        one = rows[row["epoch"]]
        assert row["efficiency"] == pytest.approx(row["p50"] / one["p50"] / row["workers"])
    assert rows[1]["seconds"] > rows[0]["seconds"] > 0
    if not scale:  # the same batches: the same weights but for rounding, and so the same of 359 images are known
        for alone, both in zip(rows[:2], rows[2:], strict=True):
            assert both["accuracy"] == pytest.approx(alone["accuracy"], abs=1.5 / 359)
    assert "1 worker: accuracy" in said
    assert "2 workers: accuracy" in said
    with Image.open(tmp_path / "plot.png") as drawing:
        assert len(np.unique(np.asarray(drawing.convert("RGB")).reshape(-1, 3), axis=0)) > 10
        assert drawing.width > drawing.height


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_alexnet_moves_to_ten_classes(tmp_path: Path) -> None:
    flags = ["--workers", "1,2", "--epochs", "3", "--most", "1000", "--batch-size", "16", "--same-batch"]
    rows, said = rows_of(tmp_path, *flags)
    assert {row["network"] for row in rows} == {"alexnet"}
    one, two = (row["accuracy"] for row in rows if row["epoch"] == 2)
    assert one > 0.5  # a tenth is known by chance
    assert two == pytest.approx(one, abs=0.02)
    assert "points apart" in said


def test_images_are_the_digits_and_none_is_in_both_parts(tmp_path: Path) -> None:
    assert write_images(tmp_path, (3, 64, 64), most=50) == 359
    parts = {part: sorted(tmp_path.glob(f"{part}/*/*.png")) for part in ("train", "held_out")}
    assert [len(files) for files in parts.values()] == [50, 359]
    contents = {part: {path.read_bytes() for path in files} for part, files in parts.items()}
    assert not contents["train"] & contents["held_out"]
    for part in parts:
        assert sorted(path.name for path in (tmp_path / part).iterdir()) == [str(digit) for digit in range(10)]
    with Image.open(parts["train"][0]) as image:
        assert (image.mode, image.size) == ("RGB", (64, 64))
        assert np.ptp(np.asarray(image)) > 200


def test_grey_images_are_written_for_networks_of_one_channel(tmp_path: Path) -> None:
    write_images(tmp_path, (1, 28, 28), most=10)
    with Image.open(next(tmp_path.glob("train/*/*.png"))) as image:
        assert (image.mode, image.size) == ("L", (28, 28))


def test_the_clock_counts_training_for_the_speed_and_all_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([102.0, 103.0, 107.0, 108.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock, metric = Clock(images=60, start=100.0), create("acc", None)
    metric.get_global_name_value = lambda: [("accuracy", 0.75)]
    for epoch in range(2):
        for batch in range(3):
            clock.after_batch(BatchEndParam(epoch, batch, metric, {"num_batches": 3}))
        clock.after_scoring(BatchEndParam(epoch, 0, metric))
    assert clock.epochs == [
        {"seconds": 3.0, "samples_per_s": 30.0, "accuracy": 0.75},
        {"seconds": 8.0, "samples_per_s": 15.0, "accuracy": 0.75},
    ]


def test_the_summary_compares_the_last_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    rows = [
        {"workers": workers, "epoch": epoch, "seconds": 10.0 * epoch, "accuracy": accuracy, "samples_per_s": 50.0}
        for workers, accuracies in ((1, (0.5, 0.95)), (2, (0.9, 0.96)), (4, (0.1, 0.965)))
        for epoch, accuracy in enumerate(accuracies)
    ]
    assert summary(rows) == [
        "1 worker: accuracy 0.9500 after 10.0 s, 50 images/s",
        "2 workers: accuracy 0.9600 after 10.0 s, 50 images/s",
        "4 workers: accuracy 0.9650 after 10.0 s, 50 images/s",
        "accuracies are 1.50 points apart",
        "4 workers share 2 cores",
    ]
    assert summary(rows[:4])[-1] == "each worker has a core of its own (2 cores)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "1,none"], "--workers is '1,none'; expected numbers above 0"),
        (["--workers", "0"], "--workers is '0'"),
        (["--network", "nosuch"], "network 'nosuch' is unknown"),
        (["--network", "mlp"], "the network has no layer 'classifier.6'"),
        (["--lr", "-1"], "learning rate is -1.0"),
        (["--plot", "a.gif"], "ends in .png"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr("gangline.bench.transfer.write_images", lambda *_: pytest.fail("it began"))
    done = bench(*words)
    assert isinstance(done.exception, ValueError)
    assert message in str(done.exception)
