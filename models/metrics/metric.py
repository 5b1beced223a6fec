"""Metrics with MXNet's interface and names: means over all samples, and the objects of torchmetrics."""

from __future__ import annotations

import abc
import copy
import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gangline.kvstore.errors import did_you_mean
from gangline.models.arguments import check_int

if TYPE_CHECKING:
    import torchmetrics

    from gangline.models.module import Module
    from gangline.models.workers import Workers

_log = logging.getLogger("gangline")
Arguments = Callable[[Any, Any, Any], tuple[Any, ...] | None]
State = list[torch.Tensor]
"""Counts of one device, in a form that is combined over devices and over all workers of a job."""


class EvalMetric(abc.ABC):
    """A metric with MXNet's methods.

    After the first `reset_local` it keeps two values: since `reset` (global) and since `reset_local`.
    """

    @abc.abstractmethod
    def update(self, label: Any, output: Any, module: Module) -> None:
        """Add one batch: its labels, the outputs for it, and the module that computed them."""

    def update_from(self, module: Module, label: Any) -> None:
        """Add the module's last batch, with labels ``label``."""
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

    def counted(self) -> Any:
        """Return the counts since `reset`, for `count_on` in another process; None if this is not supported."""
        return None

    def count_on(self, counted: Any) -> None:  # noqa: B027  never called if `counted` returns None
        """Continue from counts that `counted` returned (not None), after `reset`."""

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
        metric: one of MXNet's names: acc, top_k_accuracy (top_k), ce, nll_loss, perplexity, mae, mse, rmse, loss; or
            one of the other kinds.
        loss: loss of the training. ce and perplexity interpret outputs as it does: logits for CrossEntropyLoss,
            log-probabilities for NLLLoss, else probabilities. Labels that it ignores are not counted.
        unless_in: metrics that are in use elsewhere; objects that occur in them are copied.

    Raises:
        ValueError: if a name or an argument is unknown.
        TypeError: if ``metric`` is none of these.
    """
    if isinstance(metric, EvalMetric):
        return copy.deepcopy(metric) if _is_in(metric, unless_in) else metric
    if isinstance(metric, list):
        return _Composite([create(one, loss, unless_in=unless_in) for one in metric])
    torchmetrics = sys.modules.get("torchmetrics")  # slow to import; a user with such an object has imported it
    if torchmetrics is not None and isinstance(metric, torchmetrics.MetricCollection):
        return _Composite([_torchmetric(one, name) for name, one in metric.items()])
    if torchmetrics is not None and isinstance(metric, torchmetrics.Metric):
        return _torchmetric(metric, type(metric).__name__)
    name, arguments = metric if isinstance(metric, tuple) and len(metric) == 2 else (metric, {})
    if isinstance(name, str):
        known = _BY_NAME.get(name.lower())
        if known is None:
            raise ValueError(
                f"metric {name!r} is unknown;{did_you_mean(name, _BY_NAME)} expected one of {sorted(_BY_NAME)}, or a "
                "torchmetrics object"
            )
        try:
            return known(loss, **arguments)
        except TypeError as error:
            raise ValueError(f"metric {name!r} with {arguments}: {error}") from error
    if callable(name):
        words = getattr(name, "__name__", "custom")
        return _One(
            words,
            lambda label, output, _: (float(name(label, output)), 1),
            parts=lambda module, label: [(label, module.get_outputs())],  # whole batches: it may be no mean
        )
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

    def counted(self) -> Any:
        found = [metric.counted() for metric in self._metrics]
        return None if None in found else found

    def count_on(self, counted: Any) -> None:
        for metric, of_metric in zip(self._metrics, counted, strict=True):
            metric.count_on(of_metric)

    def gather(self, workers: Workers) -> None:
        for metric in self._metrics:
            metric.gather(workers)


class _One(EvalMetric):
    """One metric with a counter per device; the first `reset_local` adds others for the local value."""

    def __init__(
        self,
        name: str,
        arguments: Arguments,
        make: Callable[[Any], _Mean | _TorchMetric] = lambda _: _Mean(),
        finish: Callable[[float], float] = float,
        parts: Callable[[Module, Any], list[tuple[Any, Any]]] = lambda module, _label: module.labelled_outputs(),
    ) -> None:
        """Set up the metric.

        Args:
            name: name of the value.
            arguments: maps (label, output, module) to the arguments of the counter's update(); None: nothing counts.
            make: maps the first of these arguments, in the first batch, to the counter.
            finish: maps the counter's value to the metric's.
            parts: maps the module and the batch's label to the (label, output) that are counted one by one.
        """
        self._name, self._arguments, self._make, self._finish, self._parts = name, arguments, make, finish, parts
        self._global: dict[torch.device | None, _Mean | _TorchMetric] = {}
        self._local: dict[torch.device | None, _Mean | _TorchMetric] | None = None
        self._gathered: float | None = None  # the global value over all workers

    @torch.inference_mode(mode=False)  # a torchmetrics object keeps its sums
    @torch.no_grad()
    def update(self, label: Any, output: Any, module: Module) -> None:
        self._gathered = None
        arguments = self._arguments(label, output, module)
        if arguments is None:
            return
        device = output.device if isinstance(output, torch.Tensor) else None
        for counters in (self._global, self._local):
            if counters is not None:
                if device not in counters:
                    counters[device] = self._make(arguments[0])
                counters[device].update(*arguments)

    def update_from(self, module: Module, label: Any) -> None:
        for labels, output in self._parts(module, label):
            self.update(labels, output, module)

    def get_name_value(self) -> list[tuple[str, float]]:
        return self.get_global_name_value() if self._local is None else [(self._name, self._value(self._local))]

    def get_global_name_value(self) -> list[tuple[str, float]]:
        return [(self._name, self._value(self._global) if self._gathered is None else self._gathered)]

    def _value(
        self, counters: Mapping[torch.device | None, _Mean | _TorchMetric], workers: Workers | None = None
    ) -> float:
        """Return the value over this worker's devices, or over all workers, with the same bits on all."""
        states = [(counter, state) for counter in counters.values() if (state := counter.state())]
        everyones = [state for _, state in states]
        if workers is not None:
            everyones = [state for theirs in workers.all_gather(everyones, "metric") for state in theirs]
        own = self._finish(states[0][0].value(everyones)) if states else None
        values = [own] if workers is None else workers.all_gather(own, "metric")
        return next((float(value) for value in values if value is not None), math.nan)

    def counted(self) -> Any:
        return [self._global, self._local]

    def count_on(self, counted: Any) -> None:
        self._global, self._local = counted

    def gather(self, workers: Workers) -> None:
        if workers.count > 1:
            self._gathered = self._value(self._global, workers)

    def reset(self) -> None:
        self._local, self._gathered = None, None
        for counter in self._global.values():
            counter.reset()

    def reset_local(self) -> None:
        self._local = self._local or {}
        for counter in self._local.values():
            counter.reset()


