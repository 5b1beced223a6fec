"""A network whose speed on each context is known, because a layer waits: waiting uses no core."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gangline.models.module import Module


class Wait(nn.Module):
    """Layer that waits for each sample, half of the time in forward and half in backward, and returns its input."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds
        """Time of one sample."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Wait and return ``data``; if it needs a gradient, backward waits as well."""
        output: torch.Tensor = _Waiting.apply(data, self.seconds * len(data) / 2)  # type: ignore[no-untyped-call]
        return output


class _Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class WaitingNetwork(nn.Module):
    """Network of a linear layer, a `Wait` named "wait", and another linear layer."""

    def __init__(self, features: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(features, features)
        self.wait = Wait()
        self.last = nn.Linear(features, classes)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        """Map (samples, features) to (samples, classes)."""
        output: torch.Tensor = self.last(self.wait(self.first(data)))
        return output


def slow_down(module: Module, seconds: Sequence[float]) -> None:
    """Set the seconds per sample of each replica's ``wait`` layer, given for all contexts."""
    for replica in module.bound.replicas.all:
        wait = replica.network.get_submodule("wait")
        if not isinstance(wait, Wait):
            raise TypeError(f"the network's layer 'wait' is a {type(wait).__name__}; expected a Wait")
        wait.seconds = seconds[replica.context_index]
