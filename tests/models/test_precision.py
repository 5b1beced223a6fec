"""Mixed precision: dtypes, loss scaling for float16, and float64 throughout."""

from __future__ import annotations

import copy
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import Watch, contexts, distance, labelled, same_bits
from torch import nn
from torch.nn import functional as F

from gangline import Module
from gangline.models.checkpoint import checkpoint
from gangline.models.loss.loss_scale import LossScale
from gangline.models.replicas import all_finite
from tests.collectives.simulated_gpus import on_simulated_gpu, simulated_gpus

HALVES = [torch.bfloat16, torch.float16]
FEATURES, CLASSES = 6, 3
FIRST = 2.0**16
"""Initial scale of torch's GradScaler and of ours."""

halves = pytest.mark.parametrize("half", HALVES, ids=lambda half: str(half).removeprefix("torch."))
counts = pytest.mark.parametrize("count", [1, 2, 3])


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def module_of(
    network: nn.Module,
    count: int = 2,
    loss: Any = nn.CrossEntropyLoss(),  # noqa: B008  it has no state
    autocast: torch.dtype | None = torch.float16,
    **sgd: float,
) -> Module:
    module = Module(network, loss, contexts(count), autocast=autocast)
    module.init_optimizer("local", "sgd", sgd or {"lr": 0.1})
    return module


