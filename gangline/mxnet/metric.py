"""`mx.metric`: gangline's metrics, of lists of labels and predictions (probabilities, as of SoftmaxOutput)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from gangline.models.metrics import metric as metrics


class EvalMetric:
    """A metric, or several, with ``reset``, ``reset_local``, ``get_name_value`` and ``get_global_name_value``."""

    def __init__(self, metric: metrics.EvalMetric) -> None:
        self._metric = metric

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metric, name)

    def update(self, labels: Sequence[Tensor], preds: Sequence[Tensor]) -> None:
        """Count a batch.

        Raises:
            ValueError: if there is another number of labels than of predictions.
        """
        for label, pred in zip(labels, preds, strict=True):
            label, pred = (one.detach().as_subclass(Tensor) for one in (label, pred))
            if label.numel() == pred.numel():
                label = label.view(pred.shape)
            elif label.is_floating_point():  # MXNet's classes are float32
                label = label.long()
            self._metric.update(label, pred, None)  # type: ignore[arg-type]  # a module that none of them reads

    def get(self) -> tuple[Any, Any]:
        """Return the name and the value, NaN before the first batch; lists of them of several metrics."""
        pairs = self._metric.get_name_value()
        names, values = [name for name, _ in pairs], [value for _, value in pairs]
        return (names[0], values[0]) if len(pairs) == 1 else (names, values)


def create(metric: Any, **options: Any) -> EvalMetric:
    """Return a metric by MXNet's name, of a function, of a list, or itself.

    Raises:
        ValueError: if no metric has the name, or an option is unknown.
    """
    if isinstance(metric, EvalMetric):
        return metric
    if isinstance(metric, (list, tuple)):
        return EvalMetric(metrics.create([create(one)._metric for one in metric]))
    if callable(metric):
        return CustomMetric(metric, **options)
    return EvalMetric(metrics.create((metric, options)))


def CustomMetric(feval: Callable[..., float], name: str | None = None) -> EvalMetric:  # noqa: N802  MXNet's name
    """Return the mean over batches of ``feval(label, pred)`` of numpy arrays."""

    def measure(label: Tensor, pred: Tensor) -> float:
        return float(feval(label.cpu().numpy(), pred.cpu().numpy()))

    measure.__name__ = name or feval.__name__
    return EvalMetric(metrics.create(measure))


np, CompositeEvalMetric = CustomMetric, create
Accuracy, TopKAccuracy, CrossEntropy, Perplexity, MAE, MSE, RMSE, Loss = (
    partial(create, name) for name in ("acc", "top_k_accuracy", "ce", "perplexity", "mae", "mse", "rmse", "loss")
)
