"""Gradient compression through Module: each replica sends its share of the mean over the global batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gangline import Context, Module, cpu
from gangline.callback import Checkpoint
from gangline.cli.main import main
from gangline.models.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
FEATURES, CLASSES = 6, 3
TYPES: dict[str, dict[str, Any]] = {
    "2bit": {"type": "2bit", "threshold": 0.03},
    "fp16": {"type": "fp16"},
    "bf16": {"type": "bf16"},
    "topk": {"type": "topk", "ratio": 0.1},
}


def contexts(count: int) -> list[Context]:
    return [cpu(index) for index in range(count)]


def clusters(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples around three distant points, which are easy to classify."""
    generator = torch.Generator().manual_seed(1)
    label = torch.randint(CLASSES, (samples,), generator=generator)
    centres = torch.randn(CLASSES, FEATURES, generator=generator) * 2
    return centres[label] + torch.randn(samples, FEATURES, generator=generator) * 0.3, label


def perceptron() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def step_by_verbs(module: Module, data: Any, label: Any) -> None:
    module.forward_backward(data, label)
    module.update()


STEPS: dict[str, Callable[[Module, Any, Any], None]] = {
    "eager": Module.forward_backward_update,
    "verbs": step_by_verbs,
}


@pytest.mark.parametrize("kind", sorted(TYPES))
@pytest.mark.parametrize("store", ["local", "device"])
def test_a_network_trains_through_every_codec_and_its_replicas_stay_equal(kind: str, store: str) -> None:
    data, label = clusters(96)
    with Module(perceptron(), nn.CrossEntropyLoss(), contexts(2), [3, 1], compression_params=TYPES[kind]) as module:
        module.fit(
            (data, label),
            num_epoch=8,
            batch_size=16,
            kvstore=store,
            optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
        )
        first, second = (dict(replica.network.named_parameters()) for replica in module.bound.replicas.all)
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert dict(module.score((data, label), "acc", batch_size=32))["accuracy"] >= 0.97
        feeds_back = kind in ("2bit", "topk")
        names = {f'"{layer}.{part}"/{place}' for layer in (0, 2) for part in ("weight", "bias") for place in (0, 1)}
        assert module.compression_residuals().keys() == (names if feeds_back else set())


# -- checkpoints ----------------------------------------------------------------------------------------------------


class Cut(BaseException):
    """Simulates a killed process: no code of gangline catches it."""


def run(
    kind: str, loads: list[float], prefix: Path, resume: Any = None, cut: int = -1
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None:
    """Train 3 epochs with a checkpoint every 2 batches; return weights and residuals, None if cut off."""
    batches = 0

    def count(_: Any) -> None:
        nonlocal batches
        if batches == cut:
            raise Cut
        batches += 1

    with Module(
        perceptron(), nn.CrossEntropyLoss(), contexts(len(loads)), loads, compression_params=TYPES[kind]
    ) as module:
        try:
            module.fit(
                clusters(46),
                num_epoch=3,
                batch_size=9,
                kvstore="device",
                optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
                batch_end_callback=[Checkpoint(module, prefix, period=2), count],
                epoch_end_callback=Checkpoint(module, prefix),
                resume=resume,
            )
        except Cut:
            return None
        return module.get_params(), module.compression_residuals()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "loads"),
    [
        ("2bit", [1, 1]),
        ("2bit", [2, 0, 1]),
        ("topk", [2, 0, 1]),
        ("fp16", [1, 1]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("bf16", [1, 1]), ("topk", [1, 1]))),
        *(pytest.param(kind, [2, 0, 1], marks=pytest.mark.slow) for kind in ("fp16", "bf16")),
    ],
)
def test_a_run_cut_off_in_mid_epoch_resumes_to_the_same_bits(tmp_path: Path, kind: str, loads: list[float]) -> None:
    whole = run(kind, loads, tmp_path / "whole" / "net")
    assert whole is not None
    for cut in (1, 4, 10):
        prefix = tmp_path / f"cut{cut}" / "net"
        assert run(kind, loads, prefix, cut=cut) is None
        resumed = run(kind, loads, prefix, resume="auto")
        assert resumed is not None
        for ours, theirs in zip(whole, resumed, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], value) for name, value in theirs.items()), cut


