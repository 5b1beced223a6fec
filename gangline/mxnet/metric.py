"""`mx.metric`: running metrics of lists of labels and predictions (probabilities, as of SoftmaxOutput)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class EvalMetric:
    """Mean of what ``measure`` gives for a label and a prediction: a sum, and the number that it is of."""

    def __init__(self, name: str, measure: Callable[[Tensor, Tensor], tuple[float, float]], root: bool = False) -> None:
        self.name, self._measure, self._root = name, measure, root
        self.reset()

    def reset(self) -> None:
        """Begin again."""
        self._totals = [0.0, 0.0]
        self.reset_local()

    def reset_local(self) -> None:
        """Begin again but for the values of `get_global_name_value`."""
        self.sum_metric, self.num_inst = 0.0, 0.0

    @torch.no_grad()
    def update(self, labels: Sequence[Tensor], preds: Sequence[Tensor]) -> None:
        """Count a batch.

        Raises:
            ValueError: if there is another number of labels than of predictions.
        """
        for label, pred in zip(labels, preds, strict=True):
            total, count = self._measure(_plain(label), _plain(pred))
            self.sum_metric += float(total)
            self.num_inst += count
            self._totals = [self._totals[0] + float(total), self._totals[1] + count]

    def get(self) -> tuple[Any, Any]:
        """Return the name and the value; NaN before the first batch."""
        return self.name, self._value(self.sum_metric, self.num_inst)

    def _value(self, total: float, count: float) -> float:
        value = total / count if count else math.nan
        return math.sqrt(value) if self._root else value

    def get_name_value(self) -> list[tuple[str, float]]:
        """Return pairs of names and values."""
        return [self.get()]

    def get_global_name_value(self) -> list[tuple[str, float]]:
        """Return pairs of names and values since the last `reset`."""
        return [(self.name, self._value(*self._totals))]


class CompositeEvalMetric(EvalMetric):
    """Several metrics."""

    def __init__(self, metrics: Sequence[Any] = ()) -> None:
        self.metrics = [create(one) for one in metrics]

    def add(self, metric: Any) -> None:
        """Add a metric."""
        self.metrics.append(create(metric))

    def reset(self) -> None:  # noqa: D102  inherited
        for one in self.metrics:
            one.reset()

    def reset_local(self) -> None:  # noqa: D102  inherited
        for one in self.metrics:
            one.reset_local()

    def update(self, labels: Sequence[Tensor], preds: Sequence[Tensor]) -> None:  # noqa: D102  inherited
        for one in self.metrics:
            one.update(labels, preds)

    def get(self) -> tuple[Any, Any]:  # noqa: D102  inherited
        pairs = self.get_name_value()
        return [name for name, _ in pairs], [value for _, value in pairs]

    def get_name_value(self) -> list[tuple[str, float]]:  # noqa: D102  inherited
        return [pair for one in self.metrics for pair in one.get_name_value()]

    def get_global_name_value(self) -> list[tuple[str, float]]:  # noqa: D102  inherited
        return [pair for one in self.metrics for pair in one.get_global_name_value()]


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(torch.Tensor)


def _hits(label: Tensor, pred: Tensor) -> tuple[float, float]:
    classes = pred.argmax(1) if pred.dim() > label.dim() else pred
    return float((classes.flatten() == label.to(classes.device).flatten()).sum()), label.numel()


def _log_loss(label: Tensor, pred: Tensor) -> tuple[float, float]:
    chosen = pred.flatten(0, -2).gather(1, label.to(pred.device).long().view(-1, 1)).double()
    return float(-(chosen + 1e-12).log().sum()), label.numel()


def _distance(power: int) -> Callable[[Tensor, Tensor], tuple[float, float]]:
    """Return the mean over a batch's elements of a power of the distance; batches count the same."""
    return lambda label, pred: (float((label.view(pred.shape) - pred).abs().pow(power).mean()), 1)


def Accuracy() -> EvalMetric:  # noqa: N802  MXNet's names, also below
    """Return the share of samples whose most probable class is the label."""
    return EvalMetric("accuracy", _hits)


def TopKAccuracy(top_k: int = 1) -> EvalMetric:  # noqa: N802
    """Return the share of samples whose label is among the ``top_k`` most probable classes."""

    def hits(label: Tensor, pred: Tensor) -> tuple[float, float]:
        return float((pred.topk(top_k, 1).indices == label.to(pred.device).view(-1, 1)).sum()), label.numel()

    return EvalMetric(f"top_k_accuracy_{top_k}", hits)


def CrossEntropy() -> EvalMetric:  # noqa: N802
    """Return the mean of -log of the label's probability."""
    return EvalMetric("cross-entropy", _log_loss)


def MAE() -> EvalMetric:  # noqa: N802
    """Return the mean absolute error."""
    return EvalMetric("mae", _distance(1))


def MSE() -> EvalMetric:  # noqa: N802
    """Return the mean squared error."""
    return EvalMetric("mse", _distance(2))


def RMSE() -> EvalMetric:  # noqa: N802
    """Return the root of the mean squared error."""
    return EvalMetric("rmse", _distance(2), root=True)


def Loss() -> EvalMetric:  # noqa: N802
    """Return the mean of the predictions, which are losses."""
    return EvalMetric("loss", lambda _, pred: (float(pred.sum()), pred.numel()))


def CustomMetric(feval: Callable[..., Any], name: str | None = None) -> EvalMetric:  # noqa: N802
    """Return the mean of ``feval(label, pred)`` of numpy arrays: a number, or (sum, count)."""

    def measure(label: Tensor, pred: Tensor) -> tuple[float, float]:
        found = feval(label.cpu().numpy(), pred.cpu().numpy())
        return found if isinstance(found, tuple) else (found, 1)

    return EvalMetric(name or feval.__name__, measure)


np = CustomMetric
_NAMED = {
    "acc": Accuracy, "accuracy": Accuracy, "top_k_accuracy": TopKAccuracy, "top_k_acc": TopKAccuracy,
    "ce": CrossEntropy, "cross-entropy": CrossEntropy, "mae": MAE, "mse": MSE, "rmse": RMSE, "loss": Loss,
}  # fmt: skip


def create(metric: Any, **options: Any) -> EvalMetric:
    """Return a metric by name, of a function, of a list, or itself.

    Raises:
        ValueError: if no metric has the name.
    """
    if isinstance(metric, EvalMetric):
        return metric
    if isinstance(metric, (list, tuple)):
        return CompositeEvalMetric(metric)
    if callable(metric):
        return CustomMetric(metric, **options)
    if metric not in _NAMED:
        raise ValueError(f"metric is {metric!r}; expected one of {', '.join(_NAMED)}, or a function of (label, pred)")
    return _NAMED[metric](**options)
