"""Gradient accumulation: an update over several batches uses the mean over all their valid elements."""

from __future__ import annotations

import copy
import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import Cut, contexts, distance, mlp, same_bits
from torch import nn
from torch.nn import functional as F

from gangline import Module
from gangline.callback import Checkpoint, Speedometer
from gangline.models.checkpoint import checkpoint

FEATURES, CLASSES = 5, 3
Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]
MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
counts = pytest.mark.parametrize("count", [1, 3])
perceptron = partial(mlp, FEATURES, 7, CLASSES, seed=0)


def classes(valid: Sequence[int], size: int = 6) -> Batches:
    """Return batches with these numbers of valid labels; the last batch has fewer samples."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for number, count in enumerate(valid):
        samples = size if number < len(valid) - 1 else size // 2
        data = torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)
        label = torch.randint(CLASSES, (samples,), generator=generator)
        label[torch.randperm(samples, generator=generator)[min(count, samples) :]] = -1
        batches.append((data, label))
    return batches


IGNORING = nn.CrossEntropyLoss(ignore_index=-1)


@counts
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_an_update_without_a_valid_label_has_a_nan_loss_and_changes_nothing(count: int, grad_req: str) -> None:
    with Module(perceptron(), IGNORING, contexts(count)) as module:
        module.bind((6, FEATURES), grad_req=grad_req)
        module.init_optimizer("local", "sgd", MOMENTUM)
        for data, label in classes([3, 0, 2]):
            before, state = module.get_params(), module.optimizer_state().tensors
            module.forward_backward(data, label)
            module.update()
            counted = bool((label >= 0).any())
            assert module.get_loss().isnan() == (not counted)
            moved = [not torch.equal(value, before[name]) for name, value in module.get_params().items()]
            assert moved == [counted] * len(moved)
            if not counted:
                assert module.normalizer == 0.0
                assert same_bits(module.optimizer_state().tensors, state)


@counts
@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_means_under_write_and_gradients_given_from_outside_are_added_as_they_are(count: int, grad_req: str) -> None:
    network = perceptron()
    reference = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(2)
    with Module(network, IGNORING, contexts(count)) as module:
        module.bind((6, FEATURES), **({} if grad_req == "write" else {"grad_req": grad_req}))
        assert module.grad_req == grad_req
        module.init_optimizer("local", "sgd", MOMENTUM)
        for data, label in classes([6, 2, 1]):
            if grad_req == "write":
                module.forward_backward(data, label)
                F.cross_entropy(reference(data), label, ignore_index=-1).backward()
                continue
            grads = torch.randn(len(data), CLASSES, generator=generator, dtype=torch.float64)
            reference(data).backward(grads)
            module.forward(data)
            module.backward(grads)
        module.update()
        torch.optim.SGD(reference.parameters(), **MOMENTUM).step()
        assert distance(module.get_params(), reference.state_dict()) < 1e-11


@pytest.mark.parametrize("given_first", [True, False])
def test_gradients_from_outside_and_from_the_loss_do_not_mix_under_add(given_first: bool) -> None:
    data, label = classes([6, 6])[0]
    first, second = torch.ones(6, CLASSES, dtype=torch.float64), None
    if not given_first:
        first, second = second, first  # type: ignore[assignment]
    with Module(perceptron(), nn.CrossEntropyLoss(), contexts(2)) as module:
        module.bind((6, FEATURES), grad_req="add")
        module.init_optimizer("local", "sgd", MOMENTUM)
        module.forward(data, label)
        module.backward(first)
        module.forward(data, label)
        with pytest.raises(RuntimeError, match=r"call update\(\) between them"):
            module.backward(second)
        module.update()  # of the first batch
        module.forward(data, label)
        module.backward(second)


@pytest.mark.parametrize(("accumulate", "ends"), [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [1, 3, 5, 6]), (50, [6])])
def test_callbacks_run_once_per_update_with_its_last_batch(accumulate: int, ends: list[int]) -> None:
    seen: list[tuple[int, int]] = []
    labels: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []
    batches = classes([6] * 7)

    def note(param: Any) -> None:
        seen.append((param.epoch, param.nbatch))
        labels.append(param.locals["label"])
        assert param.locals["module"].position.batch == param.nbatch + 1
        weights.append(param.locals["module"].get_params()["0.weight"])

    with Module(perceptron(), nn.CrossEntropyLoss(), contexts(2)) as module:
        module.fit(batches, num_epoch=2, optimizer_params={"lr": 0.1}, batch_end_callback=note, accumulate=accumulate)
    assert seen == [(epoch, end) for epoch in range(2) for end in ends]
    assert all(torch.equal(label, batches[end][1]) for label, end in zip(labels, 2 * ends, strict=True))
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(weights))


def test_the_speedometer_speaks_of_all_metrics_though_its_period_does_not_divide(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.INFO, logger="gangline"),
        Module(perceptron(), nn.CrossEntropyLoss(), contexts(2)) as module,
    ):
        meter = Speedometer(6, frequent=4)
        module.fit(classes([6] * 20), None, ["acc", "ce"], num_epoch=1, batch_end_callback=meter, accumulate=3)
    lines = [line for line in caplog.messages if "Speed:" in line]
    assert [re.sub(r"\d+\.\d+", "", line) for line in lines] == [
        f"Epoch[0] Batch [{begin}-{end}]\tSpeed:  samples/sec\taccuracy=\tcross-entropy="
        for begin, end in ((2, 5), (5, 8), (8, 14), (14, 17))
    ]


@pytest.mark.parametrize(
    ("period", "accumulate", "saved"),
    [
        (4, 3, [6, 9]),
        (2, 3, [3, 6, 9, 10]),
        (7, 10, [10]),
    ],
)
def test_checkpoints_are_written_at_the_update_that_reaches_their_period(
    tmp_path: Path, period: int, accumulate: int, saved: list[int]
) -> None:
    found: list[int] = []

    def look(_: Any) -> None:
        if checkpoint.epochs(tmp_path / "net"):
            batch = checkpoint.read(tmp_path / "net", 0).position["batch"]
            if not found or found[-1] != batch:
                found.append(batch)

    with Module(perceptron(), nn.CrossEntropyLoss(), contexts(2)) as module:
        saves = Checkpoint(module, tmp_path / "net", period=period)
        module.fit(classes([6] * 10), num_epoch=1, batch_end_callback=[saves, look], accumulate=accumulate)
    assert found == saved


@pytest.mark.parametrize("accumulate", [1, 3])
def test_metrics_count_each_batch_once(accumulate: int) -> None:
    seen: list[int] = []

    def note(label: Any, output: Any) -> float:
        assert len(label) == len(output)
        seen.extend(label.tolist())
        return 0.0

    batches = classes([6] * 7)
    with Module(perceptron(), nn.CrossEntropyLoss(), contexts(3)) as module:
        module.fit(batches, num_epoch=2, eval_metric=note, accumulate=accumulate)
    assert seen == 2 * [value for _, label in batches for value in label.tolist()]


class Interrupted:
    """Yield batches, then raise an error."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches
        raise Cut


