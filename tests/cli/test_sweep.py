"""`gangline sweep`: options of `gangline train` as a grid."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from gangline.cli.main import main
from gangline.cli.sweep import TrainTrial
from gangline.collectives.errors import UsageError
from tests.cli.test_main import python
from tests.kvstore.test_launch import ROOT


def gangline_sweep(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return python("-m", "gangline", "sweep", "--folder", folder, *arguments, code=code)


@pytest.mark.slow
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
        (("--set", "lr=0.1", "--set", "lr=0.2"), "--lr is given twice"),
        (("--set", "lr=0.1", "--", "--lr=0.3"), "--lr is given twice"),
        (("--set", "image-shape=1,28,28"), "with a value twice; expected ; between values that have commas"),
        (("--set", "lr=0.1", "--", "--test-io"), "--test-io is for one gangline train"),
        (("--set", "lr=0.1", "--", "--plots", "training-progress"), "expected a --model-prefix PREFIX as well"),
    ],
)
def test_wrong_usage_is_named_before_any_trial(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gangline", "sweep", "--folder", str(tmp_path / "new"), *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_parameters_come_after_the_options_of_all() -> None:
    trial = TrainTrial(("--lr", "0.5", "--batch-size", "32"))
    options = trial.options_of({"lr": "0.25"})
    assert (options.lr, options.batch_size) == (0.25, 32)
    with pytest.raises(UsageError, match="gangline train"):
        trial.options_of({"batch-size": "no"})


@pytest.mark.slow
def test_files_and_logs_of_a_trial_lie_in_its_folder(tmp_path: Path) -> None:
    own = ("--network", "mlp", "--num-epochs", "1", "--model-prefix", "out/net", "--plots", "training-progress")
    done = gangline_sweep(tmp_path, "--set", "lr=0.1,0.2", "--cpus", "2", "--", *own)
    for value in ("0.1", "0.2"):
        found = {path.name for path in (tmp_path / f"lr={value}").iterdir()}
        assert {"net-best.safetensors", "net.html", "log.txt"} <= found
    assert "trial 1: Epoch[0] Validation-accuracy" in (tmp_path / "lr=0.2" / "log.txt").read_text()
    assert "trial 0: Epoch[0] Validation-accuracy" in done.stderr
    other = gangline_sweep(tmp_path, "--set", "lr=0.1", "--", "--network", "lenet", code=1)
    assert "holds trials of 'gangline train --network mlp" in other.stderr


@pytest.mark.slow
def test_a_trial_that_a_signal_stops_has_failed_and_values_may_have_commas(tmp_path: Path) -> None:
    own = ("--network", "mlp", "--num-epochs", "2000")
    command = [sys.executable, "-m", "gangline", "sweep", "--folder", str(tmp_path), "--cpus", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, "--set", "lr-step-epochs=1,2;3", "--", *own], env=environment, stdout=subprocess.PIPE, text=True
    ) as sweeping:
        for value in ("1,2", "3"):
            log = tmp_path / f"lr-step-epochs={value}" / "log.txt"
            wait_for(lambda log=log: log.exists() and "Epoch[0]" in log.read_text())
            [trial] = [
                one
                for one in psutil.Process(sweeping.pid).children(recursive=True)
                if any(str(log.parent) in file.path for file in one.open_files())
            ]
            trial.terminate()
        assert sweeping.stdout is not None
        sweeping.stdout.read()
        assert sweeping.wait(60) == 2  # no trial has a metric
    rows = list(csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == ["failed", "failed"]
    assert "training was stopped by SIGTERM" in (tmp_path / "trials.jsonl").read_text()


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_without_tracebacks_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gangline", "sweep", "--folder", str(tmp_path), "--cpus", "2", "--set"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    own = ["lr=0.1,0.2,0.3,0.4", "--", "--network", "mlp", "--num-epochs", "300"]
    with subprocess.Popen(
        [*command, *own], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as sweeping:
        wait_for((tmp_path / "lr=0.2" / "log.txt").exists)
        os.killpg(sweeping.pid, signal.SIGINT)  # as a terminal does
        _, errors = sweeping.communicate(timeout=60)
        assert sweeping.returncode == 130
    assert "Traceback" not in errors
    assert f"stopped; {tmp_path} holds the trials that have ended, and the same command goes on" in errors
    assert not (tmp_path / "trials.jsonl").read_text()


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)
