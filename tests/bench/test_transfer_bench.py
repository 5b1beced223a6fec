"""`gangline bench training --transfer`, small: real images, real workers from the fork server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gangline.cli.bench import bench

FIELDS = {"who", "network", "store", "batch_size", "learning_rate", "seconds", "accuracy", "samples_per_s"}
FIELDS |= {"workers", "efficiency", "p50", "p99", "max", "runs"}
SMALL = ["--network", "mlp", "--freeze-until", "fc2"]


def rows_of(path: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    done = CliRunner().invoke(bench, ["training", "--transfer", *words, "--json", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(path.read_text())["rows"], done.output


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["--same-batch", "--scale-batch"])
def test_each_number_of_workers_has_a_row(tmp_path: Path, scale: str) -> None:
    words = [*SMALL, "--workers", "1,2", "--epochs", "2", "--batch-size", "8", "--lr", "0.01", scale]
    rows, said = rows_of(tmp_path / "rows.json", *words)
    assert [(row["workers"], row["runs"]) for row in rows] == [(1, 2), (2, 2)]
    for row in rows:
        assert set(row) >= FIELDS
        factor = row["workers"] if scale == "--scale-batch" else 1
        assert (row["batch_size"], row["learning_rate"]) == (8 * factor, pytest.approx(0.01 * factor))
        assert row["samples_per_s"] == row["p50"] > 0
        assert row["accuracy"] > 0.3  # a tenth is known by chance
        assert row["efficiency"] == pytest.approx(row["p50"] / rows[0]["p50"] / row["workers"])
        assert row["seconds"] > 0
    if scale == "--same-batch":  # the same weights but for rounding, and so the same of 360 images are known
        assert rows[1]["accuracy"] == pytest.approx(rows[0]["accuracy"], abs=1.5 / 359)
    assert "accuracy" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_alexnet_moves_to_ten_classes(tmp_path: Path) -> None:
    words = ["--workers", "1,2", "--epochs", "3", "--batch-size", "16", "--same-batch"]
    rows, _ = rows_of(tmp_path / "rows.json", *words)
    assert {row["network"] for row in rows} == {"alexnet"}
    assert rows[0]["accuracy"] > 0.5
    assert rows[1]["accuracy"] == pytest.approx(rows[0]["accuracy"], abs=0.02)
