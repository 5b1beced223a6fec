"""Resume: a run that was cut off anywhere ends with the same bits as an uninterrupted one."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gangline import Module, cpu
from gangline.callback import Checkpoint
from gangline.collectives.processes.process_pool import ProcessPool
from gangline.models.checkpoint import checkpoint
from gangline.models.data.datasets import digits

SAMPLES, FEATURES = 23, 5


class Cut(BaseException):
    """Simulates a killed process: no code of gangline catches it."""


class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Dataset that adds noise from all three host generators to each sample."""

    def __init__(self) -> None:
        self.data, self.label = arrays()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(FEATURES) + random.random() + float(np.random.rand())
        return self.data[index] + noise, self.label[index]


def arrays() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(SAMPLES, FEATURES, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)


def dropout_and_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


DATA: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "arrays": (arrays, {"batch_size": 6}),
    "dataset": (Augmented, {"batch_size": 6}),
    "loader": (lambda: DataLoader(Augmented(), batch_size=6, shuffle=True), {}),
    "loader-workers": (lambda: DataLoader(Augmented(), batch_size=6, shuffle=True, num_workers=2), {}),
    "loader-own-generator": (
        lambda: DataLoader(Augmented(), batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(3)),
        {},
    ),
}


def run(data: str, loads: list[float], optimizer: str, prefix: Path | None, resume: Any = None, cut: int = -1) -> Any:
    """Train 3 epochs with a checkpoint every 2 batches and each epoch; stop after ``cut`` batches in all."""
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    make, options = DATA[data]
    batches = 0

    def count(_: Any) -> None:
        nonlocal batches
        if batches == cut:
            raise Cut
        batches += 1

    with Module(dropout_and_statistics(), nn.CrossEntropyLoss(), [cpu(i) for i in range(len(loads))], loads) as module:
        saves = Checkpoint(module, prefix, period=2) if prefix else None
        rate = lambda epoch, *_: module.set_learning_rate(0.1 / (epoch + 2))  # noqa: E731
        try:
            module.fit(
                make(),
                DataLoader(Augmented(), batch_size=9) if data == "loader" else None,  # which draws, too
                num_epoch=3,
                seed=5,
                kvstore="device",
                optimizer=optimizer,
                optimizer_params={"learning_rate": 0.1},
                batch_end_callback=[saves, count] if saves else count,
                epoch_end_callback=[rate, Checkpoint(module, prefix)] if prefix else rate,
                resume=resume,
                **options,
            )
        except Cut:
            return None
        return module.get_params(), module.optimizer_state()


CUTS = (0, 1, 4, 7, 10)
"""Batches to stop after: before the first checkpoint, within each epoch, and at the end of an epoch."""


