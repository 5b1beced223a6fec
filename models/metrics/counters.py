"""What a metric has counted on one device, in a form that is combined over devices and over all workers of a job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torchmetrics

State = list[torch.Tensor]


class Mean:
    """A sum and its weight, in float64 on the device of the values, so that counting does not wait for a GPU."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None

    def update(self, total: torch.Tensor | float, weight: torch.Tensor | float) -> None:
        """Add a sum of values, and its weight."""
        total = torch.as_tensor(total, dtype=torch.float64)
        weight = weight.double() if isinstance(weight, torch.Tensor) else total.new_full((), weight)
        sums = torch.stack([total, weight])
        self._sums = sums if self._sums is None else self._sums + sums

    def state(self) -> State:
        """Return the tensors to combine with those of other counters; none if nothing is counted."""
        return [] if self._sums is None else [self._sums]

    def value(self, states: Sequence[State]) -> float:
        """Return the mean over several states, one of which is this one's."""
        total, weight = torch.stack([sums.cpu() for (sums,) in states]).sum(0).tolist()
        return total / weight if weight else math.nan

    def reset(self) -> None:
        """Start anew."""
        self._sums = None


class TorchMetric:
    """A torchmetrics object."""

    def __init__(self, metric: torchmetrics.Metric, device: torch.device) -> None:
        """Copy a user's object to a device, without what it has counted."""
        self._metric = metric.clone().to(device)
        self.reset()

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        """Add a batch."""
        self._metric.update(output, label)

    def state(self) -> State:
        """Return the tensors to combine with those of other counters; none if nothing is counted."""
        if not self._metric.update_called:
            return []
        found: State = []

        def note(tensor: torch.Tensor, group: Any) -> State:  # noqa: ARG001  torchmetrics' signature
            found.append(tensor)
            return [tensor]

        self._metric.clone().sync(dist_sync_fn=note, distributed_available=lambda: True)
        return found

    def value(self, states: Sequence[State]) -> float:
        """Return the metric of several states, one of which is this one's."""
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
        """Start anew."""
        self._metric.reset()