class _Mean:
    """A sum and its weight, in float64 on the device of the values, so that counting does not wait for a GPU.

    `state` returns what is combined with other counters, nothing if nothing is counted; `value` is over several states,
    one of which is this counter's.
    """

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def update(self, total: torch.Tensor | float, weight: torch.Tensor | float) -> None:
        device = total.device if isinstance(total, torch.Tensor) else "cpu"
        total = torch.as_tensor(total, dtype=torch.float64, device=device)
        weight = weight.double() if isinstance(weight, torch.Tensor) else total.new_full((), weight)
        sums = torch.stack([total, weight])
        self._sums = sums if self._sums is None else self._sums + sums

    def state(self) -> State:
        return [] if self._sums is None else [self._sums]

    def value(self, states: Sequence[State]) -> float:
        total, weight = torch.stack([sums.cpu() for (sums,) in states]).sum(0).tolist()
        return total / weight if weight else math.nan

    def reset(self) -> None:
        self._sums = None


class _TorchMetric:
    """A copy of a user's torchmetrics object on a device; methods as `_Mean`."""

    def __init__(self, metric: torchmetrics.Metric, device: torch.device) -> None:
        self._metric = metric.clone().to(device)
        self.reset()

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self._metric.update(output, label)

    def state(self) -> State:
        if not self._metric.update_called:
            return []
        found: State = []

        def note(tensor: torch.Tensor, group: Any) -> State:  # noqa: ARG001  torchmetrics' signature
            found.append(tensor)
            return [tensor]

        self._metric.clone().sync(dist_sync_fn=note, distributed_available=lambda: True)
        return found

    def value(self, states: Sequence[State]) -> float:
        if len(states) == 1:
            return float(self._metric.compute())
        columns = iter(list(zip(*states, strict=True)))

        def gather(tensor: torch.Tensor, group: Any) -> State:  # noqa: ARG001  torchmetrics' signature
            return [state.to(tensor.device) for state in next(columns)]

        merged = self._metric.clone()
        merged.sync(dist_sync_fn=gather, distributed_available=lambda: True)
        combined = merged.metric_state
        merged.unsync()
        merged.distributed_available_fn = lambda: False  # compute() must not gather again
        merged._computed = None  # drop the cached value: a private attribute, as of torchmetrics 1.4 to 1.9
        for name, state in combined.items():
            setattr(merged, name, state)
        return float(merged.compute())

    def reset(self) -> None:
        self._metric.reset()


def _torchmetric(metric: Any, name: str) -> EvalMetric:
    """Return a metric that copies of the user's torchmetrics object count, updated with (outputs, labels)."""
    return _One(
        name,
        lambda label, output, _: _tensors(name, output, label),
        lambda output: _TorchMetric(metric, output.device),
    )


def _loss_metric(loss: Any) -> EvalMetric:  # noqa: ARG001  the signature of all named metrics
    """Return the mean loss, weighted by its normalizer."""

    def arguments(_label: Any, _output: Any, module: Module) -> tuple[torch.Tensor, float] | None:
        weight = module.normalizer
        return (module.get_loss().double() * weight, weight) if weight else None

    return _One("loss", arguments, parts=lambda _module, label: [(label, None)])


