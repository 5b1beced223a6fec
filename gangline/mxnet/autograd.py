"""`mx.autograd`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

record = torch.enable_grad
"""Context in which gradients are recorded. Dropout and BatchNorm follow ``network.train()``, as in torch."""
pause = torch.no_grad
is_recording = torch.is_grad_enabled


def backward(heads: torch.Tensor | Sequence[torch.Tensor], head_grads: Sequence[torch.Tensor] | None = None) -> None:
    """Compute gradients of the sum of the elements of ``heads``."""
    heads = [heads] if isinstance(heads, torch.Tensor) else list(heads)
    torch.autograd.backward(heads, [torch.ones_like(one) for one in heads] if head_grads is None else list(head_grads))
