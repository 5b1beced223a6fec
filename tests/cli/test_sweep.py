"""`gangline sweep`: options of `gangline train` as a grid."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gangline.cli.sweep import TrainTrial
from gangline.collectives.errors import UsageError
from tests.kvstore.test_launch import ROOT


def gangline_sweep(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gangline", "sweep", "--folder", str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_each_combination_trains_and_the_best_is_named(tmp_path: Path) -> None:
    own = ("--network", "mlp", "--num-epochs", "2")
    done = gangline_sweep(tmp_path, "--set", "lr=0.1,0.0001", "--cpus", "2", "--", *own)
    rows = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    assert [row["lr"] for row in rows] == ["0.1", "0.0001"]
    assert float(rows[0]["metric"]) > 0.8 > float(rows[1]["metric"])
    assert "best: --lr 0.1: 0.8" in done.stdout
    assert (tmp_path / "sweep.html").read_text().count("<polyline") == 2
    again = gangline_sweep(tmp_path, "--set", "lr=0.1,0.0001", "--cpus", "2", "--", *own)
    assert again.stdout == done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--", "--network", "mlp"), "there is no --set"),
        (("--set", "lr"), "--set is 'lr'"),
        (("--set", "cpus=1,2"), "--cpus is given to trials by the sweep"),
        (("--set", "lr=0.1", "--", "--gpus", "0"), "--gpus is given to trials by the sweep"),
        (("--set", "learn=0.1"), "No such option: --learn"),
    ],
)
def test_wrong_usage_is_named_before_any_trial(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    assert message in gangline_sweep(tmp_path / "new", *arguments, code=2).stderr
    assert not (tmp_path / "new").exists()


def test_parameters_come_after_the_options_of_all() -> None:
    trial = TrainTrial(("--lr", "0.5", "--batch-size", "32"))
    options = trial.options_of({"lr": "0.25"})
    assert (options.lr, options.batch_size) == (0.25, 32)
    with pytest.raises(UsageError, match="gangline train"):
        trial.options_of({"batch-size": "no"})
