"""Metrics: MXNet's names, and values equal to plain formulas over batches of unequal size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassMatthewsCorrCoef

from gangline import Module, cpu
from gangline.callback import Checkpoint
from gangline.models.metrics.metric import EvalMetric, create

SIZES = (5, 1, 7, 3)
CLASSES = 5
NAMES = {
    "acc": "accuracy",
    "ACC": "accuracy",
    "accuracy": "accuracy",
    "ce": "cross-entropy",
    "cross-entropy": "cross-entropy",
    "loss": "loss",
    "mae": "mae",
    "mse": "mse",
    "nll_loss": "nll-loss",
    "perplexity": "perplexity",
    "rmse": "rmse",
    "top_k_acc": "top_k_accuracy_5",
    "top_k_accuracy": "top_k_accuracy_5",
}

Batches = list[tuple[torch.Tensor, torch.Tensor]]


def of_classes(classes: int, *axes: int) -> Batches:
    """Return batches of (logits, labels) of unequal size; ``axes`` follow the class axis."""
    return [(torch.randn(size, classes, *axes) * 2, torch.randint(classes, (size, *axes))) for size in SIZES]


def of_numbers(*axes: int) -> Batches:
    """Return batches of (outputs, labels) of unequal size with partly correlated floats."""
    labels = [torch.randn(size, *axes) * 3 + 1 for size in SIZES]
    return [(label * 0.7 + torch.randn_like(label), label) for label in labels]


def counted(metric: EvalMetric, batches: Iterable[tuple[Any, Any]]) -> EvalMetric:
    for output, label in batches:
        metric.update(label, output, None)
    return metric


def value(spec: Any, batches: Iterable[tuple[Any, Any]], loss: Any = None) -> float:
    ((_, found),) = counted(create(spec, loss), batches).get_name_value()
    return found


def whole(batches: Batches) -> tuple[np.ndarray, np.ndarray]:
    """Return all outputs and labels as numpy arrays with the class axis last."""
    outputs, labels = [], []
    for output, label in batches:
        if output.dim() == label.dim() + 1:
            outputs.append(output.double().movedim(1, -1).reshape(-1, output.shape[1]).numpy())
        else:
            outputs.append(output.double().reshape(-1).numpy())
        labels.append(label.reshape(-1).numpy())
    return np.concatenate(outputs), np.concatenate(labels)


def accuracy(outputs: np.ndarray, labels: np.ndarray, top_k: int = 1) -> float:
    best = np.argsort(-outputs, axis=1)[:, :top_k]
    return float(np.mean([label in row for row, label in zip(best, labels, strict=True)]))


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> float:
    log_sums = np.log(np.exp(logits).sum(1))
    return float(np.mean(log_sums - logits[np.arange(len(labels)), labels]))


BY_CLASS: dict[str, tuple[Any, Callable[[np.ndarray, np.ndarray], float]]] = {
    "acc": ("acc", accuracy),
    "top_k_accuracy": (("top_k_accuracy", {"top_k": 3}), lambda o, y: accuracy(o, y, 3)),
    "ce": ("ce", cross_entropy),
    "nll_loss": ("nll_loss", cross_entropy),
    "perplexity": ("perplexity", lambda o, y: math.exp(cross_entropy(o, y))),
}
BY_NUMBER: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "mae": lambda o, y: float(np.abs(o - y).mean()),
    "mse": lambda o, y: float(((o - y) ** 2).mean()),
    "rmse": lambda o, y: math.sqrt(((o - y) ** 2).mean()),
}


def test_a_short_name_reports_mxnets_name_and_nan_before_anything_was_counted() -> None:
    for name, reported in NAMES.items():
        metric = create(name, nn.CrossEntropyLoss())
        for pairs in (metric.get_name_value(), metric.get_global_name_value()):
            assert pairs == [(reported, pytest.approx(math.nan, nan_ok=True))]


@pytest.mark.parametrize("name", sorted(BY_CLASS))
@pytest.mark.parametrize("axes", [(), (4,)])
def test_a_metric_of_classes_is_the_formula_over_all_samples_and_places(name: str, axes: tuple[int, ...]) -> None:
    spec, formula = BY_CLASS[name]
    batches = of_classes(CLASSES, *axes)
    assert value(spec, batches, nn.CrossEntropyLoss()) == pytest.approx(formula(*whole(batches)), rel=1e-6)


@pytest.mark.parametrize("name", sorted(BY_NUMBER))
@pytest.mark.parametrize("axes", [(), (1,), (2, 3)])
def test_a_metric_of_numbers_is_the_formula_over_all_elements(name: str, axes: tuple[int, ...]) -> None:
    batches = of_numbers(*axes)
    assert value(name, batches) == pytest.approx(BY_NUMBER[name](*whole(batches)), rel=1e-5)


CERTAIN = torch.tensor([[1.0, 0.0]])
HUNDREDS = [(torch.full((1000,), 100.0, dtype=torch.float16), torch.zeros(1000))] * 2
VALUES: list[tuple[Any, Batches, Any, float]] = [
    # half-precision outputs whose sum overflows
    ("mae", HUNDREDS, None, 100.0),
    ("mse", HUNDREDS, None, 10000.0),
    ("rmse", HUNDREDS, None, 100.0),
    # integer outputs and float labels; outputs in a column
    ("mae", [(torch.tensor([1, 2]), torch.tensor([1.5, 2.25]))], None, 0.375),
    ("mae", [(torch.tensor([[1.0], [2.0]]), torch.tensor([1.5, 2.25]))], None, 0.375),
    # class numbers as outputs; probabilities in a column and flat labels
    ("acc", [(torch.tensor([7, 8, 9]), torch.tensor([7, 8, 8])), (torch.tensor([1]), torch.tensor([2]))], None, 0.5),
    ("acc", [(torch.tensor([[0.9], [0.8], [0.2], [0.7]]), torch.tensor([1, 1, 0, 0]))], None, 0.75),
    # a probability of zero, as in MXNet; a perplexity beyond all floats
    ("ce", [(CERTAIN, torch.tensor([1]))], None, -math.log(1e-12)),
    ("ce", [(CERTAIN, torch.tensor([0]))], None, 0.0),
    ("perplexity", [(torch.tensor([[1e4, 0.0]]), torch.tensor([1]))], nn.CrossEntropyLoss(), math.inf),
    # a k beyond the classes finds every label, as in MXNet
    ("top_k_accuracy", [(torch.eye(3), torch.arange(3).flip(0))], nn.CrossEntropyLoss(), 1.0),
]


def test_values_of_unusual_outputs_and_labels() -> None:
    for name, batches, loss, expected in VALUES:
        assert value(name, batches, loss) == pytest.approx(expected, rel=1e-5, abs=1e-9), (name, batches)


def own_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return -output[torch.arange(len(label)), label].log().mean()


@pytest.mark.parametrize("name", ["ce", "perplexity"])
@pytest.mark.parametrize(
    ("loss", "outputs"),
    [
        (nn.CrossEntropyLoss(), lambda logits: logits),
        (nn.CrossEntropyLoss(label_smoothing=0.1), lambda logits: logits),
        (nn.NLLLoss(), lambda logits: logits.log_softmax(1)),
        (own_loss, lambda logits: logits.softmax(1)),
        (None, lambda logits: logits.softmax(1)),
    ],
)
def test_likelihoods_take_outputs_as_the_loss_does(
    name: str, loss: Any, outputs: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    batches = of_classes(CLASSES)
    found = value(name, [(outputs(logits), label) for logits, label in batches], loss)
    assert found == pytest.approx(BY_CLASS[name][1](*whole(batches)), rel=1e-5)


@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.NLLLoss])
@pytest.mark.parametrize("name", sorted(BY_CLASS))
@pytest.mark.parametrize("ignored", [-100, 1])
def test_labels_that_the_loss_ignores_are_not_counted(name: str, ignored: int, kind: type[nn.Module]) -> None:
    spec, formula = BY_CLASS[name]
    batches = [(logits.log_softmax(1), label) for logits, label in of_classes(CLASSES)]
    batches[0][1][:3] = ignored
    batches[2][1][-2:] = ignored
    outputs, labels = whole(batches)
    keep = labels != ignored
    found = value(spec, batches, kind(ignore_index=ignored))
    assert found == pytest.approx(formula(outputs[keep], labels[keep]), rel=1e-6)
    nothing = [(torch.randn(4, CLASSES), torch.full((4,), ignored))]
    assert math.isnan(value(spec, nothing, kind(ignore_index=ignored)))


@pytest.mark.parametrize("questions", [0, 1, 2, 3])
def test_logits_of_a_yes_are_cut_at_zero_and_probabilities_at_a_half(questions: int) -> None:
    """Each of several questions a sample counts."""
    axes = (questions,) if questions else ()
    batches = [(torch.randn(size, *axes), torch.randint(2, (size, *axes)).float()) for size in SIZES]
    logits, labels = whole(batches)
    expected = float(((logits > 0) == labels).mean())
    assert value("acc", batches, nn.BCEWithLogitsLoss()) == pytest.approx(expected, rel=1e-6)
    certain = [(output.sigmoid(), label) for output, label in batches]
    assert value("acc", certain, nn.BCELoss()) == pytest.approx(expected, rel=1e-6)


def test_loss_is_the_mean_over_all_samples_whatever_the_batches() -> None:
    logits, label = torch.randn(10, CLASSES), torch.randint(CLASSES, (10,))
    weight = torch.arange(1.0, CLASSES + 1)
    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=weight)):
        with Module(nn.Identity(), loss, [cpu(0), cpu(1)], [2, 1]) as module:
            ((name, found),) = module.score((logits, label), "loss", batch_size=4)
        assert name == "loss"
        assert found == pytest.approx(loss(logits, label).item(), rel=1e-6)


def test_loss_with_ignored_labels_counts_the_others_and_shows_nan() -> None:
    logits, label = torch.randn(8, CLASSES), torch.randint(CLASSES, (8,))
    label[:5] = -100  # a whole batch, and a part of the next
    with Module(nn.Identity(), nn.CrossEntropyLoss(), cpu()) as module:
        ((_, found),) = module.score((logits, label), "loss", batch_size=4)
        assert found == pytest.approx(nn.functional.cross_entropy(logits[5:], label[5:]).item(), rel=1e-6)
        assert math.isnan(module.score((logits[:4], label[:4]), "loss", batch_size=4)[0][1])
        logits[6] = math.nan
        assert math.isnan(module.score((logits, label), "loss", batch_size=4)[0][1])


@pytest.mark.parametrize("name", ["ce", "nll_loss", "perplexity", "mae", "mse", "rmse"])
def test_nan_outputs_of_one_batch_are_seen(name: str) -> None:
    batches = of_classes(CLASSES) if name in BY_CLASS else of_numbers()
    batches[1] = (batches[1][0] * float("nan"), batches[1][1])
    assert math.isnan(value(name, batches, nn.CrossEntropyLoss()))


def test_a_list_reports_each_in_order() -> None:
    batches = of_classes(CLASSES)
    metric = counted(create(["ce", ["acc", ("top_k_accuracy", {"top_k": 3})]], nn.CrossEntropyLoss()), batches)
    expected = [BY_CLASS[name][1](*whole(batches)) for name in ("ce", "acc", "top_k_accuracy")]
    for pairs in (metric.get_name_value(), metric.get_global_name_value()):
        assert [name for name, _ in pairs] == ["cross-entropy", "accuracy", "top_k_accuracy_3"]
        assert [found for _, found in pairs] == pytest.approx(expected, rel=1e-6)
    metric.reset_local()
    assert all(math.isnan(found) for _, found in metric.get_name_value())
    assert [found for _, found in metric.get_global_name_value()] == pytest.approx(expected, rel=1e-6)
    metric.reset()
    assert all(math.isnan(found) for _, found in metric.get_global_name_value())


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: MulticlassAccuracy(4, average="micro"), "MulticlassAccuracy"),
        (lambda: MetricCollection([MulticlassAccuracy(4, average="micro")], prefix="my_"), "my_MulticlassAccuracy"),
        (lambda: MetricCollection({"top": MulticlassAccuracy(4, average="micro")}), "top"),
        (lambda: create("acc"), "accuracy"),
        (lambda: [[create("acc")]], "accuracy"),
    ],
)
def test_one_object_counts_training_and_validation_apart(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, make: Callable[[], Any], name: str
) -> None:
    data, label = torch.eye(4), torch.arange(4)
    network = nn.Linear(4, 4)
    nn.init.eye_(network.weight)
    nn.init.zeros_(network.bias)
    caplog.set_level("INFO", "gangline")
    with Module(network, nn.CrossEntropyLoss(), cpu()) as module:
        module.fit(
            (data, label),
            (data, label.flip(0)),
            make(),
            num_epoch=2,
            batch_size=2,
            eval_frequency=(1, "batches"),
            epoch_end_callback=Checkpoint(None, tmp_path / "net", keep_best=name),
            optimizer_params={"learning_rate": 1e-3},
        )
    lines = [line for line in caplog.messages if line.startswith("Epoch") and name in line and "Batch" not in line]
    assert lines == [
        f"Epoch[{epoch}] {part}-{name}={value}"
        for epoch in (0, 1)
        for part, value in (("Train", "1.000000"), ("Validation", "0.000000"))
    ]


def test_a_function_of_label_and_output_is_averaged_over_batches() -> None:
    def largest_error(label: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return (label - output).abs().max()

    batches = of_numbers()
    ((name, found),) = counted(create(largest_error), batches).get_name_value()
    assert name == "largest_error"
    expected = np.mean([np.abs((label - output).numpy()).max() for output, label in batches])
    assert found == pytest.approx(expected, rel=1e-6)
    nested = [({"parts": (1, 2, 3)}, torch.zeros(2))]
    assert value(lambda label, output: len(output["parts"]) + len(label), nested) == 5


@pytest.mark.parametrize("joined", [1 << 18, 0], ids=["joined", "by share"])
@pytest.mark.parametrize("loads", [[1], [3, 1], [1, 4, 2]])
def test_outputs_of_any_contexts_count_as_those_of_one(
    loads: list[float], joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def largest_error(label: torch.Tensor, output: torch.Tensor) -> float:
        return float((label - output.argmax(1)).abs().max()) + len(label)

    monkeypatch.setattr("gangline.models.training_step._SMALL_OUTPUTS", joined)
    logits, label = torch.randn(47, CLASSES), torch.randint(CLASSES, (47,))
    label[::9] = -100
    logits[label < 0] += 20
    spec = ["acc", "ce", "perplexity", "loss", correlation(), ("top_k_accuracy", {"top_k": 2}), largest_error]
    loss = nn.CrossEntropyLoss()
    expected = counted(create(spec[:3] + spec[4:], loss), zip(logits.split(8), label.split(8), strict=True))
    contexts = [cpu(index) for index in range(len(loads))]
    with Module(nn.Identity(), loss, contexts, loads) as module:
        found = dict(module.score((logits, label), spec, batch_size=8))
        assert found.pop("loss") == pytest.approx(float(loss(logits, label)), rel=1e-6)
        assert list(found.items()) == [(name, pytest.approx(one, rel=1e-6)) for name, one in expected.get_name_value()]
        module.forward(logits, label, is_train=False)
        assert len(module.labelled_outputs()) == (1 if joined else len(loads))


def correlation() -> MulticlassMatthewsCorrCoef:
    return MulticlassMatthewsCorrCoef(CLASSES, ignore_index=-100)


def test_counts_of_several_devices_are_combined() -> None:
    batches = of_classes(CLASSES)
    for spec in ("acc", "ce", correlation()):
        metric = create(spec, nn.CrossEntropyLoss())
        counted(metric, batches[:2])
        (device,) = metric._global  # type: ignore[attr-defined]
        metric._global[torch.device("meta")] = metric._global.pop(device)  # type: ignore[attr-defined]
        counted(metric, batches[2:])
        assert len(metric._global) == 2  # type: ignore[attr-defined]
        assert metric.get_name_value()[0][1] == pytest.approx(value(spec, batches, nn.CrossEntropyLoss()), rel=1e-6)


LIST = "".join(f"(?=.*'{name}')" for name in NAMES if name != "ACC")


REFUSED: list[Any] = [
    ("accuracyy", ValueError, f"'accuracyy' is unknown{LIST}"),
    ("f1", ValueError, "'f1' is unknown.*or a torchmetrics object"),
    (("mse", {"top_k": 3}), ValueError, "metric 'mse'"),
    (("acc", 3), ValueError, "metric 'acc'"),
    (("acc", {"top_k": 0}), ValueError, "top_k is 0; expected 1 or more"),
    (("acc", {"top_k": 1.5}), ValueError, "metric 'acc' .* top_k is 1.5; expected an int"),
    *((spec, TypeError, "metric is") for spec in (None, {"acc": 1}, ("acc", {}, 1), (3, {}))),
]


def test_wrong_metrics_are_refused() -> None:
    for spec, error, message in REFUSED:
        with pytest.raises(error, match=message):
            create(spec)


@pytest.mark.parametrize("name", ["acc", "ce", "mse"])
def test_wrong_outputs_and_labels_are_refused_with_the_name_of_the_metric(name: str) -> None:
    pair = torch.zeros(2, 2)
    output: Any
    label: Any
    for output, label, error, message in (
        ((pair,), pair, TypeError, "got outputs of type tuple"),
        (pair, {"label": pair}, TypeError, "got labels of type dict"),
        (torch.zeros(4, 2), torch.zeros(3), ValueError, r"got outputs \(4, 2\) for labels \(3,\)|batch_size"),
    ):
        with pytest.raises(error, match=f"'{NAMES[name]}' {message}"):
            create(name).update(label, output, None)
