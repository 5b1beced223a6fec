"""Metrics with MXNet's interface and names, computed by torchmetrics."""

from __future__ import annotations

import abc
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gangline.models.metrics.sync import merged, value_over

if TYPE_CHECKING:
    import torchmetrics

    from gangline.models.module import Module
    from gangline.models.workers import Workers

_log = logging.getLogger("gangline")
Arguments = Callable[[Any, Any, Any], tuple[Any, ...] | None]


class EvalMetric(abc.ABC):
    """A metric with MXNet's methods.

    After the first `reset_local` it keeps two values: since `reset` (global) and since `reset_local`.
    """

    @abc.abstractmethod
    def update(self, label: Any, output: Any, module: Module) -> None:
        """Add one batch: its labels, the outputs for it, and the module that computed them."""

    def update_from(self, module: Module, label: Any) -> None:
        """Add the batch that the module has run last, whose labels are ``label``."""
        self.update(label, module.get_outputs(), module)

    @abc.abstractmethod
    def get_name_value(self) -> list[tuple[str, float]]:
        """Return (name, value) over the batches since `reset_local`; NaN if there are none."""

    @abc.abstractmethod
    def get_global_name_value(self) -> list[tuple[str, float]]:
        """Return (name, value) over the batches since `reset`; NaN if there are none."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Clear both values."""

    @abc.abstractmethod
    def reset_local(self) -> None:
        """Clear the value of `get_name_value` only."""

    def gather(self, workers: Workers) -> None:
        """Combine the global value over all workers, until the next `update` or `reset`.

        Collective: all workers must call it. A user's metric without this method keeps each worker's own value.
        """
        if workers.count > 1:
            _log.warning("%s has no gather(): each worker reports its own value", type(self).__name__)


def create(metric: Any, loss: Any = None, *, unless_in: Any = None) -> EvalMetric:
    """Return the metric for a name, (name, arguments), torchmetrics object, function of (label, output), or a list.

    A MetricCollection is a list of its metrics under the names it gives them.

    Args:
        metric: one of MXNet's names: acc, top_k_accuracy (top_k), ce, nll_loss, perplexity, mae, mse, rmse, f1, mcc,
            pcc, pearsonr, loss; or one of the other kinds.
        loss: loss of the training. ce and perplexity interpret outputs as it does: logits for CrossEntropyLoss,
            log-probabilities for NLLLoss, else probabilities. Labels that it ignores are not counted.
        unless_in: a metric, or a list of them, that counts something else: objects in it are copied.

    Raises:
        ValueError: if a name or an argument is unknown.
        TypeError: if ``metric`` is none of these.
    """
    import torchmetrics

    if isinstance(metric, EvalMetric):
        return copy.deepcopy(metric) if _is_in(metric, unless_in) else metric
    if isinstance(metric, list):
        return _Composite([create(one, loss, unless_in=unless_in) for one in metric])
    if isinstance(metric, torchmetrics.MetricCollection):
        return _Composite([_torchmetric(one, name) for name, one in metric.items()])
    if isinstance(metric, torchmetrics.Metric):
        return _torchmetric(metric, type(metric).__name__)
    name, arguments = metric if isinstance(metric, tuple) and len(metric) == 2 else (metric, {})
    if isinstance(name, str):
        known = _BY_NAME.get(name.lower())
        if known is None:
            raise ValueError(
                f"metric {name!r} is unknown; expected one of {sorted(_BY_NAME)}, or a torchmetrics object"
            )
        try:
            return known(loss, **arguments)
        except TypeError as error:
            raise ValueError(f"metric {name!r} with {arguments}: {error}") from error
    if callable(name):
        words = getattr(name, "__name__", "custom")
        return _OfBatches(words, lambda label, output, _: (float(name(label, output)), 1), _mean)
    raise TypeError(f"metric is {metric!r}; expected a name, a torchmetrics object, a function, or a list of these")


def _is_in(metric: EvalMetric, given: Any) -> bool:
    return any(_is_in(metric, one) for one in given) if isinstance(given, list) else metric is given


