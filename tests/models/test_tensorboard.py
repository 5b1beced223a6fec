"""TensorBoard callback: event files, read back with TensorBoard's reader."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from reported import RATE, arrays, fit, module_on
from torch import nn

from gangline import Module, cpu
from gangline.models.loop.callbacks import BatchEndParam
from gangline.models.reports.tensorboard import TensorBoard

event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="pip install tensorboard"
)
Scalars = dict[str, list[tuple[int, float]]]


def scalars(folder: Path) -> Scalars:
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_each_update_is_logged_with_its_own_numbers(tmp_path: Path) -> None:
    losses: list[float] = []
    accuracies: list[float] = []
    validations: list[float] = []

    def look(param: BatchEndParam) -> None:
        outputs = module.get_outputs()
        losses.append(float(module.get_loss()))
        accuracies.append(float((outputs.argmax(1) == param.locals["label"]).double().mean()))

    with module_on([2, 1]) as module:
        callback = TensorBoard(module, tmp_path / "new" / "runs", period=1)
        note = [callback, lambda param: validations.append(param.eval_metric.get_global_name_value()[0][1])]
        fit(module, callback, look, epochs=3, eval_data=arrays(12), eval_end_callback=note)
    found = scalars(tmp_path / "new" / "runs")
    steps = list(range(1, 10))
    assert [step for step, _ in found["train/loss"]] == steps
    assert [value for _, value in found["train/loss"]] == pytest.approx(losses)
    assert [value for _, value in found["train/accuracy"]] == pytest.approx(accuracies)
    assert [step for step, _ in found["validation/accuracy"]] == [3, 6, 9]
    assert [value for _, value in found["validation/accuracy"]] == pytest.approx(validations)
    assert [value for _, value in found["learning_rate"]] == pytest.approx([0.1] * 9)
    shares = [found[f"samples_per_second_of/cpu({place})"] for place in range(2)]
    assert [step for step, _ in found["samples_per_second"]] == steps[1:]  # a run's first update has no time of its own
    for (_, speed), (_, first), (_, second) in zip(found["samples_per_second"], *shares, strict=True):
        assert speed == pytest.approx(first + second)
        assert first > second > 0
    assert all(0 < waiting < 1 for _, waiting in found["waiting"])


def test_measured_loads_are_logged(tmp_path: Path) -> None:
    with Module(nn.Linear(4, 3), nn.CrossEntropyLoss(), [cpu(0), cpu(1)], "auto") as module:
        module.init_optimizer("local", "sgd", RATE)
        fit(module, TensorBoard(module, tmp_path, period=1), epochs=1, eval_data=arrays(12))
    found = scalars(tmp_path)
    first, second = found["load_of/cpu(0)"], found["load_of/cpu(1)"]
    assert [step for step, _ in first] == [1, 2, 3]
    assert all(a + b == pytest.approx(1, abs=1e-3) for (_, a), (_, b) in zip(first, second, strict=True))


def test_each_period_logs_its_mean_loss_also_a_partial_last_one(tmp_path: Path) -> None:
    losses: list[float] = []
    with module_on([2, 1]) as module:
        fit(
            module, TensorBoard(module, tmp_path, period=4), lambda _: losses.append(float(module.get_loss())), epochs=3
        )
    found = scalars(tmp_path)
    assert [step for step, _ in found["train/loss"]] == [4, 8, 9]
    assert [value for _, value in found["train/loss"]] == pytest.approx(
        [sum(losses[:4]) / 4, sum(losses[4:8]) / 4, losses[8]]
    )
    assert [step for step, _ in found["train/accuracy"]] == [4, 8]


def test_a_resumed_run_replaces_records_after_its_checkpoint(tmp_path: Path) -> None:
    runs, prefix = tmp_path / "runs", tmp_path / "net"
    with module_on([1]) as module:
        fit(module, TensorBoard(module, runs, period=1), epochs=1, eval_data=arrays(12))
        module.save_checkpoint(prefix, 1, save_optimizer_states=True)
        fit(module, TensorBoard(module, runs, period=1), epochs=3, eval_data=arrays(12), begin_epoch=1)
    assert len(scalars(runs)["train/loss"]) == 9
    with module_on([1]) as module:
        fit(module, TensorBoard(module, runs, period=1), epochs=2, eval_data=arrays(12), resume=(prefix, 1))
    found = scalars(runs)
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in found["validation/accuracy"]] == [3, 6]
    assert not any(tag.startswith("samples_per_second_of") for tag in found)  # it has one context


def test_invalid_arguments_are_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with module_on([1]) as module:
        with pytest.raises(ValueError, match=r"file is a file; expected a folder for TensorBoard's event files"):
            TensorBoard(module, tmp_path / "file")
        with pytest.raises(ValueError, match="period is 0; expected 1 or more"):
            TensorBoard(module, tmp_path / "runs", period=0)


def test_a_missing_package_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"] + ["torch.utils.tensorboard"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with (
        module_on([1]) as module,
        pytest.raises(ImportError, match=r"TensorBoard needs the package tensorboard.*pip install"),
    ):
        TensorBoard(module, tmp_path / "runs")
    assert not list(tmp_path.iterdir())