def test_residuals_are_in_the_checkpoint_and_a_run_without_compression_leaves_them(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    found = run("2bit", [1, 1], prefix)
    assert found is not None
    saved = checkpoint.read(prefix, 3)
    assert saved.compression_residuals.keys() == found[1].keys()
    assert all(torch.equal(saved.compression_residuals[name], value) for name, value in found[1].items())
    assert any(value.any() for value in found[1].values())
    with Module(perceptron(), nn.CrossEntropyLoss(), contexts(2)) as module:
        module.init_optimizer("device", "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        module.resume(saved)
        assert module.compression_residuals() == {}
        assert all(torch.equal(saved.params[name], value) for name, value in module.get_params().items())


# -- arguments ------------------------------------------------------------------------------------------------------


def test_one_context_alone_warns_that_nothing_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    data, label = clusters(8)
    found = []
    for params in (TYPES["2bit"], None):
        with Module(perceptron(), nn.CrossEntropyLoss(), cpu(), compression_params=params) as module:
            caplog.clear()
            with caplog.at_level(logging.WARNING, "gangline"):
                module.init_optimizer("device", "sgd", {"lr": 0.1})
            module.forward_backward_update(data, label)
            assert module.compression_residuals() == {}
            found.append(module.get_params())
            said = ["a single context sends no gradients, so compression_params has no effect"]
            assert caplog.messages == (said if params else [])
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


@pytest.mark.parametrize("store", ["local", "device"])
def test_pulls_within_a_process_are_not_compressed(store: str) -> None:
    params = {"type": "2bit", "pull_type": "fp16"}
    with Module(perceptron(), nn.CrossEntropyLoss(), contexts(2), compression_params=params) as module:
        with pytest.raises(ValueError, match=f"pull_type is 'fp16', but a '{store}' store"):
            module.init_optimizer(store, "sgd", {"lr": 0.1})
        assert not module.optimizer_initialized


# -- what cannot be compressed ---------------------------------------------------------------------


@pytest.mark.parametrize("how", sorted(STEPS))
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_nan_gradient_is_an_error_by_key_and_changes_neither_its_step_nor_the_next(
    how: str, steps_before: int
) -> None:
    """No buckets exist before the first step; later ones may be pushed while backward runs."""
    data, label = clusters(8)
    bad = data.clone()
    bad[6] = float("nan")  # of the second replica
    found = []
    for refused in (True, False):
        with Module(perceptron(), nn.CrossEntropyLoss(), contexts(2), compression_params=TYPES["2bit"]) as module:
            module.init_optimizer("device", "sgd", {"lr": 0.1, "momentum": 0.9})
            for _ in range(steps_before):
                STEPS[how](module, data, label)
            for spoilt in (bad, data * float("nan")) if refused else ():
                before = module.get_params(), module.optimizer_state().tensors, module.compression_residuals()
                with pytest.raises(ValueError, match=r"the gradient of key '[02]\.(weight|bias)' holds NaN"):
                    STEPS[how](module, spoilt, label)
                after = module.get_params(), module.optimizer_state().tensors, module.compression_residuals()
                for ours, theirs in zip(after, before, strict=True):  # residuals may be new, and are 0 then
                    assert all(torch.equal(theirs.get(n, torch.zeros_like(v)), v) for n, v in ours.items())
            for _ in range(3):
                STEPS[how](module, data, label)
            found.append(module.get_params())
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


# -- end to end -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_bits_reach_the_accuracy_of_whole_gradients_on_digits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracies: dict[str, float] = {}
    for kind, compression in (("whole", []), ("2bit", ["--gc-type", "2bit", "--gc-threshold", "0.03"])):
        flags = ["--network", "lenet", "--dataset", "digits", "--cpus", "2", "--lr", "0.03", "--num-epochs", "20"]
        monkeypatch.setattr("sys.argv", ["gangline", "train", *flags, *compression])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
        accuracies[kind] = float(capsys.readouterr().out.removeprefix("Validation-accuracy="))
    assert accuracies["2bit"] >= accuracies["whole"] - 0.02