class _Composite(EvalMetric):
    def __init__(self, metrics: Sequence[EvalMetric]) -> None:
        self._metrics = metrics

    def update(self, label: Any, output: Any, module: Module) -> None:
        for metric in self._metrics:
            metric.update(label, output, module)

    def update_from(self, module: Module, label: Any) -> None:
        for metric in self._metrics:
            metric.update_from(module, label)

    def get_name_value(self) -> list[tuple[str, float]]:
        return [pair for metric in self._metrics for pair in metric.get_name_value()]

    def get_global_name_value(self) -> list[tuple[str, float]]:
        return [pair for metric in self._metrics for pair in metric.get_global_name_value()]

    def reset(self) -> None:
        for metric in self._metrics:
            metric.reset()

    def reset_local(self) -> None:
        for metric in self._metrics:
            metric.reset_local()

    def gather(self, workers: Workers) -> None:
        for metric in self._metrics:
            metric.gather(workers)


class _One(EvalMetric):
    """One metric in a torchmetrics object per device; the first `reset_local` adds others for the local value."""

    def __init__(
        self,
        name: str,
        arguments: Arguments,
        make: Callable[[Any], torchmetrics.Metric],
        finish: Callable[[float], float] = float,
    ) -> None:
        """Set up the metric.

        Args:
            name: name of the value.
            arguments: function from (label, output, module) to the arguments of the torchmetrics object's update();
                None if the batch has nothing to count.
            make: function from the first of these arguments, in the first batch, to the torchmetrics object.
            finish: function from the torchmetrics object's value to the metric's.
        """
        self._name, self._arguments, self._make, self._finish = name, arguments, make, finish
        self._global: dict[torch.device | None, torchmetrics.Metric] = {}
        self._local: dict[torch.device | None, torchmetrics.Metric] | None = None
        self._gathered: float | None = None  # the global value over all workers

    def update(self, label: Any, output: Any, module: Module) -> None:
        self._gathered = None
        arguments = self._arguments(label, output, module)
        if arguments is None:
            return
        device = output.device if isinstance(output, torch.Tensor) else None
        for metrics in (self._global, self._local):
            if metrics is not None:
                if device not in metrics:
                    metrics[device] = self._make(arguments[0])
                metrics[device].update(*arguments)

    def update_from(self, module: Module, label: Any) -> None:  # noqa: ARG002
        for labels, output in module.labelled_outputs():
            self.update(labels, output, module)

    def get_name_value(self) -> list[tuple[str, float]]:
        return self.get_global_name_value() if self._local is None else [(self._name, self._value(self._local))]

    def get_global_name_value(self) -> list[tuple[str, float]]:
        return [(self._name, self._value(self._global) if self._gathered is None else self._gathered)]

    def _value(self, metrics: Mapping[torch.device | None, torchmetrics.Metric]) -> float:
        counted = _counted(metrics)
        return float("nan") if counted is None else self._finish(float(counted.compute()))

    def gather(self, workers: Workers) -> None:
        if workers.count > 1:
            self._gathered = value_over(workers, _counted(self._global), self._finish)

    def reset(self) -> None:
        self._local, self._gathered = None, None
        for metric in self._global.values():
            metric.reset()

    def reset_local(self) -> None:
        self._local = self._local or {}
        for metric in self._local.values():
            metric.reset()


def _counted(metrics: Mapping[torch.device | None, torchmetrics.Metric]) -> torchmetrics.Metric | None:
    """Return the state of all metrics that have counted something; None if none has."""
    counted = [metric for metric in metrics.values() if metric.update_called]
    return merged(counted) if counted else None


class _OfBatches(_One):
    """A metric of whole batches, such as their largest error."""

    def update_from(self, module: Module, label: Any) -> None:
        self.update(label, module.get_outputs(), module)


class _OfLoss(_One):
    """A metric of the module's loss, which needs no outputs."""

    def update_from(self, module: Module, label: Any) -> None:
        self.update(label, None, module)


