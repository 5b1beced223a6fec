"""The value of a torchmetrics object over what all workers of a job have counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gangline.models.workers import Workers

if TYPE_CHECKING:
    import torchmetrics


def value_over(workers: Workers, metric: torchmetrics.Metric | None, finish: Callable[[float], float]) -> float:
    """What the metric computes of all workers' states together, the same bits on all; NaN if none has counted.

    A collective.

    Args:
        workers: of the job.
        metric: this worker's, which keeps its state; None where it has counted nothing.
        finish: what is made of the value.
    """
    everybody = workers.exchange(_states(metric) if metric is not None else None)
    parts = [part for part in everybody if part is not None]
    own = finish(float(_merged(metric, parts).compute())) if metric is not None else None
    values = [value for value in workers.exchange(own) if value is not None]
    return float(values[0]) if values else float("nan")


def _states(metric: torchmetrics.Metric) -> list[torch.Tensor]:
    """The tensors that a torchmetrics object would gather from other processes, in its order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:  # noqa: ARG001  torchmetrics' signature
        found.append(tensor)
        return [tensor]

    metric.clone().sync(dist_sync_fn=note, distributed_available=lambda: True)
    return found


def _merged(metric: torchmetrics.Metric, parts: Sequence[Sequence[torch.Tensor]]) -> torchmetrics.Metric:
    """A torchmetrics object that has counted what all have that ``parts`` are the `_states` of."""
    columns = iter(list(zip(*parts, strict=True)))

    def gather(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:  # noqa: ARG001  torchmetrics' signature
        return [part.to(tensor.device) for part in next(columns)]

    merged = metric.clone()
    merged.sync(dist_sync_fn=gather, distributed_available=lambda: True)
    states = merged.metric_state
    merged.unsync()
    merged.distributed_available_fn = lambda: False  # it has what others counted, and asks nobody when it computes
    merged._computed = None  # the value it may have computed before
    for name, state in states.items():
        setattr(merged, name, state)
    return merged
