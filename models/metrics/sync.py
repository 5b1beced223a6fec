"""Combination of torchmetrics states over devices, and over all workers of a job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gangline.models.workers import Workers

if TYPE_CHECKING:
    import torchmetrics


def value_over(workers: Workers, metric: torchmetrics.Metric | None, finish: Callable[[float], float]) -> float:
    """Return the metric over all workers' states, the same bits on all; NaN if no worker has counted anything.

    Collective: all workers must call it.

    Args:
        workers: workers of the job.
        metric: this worker's metric, whose state does not change; None if it has counted nothing.
        finish: function from the metric's value to the result.
    """
    exchanged = workers.all_gather(_states(metric) if metric is not None else None, "metric")
    states = [state for state in exchanged if state is not None]
    own = finish(float(_merge(metric, states).compute())) if metric is not None else None
    values = [value for value in workers.all_gather(own, "metric") if value is not None]
    return float(values[0]) if values else float("nan")


def merged(metrics: Sequence[torchmetrics.Metric]) -> torchmetrics.Metric:
    """Return a metric with the combined state of all of these, which may be on different devices."""
    return metrics[0] if len(metrics) == 1 else _merge(metrics[0], [_states(metric) for metric in metrics])


def _states(metric: torchmetrics.Metric) -> list[torch.Tensor]:
    """Return the tensors that a torchmetrics object would gather from other processes, in its order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:  # noqa: ARG001  torchmetrics' signature
        found.append(tensor)
        return [tensor]

    metric.clone().sync(dist_sync_fn=note, distributed_available=lambda: True)
    return found


def _merge(metric: torchmetrics.Metric, states: Sequence[Sequence[torch.Tensor]]) -> torchmetrics.Metric:
    """Return a torchmetrics object with the combined state of several, whose `_states` are given."""
    columns = iter(list(zip(*states, strict=True)))

    def gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:  # noqa: ARG001  torchmetrics' signature
        return [state.to(tensor.device) for state in next(columns)]

    merged = metric.clone()
    merged.sync(dist_sync_fn=gather, distributed_available=lambda: True)
    combined = merged.metric_state
    merged.unsync()
    merged.distributed_available_fn = lambda: False  # compute() must not gather again
    merged._computed = None  # drop the cached value: a private attribute, as of torchmetrics 1.4 to 1.9
    for name, state in combined.items():
        setattr(merged, name, state)
    return merged