def batch(samples: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return labelled(samples, FEATURES, CLASSES, seed=seed)


def overflowing(samples: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples in the range of float16 with scaled gradients outside of it."""
    data, label = batch(samples)
    return data * 1e4, label


def state_of(module: Module) -> dict[str, torch.Tensor]:
    return module.get_params() | {f"state {name}": value for name, value in module.optimizer_state().tensors.items()}


@halves
@counts
def test_outputs_are_half_and_all_that_is_kept_stays_float32(half: torch.dtype, count: int) -> None:
    with Module(perceptron(), nn.CrossEntropyLoss(), contexts(count), autocast=half) as module:
        module.init_optimizer("device", "adam", {"lr": 0.1})
        for step in range(3):
            module.forward_backward(*batch(seed=step))
            assert module.get_outputs().dtype is half
            expected = F.cross_entropy(module.get_outputs().float(), batch(seed=step)[1])
            assert float(module.get_loss()) == pytest.approx(float(expected), rel=1e-2)  # without the scale
            assert all(
                parameter.grad is not None and parameter.grad.dtype is torch.float32
                for replica in module.bound.replicas.all
                for parameter in replica.parameters.values()
            )
            module.update()
        module.forward_backward_update(*batch())
        assert {value.dtype for value in state_of(module).values()} == {torch.float32}


@halves
@pytest.mark.parametrize("count", [1, 3])
def test_score_and_predict_compute_in_half(half: torch.dtype, count: int) -> None:
    network = perceptron()
    data, label = batch(10)
    with torch.autocast("cpu", half), torch.no_grad():
        expected = network(data)
    with Module(network, nn.CrossEntropyLoss(), contexts(count), autocast=half) as module:
        predicted = module.predict(data, batch_size=5)
        assert predicted.dtype is half
        assert torch.allclose(predicted.float(), expected.float(), atol=4 * torch.finfo(half).eps)
        scores = dict(module.score((data, label), ["acc", "ce"], batch_size=5))
        assert scores["accuracy"] == pytest.approx(float((predicted.argmax(1) == label).double().mean()), abs=1e-12)
        assert scores["cross-entropy"] == pytest.approx(float(F.cross_entropy(predicted.float(), label)), rel=0.02)


@halves
@pytest.mark.parametrize("count", [1, 2])
def test_an_autocast_around_the_users_own_steps_works_on(half: torch.dtype, count: int) -> None:
    network = perceptron()
    reference = copy.deepcopy(network)
    data, label = batch()
    with torch.autocast("cpu", half):
        F.cross_entropy(reference(data), label).backward()
    with module_of(network, count, autocast=None, lr=1.0) as module:
        assert module.loss_scale is None
        before = module.get_params()
        with torch.autocast("cpu", half):
            module.forward(data, label, is_train=True)
        assert module.get_outputs().dtype is half
        module.backward()
        module.update()
        moved = {name: before[name] - value for name, value in module.get_params().items()}
        expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
        assert distance(moved, expected) < 4 * torch.finfo(half).eps  # type: ignore[arg-type]
        module.forward(data, label)
        assert module.get_outputs().dtype is torch.float32


@counts
def test_gradients_too_small_for_float16_arrive_thanks_to_the_scale(count: int) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, 1))
    reference = copy.deepcopy(network)
    data, _ = batch()

    def tiny(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output.float() - label).square().mean() * 1e-8  # below the smallest float16

    label = torch.zeros(12, 1)
    tiny(reference(data), label).backward()
    with module_of(network, count, tiny, lr=1e6) as module:
        before = module.get_params()
        module.forward_backward_update(data, label)
        moved = {name: (before[name] - value) / 1e6 for name, value in module.get_params().items()}
        expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
        assert distance(moved, expected) < 0.02  # type: ignore[arg-type]


def test_the_scale_doubles_after_2000_calm_steps_as_torchs_does() -> None:
    scale = LossScale()
    for _ in range(1999):
        assert scale.accepts(overflowed=False)
    assert scale.value == FIRST
    assert scale.accepts(overflowed=False)
    assert scale.value == 2 * FIRST
    for _ in range(3):
        assert not scale.accepts(overflowed=True)
    assert scale.value == FIRST / 4


@pytest.mark.parametrize("bad", [0.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 3])
def test_gradients_of_all_gpus_have_one_flag_which_the_host_reads_once(where: int, bad: float) -> None:
    calls = Counter[Any]()
    with simulated_gpus(), Watch(lambda func, *_: calls.update([func])):
        values = [torch.ones(3) for _ in range(4)]
        values[where][1] = bad
        gradients = [values[0], *(on_simulated_gpu(one, index % 2) for index, one in enumerate(values[1:]))]
        finite = all_finite(gradients)
        assert calls[torch.ops.aten._local_scalar_dense.default] == 0
        assert bool(finite) == math.isfinite(bad)
        assert calls[torch.ops.aten._local_scalar_dense.default] == 1


def test_a_scale_that_never_fits_ends_at_1_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "gangline")
    with module_of(perceptron()) as module:
        before, (data, label) = module.get_params(), batch()
        for _ in range(60):
            module.forward_backward_update(data * math.inf, label)
        assert module.loss_scale is not None
        assert module.loss_scale.value == 1
        assert distance(module.get_params(), before) == 0
    assert len(caplog.messages) == 1
    assert "in 20 steps in a row" in caplog.text
    assert "--dtype bfloat16" in caplog.text


def test_parameters_and_gradients_without_elements_do_not_disturb_the_scale() -> None:
    class WithEmpty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.empty = nn.Linear(FEATURES, CLASSES), nn.Parameter(torch.zeros(0, 2))

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            return self.linear(data) + self.empty.sum()  # type: ignore[no-any-return]

    with module_of(WithEmpty()) as module:
        before = module.get_params()
        module.forward_backward_update(*batch())
        assert not torch.equal(module.get_params()["linear.weight"], before["linear.weight"])


def test_the_loss_of_many_samples_does_not_overflow_though_each_is_half() -> None:
    def far(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output - label.to(output.dtype)).abs().mean()

    data, label = torch.randn(600, FEATURES), torch.full((600, 1), 200.0)
    for loss in (far, None):
        network: nn.Module = nn.Linear(FEATURES, 1)
        if loss is None:
            nn.init.constant_(network.bias, 200.0)  # type: ignore[arg-type]
        with module_of(network, loss=loss) as module:
            module.forward_backward_update(data, label if loss is not None else None)
            assert float(module.get_loss()) == pytest.approx(200.0, rel=0.02)


def test_the_scale_is_kept_in_checkpoints_and_taken_over(tmp_path: Path) -> None:
    prefix = tmp_path / "net"
    with module_of(perceptron(), lr=0.1, momentum=0.9) as first:
        assert first.loss_scale is not None
        first.loss_scale.value = 2048.0
        for data, label in (batch(), overflowing(), batch(seed=1)):
            first.forward_backward_update(data, label)
        first.save_checkpoint(prefix, 0, save_optimizer_states=True)
        state = first.loss_scale.state()
        assert state == {"value": 1024.0, "calm": 1}
        first.forward_backward_update(*batch(seed=2))
        expected = state_of(first)
    with module_of(perceptron(), lr=0.1, momentum=0.9) as second:
        second.resume(checkpoint.read(prefix, 0))
        assert second.loss_scale is not None
        assert second.loss_scale.state() == state
        second.forward_backward_update(*batch(seed=2))
        assert same_bits(state_of(second), expected)


def test_checkpoints_pass_between_precisions(tmp_path: Path) -> None:
    for number, (before, after) in enumerate([(torch.float16, None), (None, torch.float16)]):
        with module_of(perceptron(), autocast=before) as module:
            module.forward_backward_update(*batch())
            module.save_checkpoint(tmp_path / "net", number, save_optimizer_states=True)
            expected = module.get_params()
        with module_of(perceptron(), autocast=after) as module:
            module.resume(checkpoint.read(tmp_path / "net", number))
            assert same_bits(module.get_params(), expected)
            module.forward_backward_update(*batch())