@pytest.mark.parametrize(("again", "count"), [(1, 1), (2, 2)])
def test_a_fit_cut_off_within_an_update_leaves_nothing_to_the_next(again: int, count: int) -> None:
    network, found = perceptron(), []
    batches = classes([6, 6, 6])
    for cut in (True, False):
        with Module(copy.deepcopy(network), nn.CrossEntropyLoss(), contexts(count)) as module:
            module.init_optimizer("local", "sgd", MOMENTUM)
            if cut:
                with pytest.raises(Cut):
                    module.fit(Interrupted(batches), num_epoch=1, accumulate=4)
            module.fit(batches, num_epoch=1, accumulate=again)
            found.append(module.get_params())
    assert same_bits(*found)


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_grad_req_is_as_it_was_after_fit(grad_req: str) -> None:
    with Module(perceptron(), nn.CrossEntropyLoss(), contexts(2)) as module:
        module.bind((6, FEATURES), grad_req=grad_req)
        during: list[str] = []
        for accumulate in (1, 2):
            module.fit(
                classes([6, 6, 6]),
                num_epoch=1,
                batch_end_callback=lambda param: during.append(param.locals["module"].grad_req),
                accumulate=accumulate,
            )
            assert module.grad_req == grad_req
        assert during == [grad_req] * 3 + ["add"] * 2
        with pytest.raises(Cut):
            module.fit(Interrupted(classes([6, 6, 6])), num_epoch=1, accumulate=2)
        assert module.grad_req == grad_req