RUNS = [(data, *run) for data in sorted(DATA) for run in (([1], "sgd", CUTS), ([2, 1, 0], "adam", CUTS))]
FORKING = [pytest.param(*run, marks=pytest.mark.slow) for run in RUNS if run[0] == "loader-workers"]
"""Fewer cuts for loaders with workers, which fork in every epoch and take longer."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "loads", "optimizer", "cuts"),
    [*(run for run in RUNS if run[0] != "loader-workers"), ("loader-workers", [2, 1, 0], "adam", (7,)), *FORKING],
)
def test_a_run_cut_off_after_any_batch_resumes_to_the_same_bits(
    tmp_path: Path, data: str, loads: list[float], optimizer: str, cuts: tuple[int, ...]
) -> None:
    weights, state = run(data, loads, optimizer, tmp_path / "whole" / "net")
    for cut in cuts:
        prefix = tmp_path / f"cut{cut}" / "net"
        assert run(data, loads, optimizer, prefix, cut=cut) is None
        resumed_weights, resumed_state = run(data, loads, optimizer, prefix, resume="auto")
        assert all(torch.equal(weights[name], value) for name, value in resumed_weights.items()), cut
        assert all(torch.equal(state.tensors[name], value) for name, value in resumed_state.tensors.items()), cut
        assert state.learning_rate == resumed_state.learning_rate


def test_saving_changes_nothing_of_the_run(tmp_path: Path) -> None:
    with_checkpoints, _ = run("arrays", [2, 1], "sgd", tmp_path / "net")
    without, _ = run("arrays", [2, 1], "sgd", None)
    assert all(torch.equal(with_checkpoints[name], value) for name, value in without.items())


def train_digits(prefix: str, kill_after: int = -1, resume: str | None = None) -> None:
    """Train two epochs of digits; kill the process after this many batches."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 10))
    seen = 0

    def kill(_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    with Module(network, nn.CrossEntropyLoss(), [cpu(0), cpu(1)], [3, 1]) as module:
        module.fit(
            digits((1, 8, 8), torch.float32, 0).train,
            num_epoch=2,
            batch_size=64,
            kvstore="device",
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
            batch_end_callback=[Checkpoint(module, prefix, period=5), kill],
            resume=resume,
        )
        module.save_checkpoint(prefix + "-final", 0, save_optimizer_states=True)


def train_until_killed(connection: Connection) -> None:
    """Train in a process of its own."""
    torch.set_num_threads(1)
    train_digits(connection.recv_bytes().decode(), kill_after=33)  # in the second epoch of 23 batches


def test_a_process_killed_in_mid_epoch_on_digits_resumes_to_the_same_bits(tmp_path: Path) -> None:
    train_digits(str(tmp_path / "whole" / "net"))
    with ProcessPool(train_until_killed, 1) as family:
        (connection,) = family.connections
        connection.send_bytes(bytes(tmp_path / "killed" / "net"))
        with pytest.raises(EOFError):
            connection.recv_bytes()
        connection.close()
        assert family.wait() == ([], {0: -signal.SIGKILL})
    assert checkpoint.read(tmp_path / "killed" / "net", 1).position["batch"] == 10
    train_digits(str(tmp_path / "killed" / "net"), resume="auto")
    whole, resumed = (checkpoint.read(tmp_path / folder / "net-final", 0) for folder in ("whole", "killed"))
    assert all(torch.equal(whole.params[name], value) for name, value in resumed.params.items())
    states = whole.require_optimizer_state().tensors, resumed.require_optimizer_state().tensors
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@pytest.mark.parametrize("step", range(12))
def test_a_save_cut_off_at_any_step_leaves_the_old_checkpoint_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    prefix = tmp_path / "net"
    module = Module(nn.Linear(2, 2), nn.MSELoss(), cpu())
    module.init_optimizer("local", "sgd", {"lr": 0.1, "momentum": 0.9})
    values = []
    for value in (1.0, 2.0):
        module.forward_backward_update(torch.ones(1, 2), torch.full((1, 2), value))
        values.append(module.get_params()["weight"])
        if value == 1.0:
            module.save_checkpoint(prefix, 0, save_optimizer_states=True)

    calls = 0

    def cut_at_step(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            if calls == step:
                raise Cut
            calls += 1
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", cut_at_step(Path.replace))
        patched.setattr(os, "fsync", cut_at_step(os.fsync))
        patched.setattr(json, "dump", cut_at_step(json.dump))
        patched.setattr("gangline.kvstore.optimizer.files.write_aside", cut_at_step(checkpoint.files.write_aside))
        try:
            module.save_checkpoint(prefix, 0, save_optimizer_states=True)
            whole = True
        except Cut:
            whole = False
    saved = checkpoint.read(prefix, 0)
    committed = torch.equal(saved.params["weight"], values[1])
    assert committed or torch.equal(saved.params["weight"], values[0])
    assert committed or not whole
    momentum = saved.require_optimizer_state().tensors['"weight"/momentum_buffer']
    module.save_checkpoint(prefix, 1, save_optimizer_states=True)
    newest = checkpoint.read(prefix, 1).require_optimizer_state().tensors['"weight"/momentum_buffer']
    assert torch.equal(momentum, newest) == committed  # state and weights are from the same step
    module.save_checkpoint(prefix, 0, save_optimizer_states=True)  # removes the leftovers of the interrupted save
    assert not list(tmp_path.glob("*.aside"))


def saved_module(tmp_path: Path, **states: bool) -> Path:
    prefix = tmp_path / "net"
    with Module(nn.Linear(2, 2), nn.MSELoss(), cpu()) as module:
        module.init_optimizer("local", "sgd", {"lr": 0.1, "momentum": 0.9})
        module.forward_backward_update(torch.ones(1, 2), torch.ones(1, 2))
        module.save_checkpoint(prefix, 3, **states)
    return prefix


@pytest.mark.parametrize("suffix", [".safetensors", ".state.safetensors", ".json"])
@pytest.mark.parametrize("damage", ["torn", "foreign"])
def test_a_torn_or_foreign_file_is_refused_by_name(tmp_path: Path, suffix: str, damage: str) -> None:
    prefix = saved_module(tmp_path, save_optimizer_states=True)
    path = tmp_path / f"net-0003{suffix}"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if damage == "torn" else b'{"a": 1}' * 9)
    with pytest.raises(ValueError, match=f"net-0003{suffix}".replace(".", r"\.")):
        checkpoint.read(prefix, 3)


def test_a_file_of_another_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    prefix = saved_module(tmp_path / "a", save_optimizer_states=True)
    other = saved_module(tmp_path / "b", save_optimizer_states=True)
    os.replace(other.with_name("net-0003.state.safetensors"), prefix.with_name("net-0003.state.safetensors"))
    with pytest.raises(ValueError, match=r"net-0003\.state\.safetensors does not belong to the checkpoint"):
        checkpoint.read(prefix, 3)


def test_missing_checkpoints_and_states_are_errors_that_list_existing_ones(tmp_path: Path) -> None:
    prefix = saved_module(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"net-0004\.json does not exist.*\[3\]"):
        Module.load(prefix, 4, network=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no optimizer state; save with save_optimizer_states=True"):
        Module.load(prefix, 3, network=nn.Linear(2, 2), load_optimizer_states=True)


def test_load_returns_the_weights_and_the_optimizer_state(tmp_path: Path) -> None:
    prefix = saved_module(tmp_path, save_optimizer_states=True)
    saved = checkpoint.read(prefix, 3)
    module = Module.load(
        prefix, 3, network=nn.Linear(2, 2), load_optimizer_states=True, loss=nn.MSELoss(), context=[cpu(0), cpu(1)]
    )
    assert all(torch.equal(saved.params[name], value) for name, value in module.get_params().items())
    module.init_optimizer("device", "sgd", {"lr": 0.1, "momentum": 0.9})
    loaded = module.optimizer_state().tensors
    assert all(torch.equal(value, loaded[name]) for name, value in saved.require_optimizer_state().tensors.items())
    module.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"batch_size": 5}, "batch_size"), ({"seed": 6}, "seed"), ({"shuffle": False}, "shuffle")],
)
def test_resuming_in_mid_epoch_by_another_plan_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    run("arrays", [1], "sgd", tmp_path / "net", cut=7)
    with (
        Module(dropout_and_statistics(), nn.CrossEntropyLoss(), cpu()) as module,
        pytest.raises(ValueError, match=f"middle of an epoch.*{message}"),
    ):
        module.fit(
            arrays(),
            num_epoch=3,
            resume=tmp_path / "net",
            **{"batch_size": 6, "seed": 5, "shuffle": True, **change},
        )


