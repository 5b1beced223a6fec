"""Monitor: statistics of outputs, weights and gradients by name, every so many batches; after MXNet's."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from gangline.models.data.batches import tensors_of

_log = logging.getLogger("gangline")


def _size(tensor: torch.Tensor) -> torch.Tensor:
    """MXNet's: the L2 norm over the root of the number of elements."""
    norm: torch.Tensor = torch.linalg.vector_norm(tensor.double())
    return norm.div(max(tensor.numel(), 1) ** 0.5)


class Monitor:
    """Logs what goes through a network in every ``interval``-th update, as `fit` trains it.

    Names are a layer's with ``_output`` (``_output0`` and so on where there are several), a parameter's, and a
    parameter's with ``_grad``. What is seen is the first context's: its share of the batch, and the gradient as the
    update has left it there, which in a store's hands is that context's part of the sum. In a job rank 0 logs.
    """

    def __init__(
        self,
        interval: int,
        stat_func: Callable[[torch.Tensor], Any] | None = None,
        pattern: str = ".*",
        sort: bool = False,
    ) -> None:
        """Say what to look at.

        Args:
            interval: look at one update of so many, the first among them.
            stat_func: what a tensor is made of, on its device; None: its L2 norm over the root of its number of
                elements.
            pattern: a regular expression that names must match from their beginning.
            sort: log by name; else as it came.

        Raises:
            ValueError: an interval below 1, or no regular expression.
        """
        if interval < 1:
            raise ValueError(f"interval is {interval}; expected 1 or more")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern is {pattern!r}, which is no regular expression: {error}") from error
        self.interval, self.sort = interval, sort
        self._stat = stat_func or _size
        self._network: nn.Module | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._reports = True
        self.step = 0
        """Updates seen."""
        self._found: list[tuple[str, Any]] = []
        self._is_looking = False

    def install(self, network: nn.Module, *, reports: bool = True) -> None:
        """Look at a network from now on, instead of another one; `fit` does it.

        Args:
            network: whose layers without children are looked at.
            reports: whether this process logs.
        """
        self.close()
        self._network, self._reports = network, reports
        for name, layer in network.named_modules():
            if name and not any(layer.children()) and self._reports:
                self._hooks.append(layer.register_forward_hook(partial(self._note_output, name)))

    def tic(self) -> None:
        """Begin an update."""
        self._is_looking = self._reports and self.step % self.interval == 0
        self.step += 1
        self._found = []

    def toc(self) -> list[tuple[int, str, Any]]:
        """End an update: (update, name, statistic) of what it was looked at, if it was."""
        if not self._is_looking or self._network is None:
            return []
        for name, parameter in self._network.named_parameters():
            self._note(name, parameter)
            if parameter.grad is not None:
                self._note(f"{name}_grad", parameter.grad)
        self._is_looking = False
        found = sorted(self._found, key=lambda pair: pair[0]) if self.sort else self._found
        self._found = []
        return [(self.step, name, value) for name, value in found]

    def toc_print(self) -> None:
        """End an update, and log what `toc` gives."""
        for step, name, value in self.toc():
            shown = f"{value.item():g}" if isinstance(value, torch.Tensor) and value.numel() == 1 else str(value)
            _log.info("Batch: %7d %30s %s", step, name, shown)

    def close(self) -> None:
        """Take the hooks away; `fit` does it when it ends."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _note_output(self, name: str, layer: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG002  torch's
        if self._is_looking:
            tensors = tensors_of(output)
            for number, tensor in enumerate(tensors):
                self._note(f"{name}_output{number if len(tensors) > 1 else ''}", tensor)

    @torch.no_grad()
    def _note(self, name: str, tensor: torch.Tensor) -> None:
        if self._pattern.match(name):
            dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
            self._found.append((name, self._stat(dense)))