def _tensors(name: str, output: Any, label: Any) -> tuple[torch.Tensor, torch.Tensor]:
    for what, value in (("outputs", output), ("labels", label)):
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"metric {name!r} got {what} of type {type(value).__name__}; expected a tensor (or pass a function)"
            )
    return output, label.to(output.device)


def _accuracy(loss: Any, top_k: int = 1) -> EvalMetric:
    """Return the accuracy over the labels that the loss does not ignore.

    Outputs are (N, C, ...) scores, or one number per label (a class, or the score of class 1), for labels of (N, ...).
    """
    check_int("top_k", top_k)
    name = "accuracy" if top_k == 1 else f"top_k_accuracy_{top_k}"
    ignored = _ignored(loss)
    threshold = 0.0 if isinstance(loss, nn.BCEWithLogitsLoss) else 0.5

    def arguments(label: Any, output: Any, _: Any) -> tuple[torch.Tensor, torch.Tensor | int]:
        output, label = _tensors(name, output, label)
        if isinstance(loss, nn.CrossEntropyLoss) and label.is_floating_point():  # probabilities of the classes
            label = label.argmax(1)
        target = label.reshape(-1, 1).long()
        if output.numel() == label.numel():
            found = (output > threshold if output.is_floating_point() else output).reshape(-1, 1).long()
        elif output.dim() > 1 and output.numel() == label.numel() * output.shape[1]:
            scores = output.movedim(1, -1).reshape(-1, output.shape[1])
            several = top_k > 1
            found = scores.topk(min(top_k, scores.shape[1])).indices if several else scores.argmax(1, keepdim=True)
        else:
            raise ValueError(f"metric {name!r} got outputs {tuple(output.shape)} for labels {tuple(label.shape)}")
        if ignored is None:
            return (found == target).sum(), len(target)
        counts = target != ignored
        return ((found == target) & counts).sum(), counts.sum()

    return _One(name, arguments)


def _log_likelihood(name: str, finish: Callable[[float], float] = float) -> Callable[[Any], EvalMetric]:
    """Return a function that makes the mean negative log-likelihood over the counted labels, mapped by ``finish``."""

    def make(loss: Any) -> EvalMetric:
        ignored = _ignored(loss)

        def arguments(label: Any, output: Any, _: Any) -> tuple[torch.Tensor, torch.Tensor | int]:
            output, label = _tensors(name, output, label)
            if isinstance(loss, nn.CrossEntropyLoss):
                output = output.double().log_softmax(1)
            elif not isinstance(loss, nn.NLLLoss):
                output = output.double().clamp_min(1e-12).log()
            if isinstance(loss, nn.CrossEntropyLoss) and label.is_floating_point():  # probabilities of the classes
                return -(output * label).sum(), output.numel() // output.shape[1]
            keep = -100 if ignored is None else ignored
            target = label.long()
            total = nn.functional.nll_loss(output, target, ignore_index=keep, reduction="sum")
            return total, (target != keep).sum()

        return _One(name, arguments, finish=finish)

    return make


def _error(
    name: str, error: Callable[[torch.Tensor], torch.Tensor], finish: Callable[[float], float] = float
) -> Callable[[Any], EvalMetric]:
    """Return a function that makes the mean of an error of each number, mapped by ``finish``."""

    def arguments(label: Any, output: Any, _: Any) -> tuple[torch.Tensor, int]:
        output, label = _tensors(name, output, label)
        if output.numel() != label.numel():
            raise ValueError(f"metric {name!r} got outputs {tuple(output.shape)} for labels {tuple(label.shape)}")
        dtype = torch.promote_types(torch.promote_types(output.dtype, label.dtype), torch.float32)
        difference = output.reshape(-1).to(dtype) - label.reshape(-1).to(dtype)
        return error(difference).sum(dtype=torch.float64), label.numel()

    return lambda _loss: _One(name, arguments, finish=finish)


def _ignored(loss: Any) -> int | None:
    return loss.ignore_index if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) else None


_BY_NAME: dict[str, Callable[..., EvalMetric]] = {
    "acc": _accuracy,
    "accuracy": _accuracy,
    "ce": _log_likelihood("cross-entropy"),
    "cross-entropy": _log_likelihood("cross-entropy"),
    "loss": _loss_metric,
    "mae": _error("mae", torch.abs),
    "mse": _error("mse", torch.square),
    "nll_loss": _log_likelihood("nll-loss"),
    # infinite where math.exp raises
    "perplexity": _log_likelihood(
        "perplexity", lambda mean: float(torch.tensor(mean, dtype=torch.float64, device="cpu").exp())
    ),
    "rmse": _error("rmse", torch.square, math.sqrt),
    "top_k_acc": partial(_accuracy, top_k=5),
    "top_k_accuracy": partial(_accuracy, top_k=5),
}


def reported_name(metric: str) -> str:
    """Return the reported name of a metric, such as "accuracy" for "acc"."""
    return create(metric).get_name_value()[0][0] if metric in _BY_NAME else metric


create_metric = create  # the name outside of this package, which has other functions called create
