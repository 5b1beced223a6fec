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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import write_digits
from measure import distance

from gangline.cli.main import main
from gangline.models.checkpoint import checkpoint


def train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    """Run `gangline train` with these flags in this process; return exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["gangline", "train", *flags])
    with pytest.raises(SystemExit) as end:
        main()
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
            assert out == f"Validation-accuracy={accuracies[-1]}\n"
            one_device = one_device or weights(prefix, 10)
            if dtype == "float64":
                assert distance(weights(prefix, 10), one_device) <= 1e-9
        assert min(accuracies) >= 0.97
        assert max(accuracies) - min(accuracies) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "epochs", "accuracy"),
    [(["--num-epochs", "3"], 3, 0.9), pytest.param([], 10, 0.97, marks=pytest.mark.slow)],
)
def test_the_default_run_reaches_its_accuracy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], epochs: int, accuracy: float
) -> None:
    code, out, err = train(monkeypatch, capsys, "--cpus", "2", "--kv-store", "device", *flags)
    assert code == 0
    assert float(out.removeprefix("Validation-accuracy=")) >= accuracy
    lines = [line.split(" ", 1)[1] for line in err.splitlines()]
    assert lines[0] == "lenet on cpu(0), cpu(1) by loads 1, 1, store device, batch size 64, 10 classes, float32"
    assert re.fullmatch(r"Epoch\[0\] Batch \[0-20\]\tSpeed: [\d.]+ samples/sec\taccuracy=0\.\d+", lines[1])
    assert sum("Validation-accuracy" in line for line in lines) == epochs


def test_load_epoch_resumes_from_the_checkpoint(
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
    rates = [checkpoint.read(whole, epoch).require_optimizer_state().learning_rate for epoch in (1, 2, 3, 4)]
    assert rates == pytest.approx([0.002, 0.002, 0.0002, 0.00002])  # of the last update before each
    assert out.startswith("Validation-accuracy=")


def test_a_folder_of_images_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_digits(tmp_path / "images", images=240)
    flags = ["--network", "mlp", "--data-dir", str(tmp_path / "images"), "--cpus", "2", "--num-epochs", "3"]
    code, out, err = train(monkeypatch, capsys, *flags)
    assert code == 0
    assert "3 classes" in err
    assert float(out.removeprefix("Validation-accuracy=")) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["2bit", "fp16", "bf16", "topk"])
def test_gc_type_compresses_pushes_and_checkpoints_keep_residuals(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--network", "mlp", "--cpus", "2", "--gc-type", kind, "--model-prefix", str(tmp_path / "net")]
    flags += ["--gc-threshold", "0.03"] if kind == "2bit" else []
    code, out, _ = train(monkeypatch, capsys, *flags, "--num-epochs", "2")
    assert code == 0
    assert float(out.removeprefix("Validation-accuracy=")) > 0.2
    senders = {name.rpartition("/")[2] for name in checkpoint.read(tmp_path / "net", 2).compression_residuals}
    assert senders == ({"0", "1"} if kind in ("2bit", "topk") else set())


def test_gc_threshold_sets_the_threshold_of_2bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "net"
    flags = ["--network", "mlp", "--cpus", "2", "--gc-type", "2bit", "--mom", "0", "--wd", "0", "--lr", "0.5"]
    flags += ["--model-prefix", str(prefix), "--batch-size", "720", "--dtype", "float64"]  # two batches to an epoch
    for threshold, moves in (("0.0078125", True), ("1000", False)):
        train(monkeypatch, capsys, *flags, "--gc-threshold", threshold, "--num-epochs", "1")
        first = weights(prefix, 1)
        train(monkeypatch, capsys, *flags, "--gc-threshold", threshold, "--num-epochs", "2", "--load-epoch", "1")
        moved = torch.cat([(weights(prefix, 2)[name] - value).flatten() for name, value in first.items()])
        steps = moved / (0.5 * float(threshold))
        assert bool(steps.abs().max() > 0.5) is moves
        assert (steps - steps.round()).abs().max() < 1e-9  # multiples of the threshold, from two senders in two batches
        assert steps.abs().max() < 4.5


def test_loads_may_be_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = train(
        monkeypatch, capsys, "--network", "mlp", "--cpus", "2", "--work-load-list", "auto", "--num-epochs", "3"
    )
    assert code == 0
    assert "mlp on cpu(0), cpu(1) by loads 0.5, 0.5 (auto), store device" in err
    assert re.search(r"work_load_list auto: cpu\(0\) \d\.\d+, cpu\(1\) \d\.\d+ \(alone .* samples/s\)", err)
    assert float(out.removeprefix("Validation-accuracy=")) > 0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_computes_in_it_and_keeps_float32_weights(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--network", "mlp", "--cpus", "2", "--num-epochs", "3", "--model-prefix", str(tmp_path / "net")]
    code, out, err = train(monkeypatch, capsys, *flags, "--dtype", dtype)
    assert code == 0
    assert f"10 classes, {dtype}" in err
    assert float(out.removeprefix("Validation-accuracy=")) > 0.5
    saved = checkpoint.read(tmp_path / "net", 3)
    states = saved.require_optimizer_state().tensors
    assert {value.dtype for value in [*saved.params.values(), *states.values()]} == {torch.float32}
    assert (saved.loss_scale is not None) == (dtype == "float16")


@pytest.mark.slow
def test_benchmark_trains_on_random_images(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = train(monkeypatch, capsys, "--network", "mlp", "--benchmark", "--num-epochs", "1")
    assert code == 0
    assert "samples/sec" in err
    assert out.startswith("Validation-accuracy=")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--network", "nosuch"], "network 'nosuch' is unknown; expected one of ['alexnet', 'lenet', 'mlp'"),
        (["--dataset", "nosuch"], "--dataset is 'nosuch'; expected one of ['digits']"),
        (["--kv-store", "nosuch"], "no store named 'nosuch'"),
        (["--optimizer", "nosuch"], "optimizer 'nosuch' is unknown"),
        (["--gpus", "0", "--cpus", "2"], "--gpus 0 and --cpus 2 are given; expected one of them"),
        (["--gpus", "first"], "'first' names no device"),
        (["--gpus", "99"], "gpu(99) is not on this machine"),
        (["--cpus", "2", "--work-load-list", "3"], "work_load_list has 1 entry for 2 contexts"),
        (["--cpus", "2", "--work-load-list", "3,x"], "--work-load-list is '3,x'; expected numbers"),
        (["--lr-step-epochs", "1.5"], "--lr-step-epochs is '1.5'"),
        (["--lr-step-epochs", "1,50", "--num-epochs", "2"], "--num-epochs is 2: the rate would not step at epoch 50"),
        (["--mom", "1.5"], "--mom is 1.5; expected a momentum from 0 to below 1"),
        (["--kv-store", "local:2"], "--kv-store is 'local:2'; expected a number of updates, and dist_async before it"),
        (["--network", "lenett"], "network 'lenett' is unknown; did you mean 'lenet'?"),
        (["--kv-store", "devise"], "there is no store named 'devise'; did you mean 'device'?"),
        (["--optimizer", "adm"], "optimizer 'adm' is unknown; did you mean 'adam'?"),
        (["--load-epoch", "2"], "--load-epoch needs --model-prefix"),
        (["--load-epoch", "2", "--model-prefix", "nowhere/net"], "nowhere/net-0002.json does not exist"),
        (["--data-dir", "nowhere"], "image folder nowhere does not exist"),
        (["--lr", "-1"], "Invalid learning rate"),
        (["--gc-threshold", "0.1", "--cpus", "2"], "--gc-threshold is 0.1, but --gc-type is None; only 2bit has a"),
        (["--gc-threshold", "0.1", "--gc-type", "topk"], "--gc-threshold is 0.1, but --gc-type is topk"),
        (["--gc-threshold", "0", "--gc-type", "2bit"], "threshold is 0.0; expected a finite number > 0"),
        (["--gc-threshold", "nan", "--gc-type", "2bit"], "threshold is nan; expected a finite number > 0"),
        (["--cpus", "2", "--work-load-list", "automatic"], "--work-load-list is 'automatic'; expected numbers"),
        (["--network", "resnet19"], "network 'resnet19' is unknown"),
    ],
)
def test_a_wrong_value_is_one_line_on_stderr(
    flags: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = train(monkeypatch, capsys, *flags)
    assert code == (2 if message.startswith("--") else 1)
    assert out == ""
    last = err.strip().splitlines()[-1]
    assert last.startswith("gangline: ")
    assert message in last


@pytest.fixture
def _ctrl_c_is_heard() -> Iterator[None]:
    """Restore SIGINT for started processes; a shell ignores it in background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("_ctrl_c_is_heard")
def test_ctrl_c_and_the_progress_bar_on_a_terminal() -> None:
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 100))
    arguments: list[Any] = [sys.executable, "-m", "gangline", "train", "--num-epochs", "100000", "--network", "mlp"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=end)
    os.close(end)
    try:
        seen = b""
        while b"batch/s" not in seen or b"accuracy=" not in seen:
            seen += os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the terminal's other end closes when the process is gone
            while os.read(terminal, 4096):
                pass
        out, _ = process.communicate()
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert process.returncode == 130
    assert out == b""
