"""`gangline train`, on the real digits."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import distance

import gangline
from models import checkpoint


def train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `gangline train` with these flags, in this process."""
    monkeypatch.setattr(sys, "argv", ["gangline", "train", *flags])
    with pytest.raises(SystemExit) as end:
        gangline.main()
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def weights(prefix: Path, epoch: int) -> dict[str, torch.Tensor]:
    return checkpoint.read(prefix, epoch).params


WAYS = [
    ["--cpus", "1"],
    ["--cpus", "2", "--kv-store", "local"],
    ["--cpus", "2", "--kv-store", "device"],
    ["--cpus", "3", "--work-load-list", "3,1,2", "--kv-store", "local"],
    ["--cpus", "3", "--work-load-list", "3,1,2", "--kv-store", "device"],
]


def test_float64_digits_give_the_same_weights_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one_device: dict[str, torch.Tensor] = {}
    for number, way in enumerate(WAYS):
        prefix = tmp_path / str(number)
        flags = ["--network", "mlp", "--dtype", "float64", "--num-epochs", "3", "--model-prefix", str(prefix), *way]
        code, out, _ = train(monkeypatch, capsys, *flags)
        assert code == 0
        one_device = one_device or weights(prefix, 3)
        assert distance(weights(prefix, 3), one_device) <= 1e-9
        assert out == f"Validation-accuracy={float(out.split('=')[1])}\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_whole_digits_runs_of_lenet_give_the_same_weights_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for dtype in ("float64", "float32"):
        accuracies: list[float] = []
        one_device: dict[str, torch.Tensor] = {}
        for number, way in enumerate(WAYS):
            prefix = tmp_path / f"{dtype}-{number}"
            code, out, _ = train(monkeypatch, capsys, "--dtype", dtype, "--model-prefix", str(prefix), *way)
            assert code == 0
            accuracies.append(float(out.split("=")[1]))
            one_device = one_device or weights(prefix, 10)
            if dtype == "float64":
                assert distance(weights(prefix, 10), one_device) <= 1e-9
        assert min(accuracies) >= 0.97
        assert max(accuracies) - min(accuracies) <= 0.02


def test_the_default_run_reaches_its_accuracy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = train(monkeypatch, capsys, "--cpus", "2", "--kv-store", "device")
    assert code == 0
    assert float(out.removeprefix("Validation-accuracy=")) >= 0.97
    lines = [line.split(" ", 1)[1] for line in err.splitlines()]
    assert lines[0] == "lenet on cpu(0), cpu(1) by loads 1, 1, store device, 10 classes, float32"
    assert re.fullmatch(r"Epoch\[0\] Batch \[0-20\]\tSpeed: [\d.]+ samples/sec\taccuracy=0\.\d+", lines[1])
    assert sum("Validation-accuracy" in line for line in lines) == 10


def test_load_epoch_goes_on_where_the_checkpoint_stood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--network", "mlp", "--cpus", "2", "--lr-step-epochs", "2,3", "--optimizer", "adam", "--lr", "0.002"]
    whole, halves = tmp_path / "whole", tmp_path / "deep" / "halves"
    train(monkeypatch, capsys, *flags, "--num-epochs", "4", "--model-prefix", str(whole))
    train(monkeypatch, capsys, *flags, "--num-epochs", "2", "--model-prefix", str(halves))
    code, out, _ = train(
        monkeypatch, capsys, *flags, "--num-epochs", "4", "--model-prefix", str(halves), "--load-epoch", "2"
    )
    assert code == 0
    assert all(torch.equal(value, weights(whole, 4)[name]) for name, value in weights(halves, 4).items())
    rates = [checkpoint.read(whole, epoch).needed_optimizer_state().learning_rate for epoch in (1, 2, 3, 4)]
    assert rates == pytest.approx([0.002, 0.0002, 0.00002, 0.00002])
    assert out.startswith("Validation-accuracy=")


def test_a_folder_of_images_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits

    bunch = load_digits(n_class=3)
    for number, (image, label) in enumerate(zip(bunch.images[:240], bunch.target[:240], strict=True)):
        folder = tmp_path / "images" / f"digit{label}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype("uint8")).save(folder / f"{number}.png")
    flags = ["--network", "mlp", "--data-dir", str(tmp_path / "images"), "--cpus", "2", "--num-epochs", "3"]
    code, out, err = train(monkeypatch, capsys, *flags)
    assert code == 0
    assert "3 classes" in err
    assert float(out.removeprefix("Validation-accuracy=")) > 0.9


def test_benchmark_trains_on_random_images(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = train(monkeypatch, capsys, "--network", "mlp", "--benchmark", "--num-epochs", "1")
    assert code == 0
    assert "samples/sec" in err
    assert out.startswith("Validation-accuracy=")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--network", "nosuch"], "network 'nosuch' is unknown; expected one of ['lenet', 'mlp', 'resnet101'"),
        (["--dataset", "nosuch"], "--dataset is 'nosuch'; expected one of ['digits']"),
        (["--kv-store", "nosuch"], "no store named 'nosuch'"),
        (["--optimizer", "nosuch"], "optimizer 'nosuch' is unknown"),
        (["--dtype", "float8"], "--dtype is 'float8'; expected one of ['float32', 'float64', 'bfloat16', 'float16']"),
        (["--gpus", "0", "--cpus", "2"], "--gpus 0 and --cpus 2 are both given"),
        (["--gpus", "first"], "'first' names no device"),
        (["--gpus", "99"], "gpu(99) is not on this machine"),
        (["--cpus", "2", "--work-load-list", "3"], "work_load_list has 1 entries for 2 contexts"),
        (["--cpus", "2", "--work-load-list", "3,x"], "--work-load-list is '3,x'; expected numbers"),
        (["--lr-step-epochs", "1.5"], "--lr-step-epochs is '1.5'"),
        (["--load-epoch", "2"], "--load-epoch needs --model-prefix"),
        (["--load-epoch", "2", "--model-prefix", "nowhere/net"], "nowhere/net-0002.json is not there"),
        (["--data-dir", "nowhere"], "image folder nowhere is not there"),
        (["--lr", "-1"], "Invalid learning rate"),
    ],
)
def test_a_wrong_value_is_one_line_on_stderr_and_exit_code_1(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = train(monkeypatch, capsys, *flags)
    assert code == 1
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("gangline: ")
    assert message in last


def test_ctrl_c_and_the_progress_bar_on_a_terminal() -> None:
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 100))
    arguments: list[Any] = [sys.executable, "-m", "gangline", "train", "--num-epochs", "100000", "--network", "mlp"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=end)
    os.close(end)
    seen = b""
    while b"batch/s" not in seen or b"accuracy=" not in seen:
        seen += os.read(terminal, 4096)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the terminal's other end closes when the process is gone
        while os.read(terminal, 4096):
            pass
    out, _ = process.communicate()
    os.close(terminal)
    assert process.returncode == 130
    assert out == b""
