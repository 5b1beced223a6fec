"""`gangline train`: effects of its flags, its part in a job of several workers, and signals."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Run, write_digits
from safetensors.torch import save_file

from gangline import Communicator, spawn
from gangline.cli.options import normalization
from gangline.launcher.job import free_ports
from gangline.models.checkpoint import checkpoint
from gangline.models.checkpoint.checkpoint import epochs
from gangline.models.loop import fit
from gangline.models.reports.page import read_progress
from gangline.models.zoo import create
from tests.models.test_checkpoint_callback import start_holder
from tests.programs import environment

MLP = ["train", "--network", "mlp", "--cpus", "2"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "images"
    write_digits(folder)
    return folder


def settings(prefix: Path, epoch: int | str) -> dict[str, float]:
    """Return the initial and the current learning rate in a checkpoint."""
    state = checkpoint.read(prefix, epoch).require_optimizer_state()
    return {"initial": state.initial_learning_rate, "now": state.learning_rate}


def test_batch_and_rate_grow_with_the_devices(tmp_path: Path, run: Run) -> None:
    words = ["--scale-batch", "--batch-size", "32", "--lr", "0.02", "--num-epochs", "1"]
    _, err = run(*MLP, *words, "--model-prefix", tmp_path / "m")
    assert "batch size 64" in err
    assert settings(tmp_path / "m", 1)["initial"] == pytest.approx(0.04)


def test_a_run_resumes_from_its_newest_checkpoint_and_keeps_few(tmp_path: Path, run: Run) -> None:
    prefix = tmp_path / "m"
    words = ["--model-prefix", prefix, "--load-epoch", "auto", "--keep", "2", "--lr-schedule", "cosine"]
    for number in (2, 4):
        _, err = run(*MLP, *words, "--num-epochs", number)
    assert "Epoch[1]" not in err
    assert "Epoch[3]" in err
    assert epochs(prefix) == [3, 4]
    assert checkpoint.read(prefix, "best").metadata["num_classes"] == 10
    assert settings(prefix, 4)["now"] < settings(prefix, 3)["now"] < 0.05


def test_patience_ends_a_run_that_learns_nothing(tmp_path: Path, run: Run) -> None:
    words = ["--patience", "2", "--lr", "0", "--num-epochs", "9"]
    _, err = run(*MLP, *words)
    assert "training ended by patience" in err
    assert "Epoch[2] Validation-accuracy" in err
    assert "Epoch[3]" not in err


def test_pictures_of_a_run(tmp_path: Path, run: Run) -> None:
    words = ["--num-epochs", "2", "--plots", "training-progress", "--top-k", "3"]
    out, _ = run(*MLP, *words, "--model-prefix", tmp_path / "m")
    data = json.dumps(read_progress(tmp_path / "m.html"))
    assert "mlp on digits" in data
    assert "top_k_accuracy_3" in data
    assert out.split("=")[1].strip()[:6] in data


def test_weights_are_transferred_to_other_classes(images: Path, tmp_path: Path, run: Run) -> None:
    torch.manual_seed(1)
    source = create("mlp", 7)
    save_file(source.state_dict(), tmp_path / "source.safetensors")
    layers = [name for name, module in source.named_modules() if isinstance(module, torch.nn.Linear)]
    words = ["--data-dir", images, "--pretrained", tmp_path / "source.safetensors", "--freeze-until", layers[1]]
    words += ["--num-epochs", "3", "--batch-size", "6", "--lr", "0.02", "--model-prefix", tmp_path / "m"]
    out, err = run(*MLP, *words)
    assert "48 training and 12 held-out images of digit0, digit1, digit2; read as 28x28 grey\n" in err
    assert float(out.split("=")[1]) > 0.8
    saved = checkpoint.read(tmp_path / "m", 3)
    assert saved.metadata["classes"] == ["digit0", "digit1", "digit2"]
    assert torch.equal(saved.params[f"{layers[0]}.weight"], source.state_dict()[f"{layers[0]}.weight"])
    assert not torch.equal(saved.params[f"{layers[1]}.weight"], source.state_dict()[f"{layers[1]}.weight"])
    assert len(saved.params[f"{layers[-1]}.weight"]) == 3
    _, err = run(*MLP, *words[:4], "--freeze-until", "nowhere", code=2)
    assert "has no layer 'nowhere'" in err


IMAGES = ["--data-dir", "images"]
WRONG: list[tuple[list[str], str]] = [
    (["--clip", "norm=1", "--clip", "gradient=1"], "clip_gradient"),
    (["--clip", "global=1"], "--clip is 'global=1'; expected gradient=X or norm=X or global_norm=X"),
    (["--keep", "2"], "--save-period in minutes and --keep need --model-prefix"),
    (["--save-period", "0"], "--save-period is '0'; expected epochs, such as 2, or minutes, such as 10min"),
    (
        ["--save-period", "10parsec"],
        "--save-period is '10parsec'; expected epochs, such as 2, or minutes",
    ),
    (["--top-k", "11"], "--top-k is 11, but there are 10 classes"),
    (["--image-shape", "28,28"], "--image-shape is '28,28', 2 numbers; expected 3"),
    (["--image-shape", "2,28,28"], "--image-shape is '2,28,28'; expected 1 or 3 channels"),
    (["--val-dir", "held-out"], "--val-dir needs --data-dir"),
    (["--augment", "flip"], "--augment needs --data-dir"),
    (["--freeze-until", "fc"], "--freeze-until needs --pretrained"),
    (["--layer-factors", "10,20,0.1"], "--layer-factors needs --pretrained"),
    (["--pretrained", "none.safetensors"], "none.safetensors do not exist"),
    (
        ["--lr-schedule", "cosine", "--lr-step-epochs", "2"],
        "--lr-step-epochs is 2, but --lr-schedule is cosine; only piecewise steps",
    ),
    (["--load-epoch", "newest", "--model-prefix", "m"], "--load-epoch is 'newest'; expected a number of epochs"),
    (["--context", "parallel"], "'parallel' means all processes of a job"),
    (["--context", "cpu", "--cpus", "2"], "--context cpu and --cpus 2 are given"),
    (["--dataset", "nosuch"], "--dataset is 'nosuch'; expected digits, random"),
    (["--context", "first"], "'first' names no device"),
    (["--context", "99"], "gpu(99) is not on this machine"),
    (["--cpus", "2", "--work-load-list", "3"], "work_load_list has 1 entry for 2 contexts"),
    (["--cpus", "2", "--work-load-list", "3,x"], "--work-load-list is '3,x'; expected numbers"),
    (["--lr-step-epochs", "1.5"], "--lr-step-epochs is '1.5'"),
    (["--lr-step-epochs", "1,50", "--num-epochs", "2"], "--num-epochs is 2: the rate would not step at epoch 50"),
    (["--mom", "1.5"], "--mom is 1.5; expected a momentum from 0 to below 1"),
    (["--kv-store", "local:2"], "--kv-store is 'local:2'; expected a number of updates, and dist_async before it"),
    (["--kv-store", "devise"], "there is no store named 'devise'; did you mean 'device'?"),
    (["--optimizer", "adm"], "optimizer 'adm' is unknown; did you mean 'adam'?"),
    (["--load-epoch", "2"], "--load-epoch needs --model-prefix"),
    (["--load-epoch", "2", "--model-prefix", "nowhere/net"], "nowhere/net-0002 does not exist"),
    (["--data-dir", "nowhere"], "image folder nowhere does not exist"),
    (["--lr", "-1"], "learning rate is -1.0; expected a finite number"),
    (["--gc-threshold", "0.1", "--cpus", "2"], "--gc-threshold is 0.1, but --gc-type is None; only 2bit has a"),
    # as in scripts of MXNet
    (["--num-examples", "60000"], "--num-examples is 60000, but the training data have 1438"),
    (["--num-classes", "1000"], "--num-classes is 1000, but the training data have 10"),
    (["--gpus", "98"], "gpu(98) is not on this machine"),
    (["--network", "resnet", "--num-layers", "deep"], "--num-layers is 'deep'"),
    (["--network", "resnet", "--num-layers"], "--num-layers is None; expected a number"),
    # with images
    ([*IMAGES, "--rgb-mean", "0.1,0.2"], "--rgb-mean is '0.1,0.2', 2 numbers; expected one, or 1, one a channel"),
    (
        [*IMAGES, "--rgb-mean", "123.68", "--rgb-std", "1"],
        "--rgb-mean is '123.68' and --rgb-std '1', some of them above 1",
    ),
    ([*IMAGES, "--augment", "spin"], "augmentation 'spin' has 'spin'"),
    ([*IMAGES, "--network", "alexnet", "--image-shape", "3,32,32"], "63"),
]
"""Flags of `gangline train --network mlp`, and a part of the last line that they print."""


def test_a_wrong_value_is_one_line_before_anything_begins(
    images: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(images.parent)
    for flags, message in WRONG:
        out, err = run("train", "--network", "mlp", *flags, code=2)
        assert out == "", flags
        last = err.strip().splitlines()[-1]
        assert last.startswith("gangline: "), flags
        assert message in last, flags
        assert "Epoch[0]" not in err, flags
    assert "--num-layers is '18'; expected a number, and --network" in run("train", "--num-layers", "18", code=2)[1]
    assert not list(images.parent.rglob("*.safetensors"))


def test_a_wrong_choice_lists_the_choices(run: Run) -> None:
    shown, _ = run("train", "--help")
    shown = "".join(re.findall(r"[\w-]+", shown))
    for flag, value, choice in (
        ("--dtype", "float8", "bfloat16"),
        ("--gc-type", "3bit", "2bit"),
        ("--plots", "curves", "training-progress"),
        ("--lr-schedule", "steps", "piecewise"),
    ):
        out, err = run("train", flag, value, code=2)
        assert out == ""
        assert flag in err
        assert f"'{choice}'" in err
        assert choice in shown


def test_a_run_says_what_it_goes_on_from_and_what_it_replaces(tmp_path: Path, run: Run) -> None:
    prefix = tmp_path / "m"
    words = [*MLP, "--model-prefix", prefix, "--num-epochs"]
    _, err = run(*words, 1, "--load-epoch", "auto")
    assert f"{prefix} has no checkpoint to resume from: a new run begins" in err
    _, err = run(*words, 2, "--load-epoch", "auto")
    assert f"resuming from {prefix}-0001: 1 of 2 epochs are done\n" in err
    out, err = run(*words, 2, "--load-epoch", "auto")
    assert f"resuming from {prefix}-0002: 2 of 2 epochs are done; nothing is left to train" in err
    assert out.startswith("Validation-accuracy=")
    _, err = run(*words, 1)
    assert f"{prefix} has checkpoints of an earlier run, up to epoch 2, which this run replaces" in err


def test_a_restarted_job_resumes_its_own_checkpoints_only(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "m"

    def start(job: str, restart: int, *words: object) -> str:
        """Train as a start of a job, in a process of its own as far as `fit` can tell; return stderr."""
        monkeypatch.setattr(fit, "_fits", Counter())
        monkeypatch.setenv("GANGLINE_RUN_ID", job)
        monkeypatch.setenv("GANGLINE_RESTART", str(restart))
        return run(*MLP, "--model-prefix", prefix, *words)[1]

    start("old", 0, "--num-epochs", 2)
    assert "resuming" not in start("new", 0, "--num-epochs", 1)
    for words in ([], ["--load-epoch", "2"], ["--load-epoch", "9"], ["--load-epoch", "auto"]):
        err = start("new", 1, "--num-epochs", 1, *words)
        assert f"resuming from {prefix}-0001: 1 of 1 epochs are done" in err
    err = start("other", 1, "--num-epochs", 1)
    assert "restart 1: no earlier start of this job has written a checkpoint" in err
    assert "resuming" not in err
    assert f"resuming from {prefix}-0002" in start("another", 1, "--num-epochs", 2, "--load-epoch", "2")


@pytest.mark.parametrize("command", ["train", "predict"])
def test_a_checkpoint_of_another_network_is_refused(command: str, images: Path, tmp_path: Path, run: Run) -> None:
    prefix = tmp_path / "m"
    run(*MLP, "--num-epochs", "1", "--model-prefix", prefix)
    words = [command, "--network", "lenet", "--model-prefix", prefix, "--load-epoch", "auto", "--data-dir", images]
    _, err = run(*words, code=2)
    assert err.endswith(f"gangline: checkpoint {prefix}-0001 is of network mlp, but --network is lenet\n")


def test_weights_of_another_network_are_refused_with_the_file(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "mlp.safetensors"
    save_file({name: value.contiguous() for name, value in create("mlp", 10).state_dict().items()}, file)
    _, err = run("train", "--network", "lenet", "--cpus", "1", "--pretrained", file, code=1)
    assert f"gangline: weights {file} do not fit the network: parameters [" in err
    assert "allow_missing" not in err


def test_the_files_of_a_checkpoint_have_the_permissions_of_the_umask(tmp_path: Path, run: Run) -> None:
    before = os.umask(0o027)
    try:
        run(*MLP, "--num-epochs", "1", "--model-prefix", tmp_path / "m")
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in tmp_path.glob("*/*")}
    assert len(modes) == 6
    assert set(modes.values()) == {0o640}


@pytest.mark.parametrize(
    ("mean", "std", "expected"),
    [
        ("123.68,116.779,103.939", "58.393", ([0.485020, 0.457957, 0.407604], [0.228992] * 3)),
        ("0.5", "1", ([0.5] * 3, [1.0] * 3)),
        ("51", None, ([0.2] * 3, None)),
        (None, None, (None, None)),
    ],
)
def test_means_above_1_are_in_mxnets_unit(mean: str | None, std: str | None, expected: tuple[Any, Any]) -> None:
    found = normalization(mean, std, 3)
    assert [numbers and list(numbers) for numbers in found] == [
        numbers and pytest.approx(numbers, abs=1e-6) for numbers in expected
    ]


def test_a_signal_that_ends_the_data_workers_as_they_start_is_reported_as_a_signal(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*_: object, **__: object) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        raise EOFError  # as multiprocessing does if its fork server has ended

    monkeypatch.setattr("gangline.models.module.Module.fit", fit)
    out, err = run(*MLP, "--num-epochs", "1", "--model-prefix", tmp_path / "m", code=143)
    assert out == ""
    assert "training was stopped by SIGTERM after 0 of 1 epochs; there is no checkpoint yet" in err


@pytest.mark.slow
def test_the_default_run_reaches_its_accuracy(run: Run) -> None:
    out, err = run("train", "--cpus", "2", "--kv-store", "device")
    assert float(out.removeprefix("Validation-accuracy=")) >= 0.97
    lines = [line.split(" ", 1)[1] for line in err.splitlines()]
    assert lines[0] == "lenet on cpu(0), cpu(1) by loads 1, 1, store device, batch size 64, 10 classes, float32"
    assert re.fullmatch(r"Epoch\[0\] Batch \[0-20\]\tSpeed: [\d.]+ samples/sec\taccuracy=0\.\d+", lines[1])
    assert sum("Validation-accuracy" in line for line in lines) == 10


def test_gc_threshold_sets_the_threshold_of_2bit(tmp_path: Path, run: Run) -> None:
    prefix = tmp_path / "net"
    flags = ["--network", "mlp", "--cpus", "2", "--gc-type", "2bit", "--mom", "0", "--wd", "0", "--lr", "0.5"]
    flags += ["--model-prefix", str(prefix), "--batch-size", "720", "--dtype", "float64"]  # two batches to an epoch
    for threshold, moves in (("0.0078125", True), ("1000", False)):
        run("train", *flags, "--gc-threshold", threshold, "--num-epochs", "1")
        first = checkpoint.read(prefix, 1).params
        run("train", *flags, "--gc-threshold", threshold, "--num-epochs", "2", "--load-epoch", "1")
        second = checkpoint.read(prefix, 2).params
        moved = torch.cat([(second[name] - value).flatten() for name, value in first.items()])
        steps = moved / (0.5 * float(threshold))
        assert bool(steps.abs().max() > 0.5) is moves
        assert (steps - steps.round()).abs().max() < 1e-9  # multiples of the threshold, from two senders in two batches
        assert steps.abs().max() < 4.5


def test_loads_may_be_measured(run: Run) -> None:
    out, err = run("train", "--network", "mlp", "--cpus", "2", "--work-load-list", "auto", "--num-epochs", "3")
    assert "mlp on cpu(0), cpu(1) by loads 0.5, 0.5 (auto), store device" in err
    assert re.search(r"work_load_list auto: cpu\(0\) \d\.\d+, cpu\(1\) \d\.\d+ \(.* samples/s\)", err)
    assert float(out.removeprefix("Validation-accuracy=")) > 0.5


def test_half_precision_computes_in_it_and_keeps_float32_weights(tmp_path: Path, run: Run) -> None:
    flags = ["--network", "mlp", "--cpus", "2", "--num-epochs", "3", "--model-prefix", str(tmp_path / "net")]
    out, err = run("train", *flags, "--dtype", "float16")
    assert "10 classes, float16" in err
    assert float(out.removeprefix("Validation-accuracy=")) > 0.5
    saved = checkpoint.read(tmp_path / "net", 3)
    states = saved.require_optimizer_state().tensors
    assert {value.dtype for value in [*saved.params.values(), *states.values()]} == {torch.float32}
    assert saved.loss_scale is not None


def test_flags_as_mxnets_examples_write_them(run: Run) -> None:
    network = ["--network", "resnet", "--num-layers", "18", "--image-shape=3,16,16"]
    images = ["--benchmark", "1", "--dataset", "digits", "--num-classes", "5", "--num-examples", "8", "--test-io", "0"]
    _, err = run("train", *network, *images, "--num-epochs", "1", "--batch-size", "4")
    assert "resnet18 on cpu(0), store none, batch size 4, 5 classes" in err
    out, _ = run("train", "--benchmark", "0", "--test-io", "1")
    assert out.startswith("samples-per-second=")


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
    words = ["--num-epochs", "100000", "--network", "lenet", "--batch-size", "8"]  # the bar is drawn ten times a second
    arguments: list[Any] = [sys.executable, "-m", "gangline", "train", *words]
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


# As one of several workers: its default store, late updates, and who ends with which error


Result = tuple[int, str, str]
"""Exit code, stdout and stderr."""


def _train(comm: Communicator, port: int, words: list[str]) -> Result:
    os.environ |= {
        "RANK": str(comm.rank),
        "WORLD_SIZE": str(comm.size),
        "LOCAL_RANK": str(comm.rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # `gangline launch -s 0` sets these.
        "DMLC_ROLE": "worker",
        "DMLC_NUM_SERVER": "0",
        "DMLC_NUM_WORKER": str(comm.size),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": "9",
    }
    from gangline.cli.main import main

    sys.argv = ["gangline", "train", *words]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def job(workers: int, *words: object) -> list[Result]:
    """Run `gangline train` as the workers of a job without servers."""
    results: list[Result] = spawn(_train, workers, free_ports(1)[0], [str(word) for word in words], threads=1)
    return results


def accuracy(result: Result) -> float:
    code, out, err = result
    assert code == 0, err
    return float(out.strip().splitlines()[-1].removeprefix("Validation-accuracy="))


def test_workers_of_a_job_train_one_network(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    first, second = job(2, "--network", "mlp", "--num-epochs", "1", "--model-prefix", prefix)
    assert "mlp on 2 workers by loads 1, 1, each on cpu(0), store allreduce" in first[2]
    assert 0.2 < accuracy(first) <= 1
    assert (second[0], second[1]) == (0, "")
    assert epochs(prefix) == [1]


@pytest.mark.slow
def test_what_is_asked_for_stays_and_divergence_is_reported() -> None:
    words = ["--kv-store", "dist_async:6", "--network", "mlp", "--mom", "0.99", "--lr", "2", "--num-epochs", "3"]
    first, _ = job(2, *words)
    assert "momentum is 0" not in first[2]
    warning = r"the training loss went from 2\.\d+ to \S+: training diverges with learning rate 2, momentum 0.99, "
    warning += r"late updates of 2 workers, max_staleness 6; lower the learning rate or set a smaller momentum or"
    assert re.search(warning, first[2]), first[2]
    assert first[2].count("the training loss went from") == 1  # beside the error at the end


def test_a_prefix_in_use_ends_the_command_with_one_line(tmp_path: Path, run: Run) -> None:
    words = ["train", "--network", "mlp", "--num-epochs", "1", "--cpus", "1", "--model-prefix", tmp_path / "net"]
    with start_holder(tmp_path / "net") as holder:
        out, err = run(*words, code=1)
        assert err.splitlines()[-1].startswith(f"gangline: process {holder.pids[0]} on ")
    assert out == ""
    assert "--kv-store allreduce" in err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [2, 8])
def test_dist_async_learns_the_digits_with_its_defaults(workers: int) -> None:
    words = [sys.executable, "-m", "gangline", "launch", "-n", str(workers), "--"]
    run = subprocess.run([*words, "gangline", "train", "--kv-store", "dist_async"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"dist_async: momentum is 0, because updates of {workers} workers come late" in run.stderr
    assert "diverges" not in run.stderr
    assert float(run.stdout.partition("Validation-accuracy=")[2]) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("store", ["dist_sync", "allreduce"])
def test_the_survivor_of_a_killed_worker_names_it(store: str) -> None:
    words = [sys.executable, "-m", "gangline", "launch", "-n", "2", "-s", str(int(store == "dist_sync")), "--"]
    train = 'echo "pid $$ $RANK"; exec gangline train --network mlp --num-epochs 100000 --kv-store $0'
    words += ["sh", "-c", train, store]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        found = [process.stdout.readline().split() for _ in range(2)]
        pid = next(int(line[-2]) for line in found if line[-1] == "1")
        for line in process.stderr:
            if "Epoch[1]" in line:
                os.kill(pid, signal.SIGKILL)
                break
        rest = process.stderr.read()
        assert process.wait(60) == 128 + signal.SIGKILL
    assert re.search(r"\[worker 0\] gangline: .*(worker|rank) 1", rest), rest


# Signals: training ends after a step, with a checkpoint and an exit code that schedulers know


TRAIN = [sys.executable, "-m", "gangline", "train", "--network", "mlp", "--cpus", "1", "--num-epochs", "100000"]


def stopped(number: signal.Signals, folder: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a training that gets a signal in its second epoch."""
    with subprocess.Popen(
        [*TRAIN, *words],
        cwd=folder,
        env=environment(PYTHONUNBUFFERED=1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if "Epoch[0] Validation-accuracy" in line:
                process.send_signal(number)
                break
        out, err = process.communicate(timeout=60)
    return process.returncode, out, "".join(seen) + err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint_and_exit_code_75_without_scoring(number: signal.Signals, tmp_path: Path) -> None:
    code, out, err = stopped(number, tmp_path, "--model-prefix", "net")
    assert (code, out) == (75, ""), err
    assert f"training was stopped by {number.name}" in err
    assert "--load-epoch auto resumes from it" in err
    assert list(tmp_path.glob("net-0*/weights.safetensors"))


@pytest.mark.slow
def test_a_signal_without_a_prefix_is_reported_as_a_signal(tmp_path: Path) -> None:
    code, out, err = stopped(signal.SIGTERM, tmp_path)
    assert (code, out) == (128 + signal.SIGTERM, ""), err
    assert "no checkpoint was written" in err
