"""Gradient scale: the gradient that flows into a model's outputs, weighted by this rank's share of the batch."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

_balanced: weakref.WeakKeyDictionary[nn.Module, weakref.ref[GradientScale]] = weakref.WeakKeyDictionary()


class GradientScale:
    """Forward hook that multiplies the gradients of a model's outputs by the weight of the current batch.

    Ranks average gradients: (1 / world size) x the sum over ranks. If a rank's loss is the mean over c of the C samples
    of the global batch, weight c x world size / C makes the average the gradient of the mean over all C. Terms of the
    loss that do not depend on the outputs keep their gradient, since all ranks have the same term. Each training
    forward takes the weight of the batch that is current then, so gradients may accumulate over batches. Evaluation and
    forwards without gradients stay as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        """Add the hook to the module that the training loop calls; `close` removes it.

        Raises:
            RuntimeError: if the gradients of the model, or of a part of it, are scaled already.
        """
        check_not_balanced(model)
        self._weight: float | None = None  # of the current batch; None between batches
        self._calls = 0  # training forwards since the current batch began
        self._is_warned = False
        self._model = weakref.ref(model)
        _balanced[model] = weakref.ref(self)
        self._hook = model.register_forward_hook(_Hook(weakref.ref(self)))
        weakref.finalize(self, self._hook.remove)

    def begin(self, weight: float) -> None:
        """Use this weight for the forwards of the next batch."""
        self.end()
        self._weight, self._calls = weight, 0

    def end(self) -> None:
        """End the batch; warn once if its gradients did not come through the model's outputs."""
        is_current, self._weight = self._weight is not None, None
        model = self._model()
        if not is_current or self._calls or self._is_warned or model is None or not model.training:
            return
        if any(parameter.grad is not None for parameter in model.parameters()):
            self._is_warned = True
            warnings.warn(
                f"balance: a batch was trained without calling the {type(model).__name__} that was given to balance(), "
                "so this rank's gradient does not have the weight of its share; call that module, or give balance() "
                "loss_reduction='normalized' and multiply the loss by loader.weight",
                stacklevel=4,
            )

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()
        if (model := self._model()) is not None:
            _balanced.pop(model, None)

    def scale(self, model: nn.Module, output: Any) -> Any:
        """Return a model's output, whose gradient will be scaled.

        Raises:
            TypeError: if the output is an object whose tensors cannot be reached.
        """
        if self._weight is None or not model.training or not torch.is_grad_enabled():
            return output
        self._calls += 1
        leaves, structure = _pytree.tree_flatten(output)
        for leaf in leaves:
            _check_has_no_hidden_tensor(leaf)
        return _pytree.tree_unflatten([_scaled(leaf, self._weight) for leaf in leaves], structure)


def check_not_balanced(model: nn.Module) -> None:
    """Raise RuntimeError if the gradients of the model, or of a part of it, are scaled already."""
    inside = set(model.modules())
    for other, scale in list(_balanced.items()):
        if scale() is not None and (other in inside or model in set(other.modules())):
            raise RuntimeError(
                f"the {type(other).__name__} is balanced already, by another loader, and its gradients would be "
                "weighted twice; call close() of that loader first"
            )


class _Hook:
    """Forward hook that does not keep its GradientScale alive; copies of the model, and saved ones, have none."""

    def __init__(self, scale: weakref.ref[GradientScale] | None = None) -> None:
        self._scale = scale

    def __call__(self, model: nn.Module, _inputs: Any, output: Any) -> Any:
        scale = self._scale() if self._scale is not None else None
        return output if scale is None else scale.scale(model, output)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


def _check_has_no_hidden_tensor(leaf: Any) -> None:
    """Raise TypeError for an object whose tensors pytrees do not reach."""
    if isinstance(leaf, Tensor) or not hasattr(leaf, "__dict__"):
        return
    inside = list(leaf.values()) if hasattr(leaf, "values") and hasattr(leaf, "keys") else []
    if any(isinstance(value, Tensor) and value.requires_grad for value in (*vars(leaf).values(), *inside)):
        raise TypeError(
            f"the model returned a {type(leaf).__name__}, whose tensors cannot be reached; return tensors, tuples or "
            "dicts, or register the class with torch.utils._pytree.register_pytree_node"
        )


def _scaled(leaf: Any, weight: float) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.requires_grad:
        return leaf
    return _Scale.apply(leaf, weight)  # type: ignore[no-untyped-call]


class _Scale(torch.autograd.Function):
    """The identity, with a gradient multiplied by a weight."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        if torch.is_grad_enabled():
            raise RuntimeError(
                "gradients of gradients (create_graph=True) do not pass through the outputs of a balanced model; give "
                "balance() loss_reduction='normalized' and multiply the loss by loader.weight"
            )
        if not ctx.weight:
            return torch.zeros_like(gradient), None  # not gradient * 0, which is NaN for a NaN
        return (gradient if ctx.weight == 1.0 else gradient * ctx.weight), None