def test_a_plain_iterable_resumes_at_the_epochs_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batches = [(torch.ones(2, 2) * i, torch.ones(2, 2)) for i in range(5)]
    seen: list[int] = []
    with Module(nn.Linear(2, 2), nn.MSELoss(), cpu()) as module:

        def cut(param: Any) -> None:
            if param.nbatch == 2:
                raise Cut

        with pytest.raises(Cut):
            module.fit(batches, num_epoch=1, batch_end_callback=[Checkpoint(module, tmp_path / "net"), cut])
    with Module(nn.Linear(2, 2), nn.MSELoss(), cpu()) as module:
        module.fit(
            batches, num_epoch=1, resume=tmp_path / "net", batch_end_callback=lambda param: seen.append(param.nbatch)
        )
    assert seen == [0, 1, 2, 3, 4]
    assert "3 batches into epoch 0, but train_data is a plain iterable" in caplog.text


def test_resume_takes_a_new_learning_rate_if_requested(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    for first, second, expected in ((0.1, 0.1, 0.01), (0.1, 0.5, 0.5)):
        with Module(nn.Linear(2, 2), nn.MSELoss(), cpu()) as module:
            module.init_optimizer("local", "sgd", {"lr": first})
            module.set_learning_rate(0.01)
            module.save_checkpoint(prefix, 0, save_optimizer_states=True)
        with Module(nn.Linear(2, 2), nn.MSELoss(), cpu()) as module:
            module.init_optimizer("local", "sgd", {"lr": second})
            module.resume(checkpoint.read(prefix, 0))
            assert module.learning_rate == expected