def _torchmetric(metric: torchmetrics.Metric, name: str) -> EvalMetric:
    """Return clones of the user's torchmetrics object, updated with (outputs, labels)."""

    def make(output: torch.Tensor) -> torchmetrics.Metric:
        clone = metric.clone().to(output.device)
        clone.reset()
        return clone

    return _One(name, lambda label, output, _: _tensors(name, output, label), make)


def _named(
    name: str,
    make: Callable[[torch.Tensor], torchmetrics.Metric],
    prepare: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> EvalMetric:
    """Return a torchmetrics metric under MXNet's name.

    Args:
        name: MXNet's name.
        make: function from the first batch's prepared outputs to the torchmetrics object.
        prepare: function from (outputs, labels) to the arguments of update(); it drops labels not to be counted.
    """

    def arguments(label: Any, output: Any, _: Module) -> tuple[Any, ...] | None:
        prepared = prepare(*_tensors(name, output, label))
        return prepared if prepared[1].numel() else None

    return _One(name, arguments, lambda outputs: make(outputs).to(outputs.device))


def _loss_metric(loss: Any) -> EvalMetric:  # noqa: ARG001  the signature of all named metrics
    """Return the mean loss, weighted by its normalizer."""
    return _OfLoss(
        "loss",
        lambda _label, _output, module: (float(module.get_loss()), module.normalizer) if module.normalizer else None,
        _mean,
    )


def _mean(_: Any) -> torchmetrics.Metric:
    """Return a weighted mean of numbers."""
    from torchmetrics.aggregation import MeanMetric

    metric = MeanMetric(nan_strategy=float("nan"))  # nan_strategy="disable" would drop the weights
    return metric.set_dtype(torch.float64)


def _tensors(name: str, output: Any, label: Any) -> tuple[torch.Tensor, torch.Tensor]:
    for what, value in (("outputs", output), ("labels", label)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"metric {name!r} got {what} of type {type(value).__name__}; expected a tensor (or pass a function)"
            )
    return output, label.to(output.device)


def _by_class(name: str, loss: Any, two: bool = False) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that prepares (outputs, labels) for class metrics.

    It maps outputs of (N, C, ...) scores, or one number per label (a class, or the score of class 1), and labels of
    (N, ...) to (M, C) scores or (M,) classes, and (M,) labels, without labels that the loss ignores.
    """
    ignored = _ignored(loss)
    threshold = 0.0 if isinstance(loss, nn.BCEWithLogitsLoss) else 0.5

    def prepare(output: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(loss, nn.CrossEntropyLoss) and label.is_floating_point():  # probabilities of the classes
            label = label.argmax(1)
        if output.numel() == label.numel():
            found = (output > threshold if output.is_floating_point() else output).reshape(-1).long()
        elif output.dim() > 1 and output.numel() == label.numel() * output.shape[1]:
            found = output.movedim(1, -1).reshape(-1, output.shape[1])
            if two and output.shape[1] == 2:
                found = found.argmax(1)
        else:
            raise ValueError(f"metric {name!r} got outputs {tuple(output.shape)} for labels {tuple(label.shape)}")
        if two and found.dim() > 1:
            raise ValueError(f"metric {name!r} is for two classes, but the outputs are {tuple(output.shape)}")
        target = label.reshape(-1).long()
        if ignored is None:
            return found, target
        keep = target != ignored
        return found[keep], target[keep]

    return prepare


def _classes(prepared: torch.Tensor) -> int:
    return prepared.shape[1] if prepared.dim() > 1 else 2


def _accuracy(loss: Any, top_k: int = 1) -> EvalMetric:
    from torchmetrics.classification import MulticlassAccuracy

    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise ValueError(f"top_k is {top_k!r}; expected an int, 1 or more")
    name = "accuracy" if top_k == 1 else f"top_k_accuracy_{top_k}"

    def make(prepared: torch.Tensor) -> torchmetrics.Metric:
        classes = max(_classes(prepared), 2)
        k = min(top_k, classes) if prepared.dim() > 1 else 1
        return MulticlassAccuracy(classes, top_k=k, average="micro", validate_args=False)

    return _named(name, make, _by_class(name, loss))


def _log_likelihood(name: str, finish: Callable[[float], float] = float) -> Callable[[Any], EvalMetric]:
    """Return a function that makes the mean negative log-likelihood over the counted labels, mapped by ``finish``."""

    def make(loss: Any) -> EvalMetric:
        ignored = _ignored(loss)

        def arguments(label: Any, output: Any, _: Any) -> tuple[float, int] | None:
            output, label = _tensors(name, output, label)
            if isinstance(loss, nn.CrossEntropyLoss):
                output = output.double().log_softmax(1)
            elif not isinstance(loss, nn.NLLLoss):
                output = output.double().clamp_min(1e-12).log()
            if isinstance(loss, nn.CrossEntropyLoss) and label.is_floating_point():  # probabilities of the classes
                counted = output.numel() // output.shape[1]
                total = -(output * label).sum()
            else:
                keep = -100 if ignored is None else ignored
                target = label.long()
                counted = int((target != keep).sum())
                total = nn.functional.nll_loss(output, target, ignore_index=keep, reduction="sum")
            return (float(total / counted), counted) if counted else None

        return _One(name, arguments, _mean, finish)

    return make


def _exp(mean: float) -> float:
    return float(torch.tensor(mean, dtype=torch.float64).exp())  # infinite where math.exp raises


def _regression(name: str, torchmetrics_name: str, **options: Any) -> Callable[[Any], EvalMetric]:
    def make(loss: Any) -> EvalMetric:  # noqa: ARG001  the signature of all named metrics
        import torchmetrics.regression as regression

        return _named(name, lambda _: getattr(regression, torchmetrics_name)(**options), _by_number(name))

    return make


def _by_number(name: str) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that flattens outputs and labels and promotes them to at least float32."""

    def prepare(output: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if output.numel() != label.numel():
            raise ValueError(f"metric {name!r} got outputs {tuple(output.shape)} for labels {tuple(label.shape)}")
        dtype = torch.promote_types(torch.promote_types(output.dtype, label.dtype), torch.float32)
        return output.reshape(-1).to(dtype), label.reshape(-1).to(dtype)

    return prepare


def _of_classes(name: str, torchmetrics_name: str, *, two: bool) -> Callable[[Any], EvalMetric]:
    def make(loss: Any) -> EvalMetric:
        import torchmetrics.classification as classification

        kind = getattr(classification, torchmetrics_name)

        def of(prepared: torch.Tensor) -> Any:
            return kind(validate_args=False) if two else kind(_classes(prepared), validate_args=False)

        return _named(name, of, _by_class(name, loss, two))

    return make


def _ignored(loss: Any) -> int | None:
    return loss.ignore_index if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) else None


_BY_NAME: dict[str, Callable[..., EvalMetric]] = {
    "acc": _accuracy,
    "accuracy": _accuracy,
    "ce": _log_likelihood("cross-entropy"),
    "cross-entropy": _log_likelihood("cross-entropy"),
    "f1": _of_classes("f1", "BinaryF1Score", two=True),
    "loss": _loss_metric,
    "mae": _regression("mae", "MeanAbsoluteError"),
    "mcc": _of_classes("mcc", "BinaryMatthewsCorrCoef", two=True),
    "mse": _regression("mse", "MeanSquaredError"),
    "nll_loss": _log_likelihood("nll-loss"),
    "pcc": _of_classes("pcc", "MulticlassMatthewsCorrCoef", two=False),
    "pearsonr": _regression("pearsonr", "PearsonCorrCoef"),
    "perplexity": _log_likelihood("perplexity", _exp),
    "rmse": _regression("rmse", "MeanSquaredError", squared=False),
    "top_k_acc": partial(_accuracy, top_k=5),
    "top_k_accuracy": partial(_accuracy, top_k=5),
}


create_metric = create  # the name outside of this package, which has other functions called create
