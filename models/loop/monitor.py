"""Monitor: statistics of outputs, weights and gradients by name, as MXNet's class of that name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from gangline.models.arguments import check_int
from gangline.models.data.batches import tensors_of
from gangline.models.names import parameters_of, plain_name

_log = logging.getLogger("gangline")


def _scaled_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm divided by the square root of the number of elements, MXNet's statistic."""
    norm: torch.Tensor = torch.linalg.vector_norm(tensor.double())
    return norm.div(max(tensor.numel(), 1) ** 0.5)


class Monitor:
    """Logs statistics of a network's tensors in every ``interval``-th update of `fit`.

    Names are LAYER_output (LAYER_output0 and so on for several outputs), PARAMETER and PARAMETER_grad. Values are from
    the first context: outputs of its share of the batch, and its local gradient before reduction. In a job rank 0 logs.
    """

    def __init__(
        self,
        interval: int,
        stat_func: Callable[[torch.Tensor], Any] | None = None,
        pattern: str = ".*",
        sort: bool = False,
    ) -> None:
        """Select the observed tensors and the interval.

        Args:
            interval: number of updates between observations; the first update is observed.
            stat_func: function from a tensor, on its device, to the statistic; None: the L2 norm divided by the square
                root of the number of elements.
            pattern: regular expression matched at the start of names.
            sort: sort by name; else in the order of computation.

        Raises:
            ValueError: if the interval is below 1, or the pattern is not a regular expression.
        """
        check_int("interval", interval)
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern is {pattern!r}, which is not a regular expression: {error}") from error
        self.interval, self.sort = interval, sort
        self._stat = stat_func or _scaled_norm
        self._network: nn.Module | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._reports = True
        self.step = 0
        """Number of updates so far."""
        self._found: list[tuple[str, Any]] = []
        self._observes = False

    def install(self, network: nn.Module, *, reports: bool = True) -> None:
        """Observe a network instead of the previous one; `fit` calls this.

        Args:
            network: network whose leaf layers are observed.
            reports: True if this process logs.
        """
        self.close()
        self._network, self._reports = network, reports
        for name, layer in network.named_modules():
            if name and not any(layer.children()) and self._reports:
                self._hooks.append(layer.register_forward_hook(partial(self._note_output, plain_name(name))))

    def tic(self) -> None:
        """Start an update."""
        self._observes = self._reports and self.step % self.interval == 0
        self.step += 1
        self._found = []

    def toc(self) -> list[tuple[int, str, Any]]:
        """End an update; return (update, name, statistic) per tensor, an empty list if the update was not observed."""
        if not self._observes or self._network is None:
            return []
        for name, parameter in parameters_of(self._network).items():
            self._note(name, parameter)
            if parameter.grad is not None:
                self._note(f"{name}_grad", parameter.grad)
        self._observes = False
        found = sorted(self._found, key=lambda pair: pair[0]) if self.sort else self._found
        self._found = []
        return [(self.step, name, value) for name, value in found]

    def toc_print(self) -> None:
        """End an update and log what `toc` returns."""
        for step, name, value in self.toc():
            shown = f"{value.item():g}" if isinstance(value, torch.Tensor) and value.numel() == 1 else str(value)
            _log.info("Batch: %7d %30s %s", step, name, shown)

    def close(self) -> None:
        """Remove the hooks; `fit` calls this when it ends."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note_output(self, name: str, layer: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG002  a forward hook's signature
        if self._observes:
            tensors = tensors_of(output)
            for number, tensor in enumerate(tensors):
                self._note(f"{name}_output{number if len(tensors) > 1 else ''}", tensor)

    @torch.no_grad()
    def _note(self, name: str, tensor: torch.Tensor) -> None:
        if self._pattern.match(name):
            dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
            self._found.append((name, self._stat(dense)))
