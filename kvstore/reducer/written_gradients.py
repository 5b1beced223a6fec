"""Gradients that somebody writes between backward and their sum, by clipping for example."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch


class WrittenGradients:
    """Finds gradients of the first backward that were written in place before `check`.

    A loop that writes gradients does so from its first step on. Later steps have no hooks, which cost time.
    """

    def __init__(self, parameters: Mapping[Any, torch.Tensor]) -> None:
        """Register hooks on the parameters; `close` removes them."""
        self._parameters = parameters
        self._noted: dict[Any, tuple[torch.Tensor, int]] = {}
        self._hooks = {
            key: one.register_post_accumulate_grad_hook(partial(self._note, key))  # type: ignore[no-untyped-call]
            for key, one in parameters.items()
        }

    def _note(self, key: Any, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        hooks = parameter._post_accumulate_grad_hooks
        if gradient is not None and hooks and next(reversed(hooks)) == self._hooks[key].id:  # no later one may write it
            self._noted[key] = gradient, gradient._version

    def check(self, expected: str) -> None:
        """Raise RuntimeError with what is ``expected`` instead if a gradient was written since backward."""
        if not self._noted:
            return
        noted, self._noted = self._noted, {}
        written = [
            key
            for key, (gradient, version) in noted.items()
            if self._parameters[key].grad is gradient and gradient._version != version
        ]
        if written:
            raise RuntimeError(
                f"gradients of {written[:20]} were written between backward() and step(), but they are this worker's "
                f"part of the sum over all workers; {expected}"
            )
        self.close()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
