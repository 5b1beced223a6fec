"""Gradient scale: the gradient that flows into a model's outputs, weighted by this rank's share of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

_MARK = "_gangline_gradient_scale"

Weight = Callable[[], float]
"""Returns the weight of a batch; it may wait for other ranks."""


class GradientScale:
    """Forward hook that multiplies the gradients of a model's outputs by the weight of the current batch.

    Ranks average gradients: (1 / world size) x the sum over ranks. If a rank's loss is the mean over c of the C samples
    of the global batch, weight c x world size / C makes the average the gradient of the mean over all C. Terms of the
    loss that do not depend on the outputs keep their gradient, since all ranks have the same term.
    """

    def __init__(self, model: nn.Module) -> None:
        """Add the hook to the module that the training loop calls.

        Raises:
            RuntimeError: if the model, or the module that it wraps, has such a hook already.
        """
        check_not_balanced(model)
        self._model = model
        setattr(model, _MARK, self)
        self._hook = model.register_forward_hook(self._scale_outputs)
        self.weight: Weight | None = None
        """Weight of the current batch; None outside of batches."""
        self.calls = 0
        """Number of training forwards since the current batch began."""

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()
        self._model.__dict__.pop(_MARK, None)

    def _scale_outputs(self, module: nn.Module, _inputs: Any, output: Any) -> Any:
        if self.weight is None or not module.training or not torch.is_grad_enabled():
            return None
        self.calls += 1
        weight = self.weight
        return _pytree.tree_map_only(Tensor, lambda tensor: _scaled(tensor, weight), output)


def check_not_balanced(model: nn.Module) -> None:
    """Raise RuntimeError if the gradients of a module, or of one inside, are scaled already."""
    for module in model.modules():
        if getattr(module, _MARK, None) is not None:
            raise RuntimeError(
                f"the {type(module).__name__} is balanced already, by a loader that is still open; close() that "
                "loader first, or balance all loaders' models once: the weights of both would be multiplied"
            )


def _scaled(tensor: Tensor, weight: Weight) -> Tensor:
    if not tensor.requires_grad or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    scaled: Tensor = _Scale.apply(tensor, weight)  # type: ignore[no-untyped-call]
    return scaled


class _Scale(torch.autograd.Function):
    """The identity, with a gradient multiplied by a weight that is known when backward runs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        weight = ctx.weight()
        if not weight:
            return torch.zeros_like(gradient), None  # not gradient * 0, which is NaN for a NaN
        return (gradient if weight == 1.0 else gradient * weight), None
