"""Reduction: tracks DistributedDataParallel's gradient reduction on this rank, step by step.

It uses private names of torch, which tests check with each version of torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from gangline.models.batchnorm.distributed_batchnorm import DistributedBatchNorm


class Reduction:
    """Tracks the backward passes that reduce gradients, and can take part in a reduction without a gradient.

    `note_gradient` must be called for each gradient of a parameter, before it is reduced.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        """Track a network."""
        self._model = model
        named: dict[str, Tensor] = {
            name: parameter for name, parameter in model.module.named_parameters() if parameter.requires_grad
        }
        self.names, self._parameters = list(named), list(named.values())
        # With find_unused_parameters the used parameters are unknown, so the first gradient counts.
        self._expected = 1 if model.find_unused_parameters else len(named)
        self.is_exact = not model.find_unused_parameters
        """False if a gradient of zeros is not equivalent to None: parameters may be unused on all ranks."""
        self.listener: Callable[[], Any] = lambda: None
        """Returns the `Lockstep` that is called at the ends of backward passes and reductions, if it exists."""
        self.not_finite = 0
        """Number, from 1, of the first parameter with a gradient that is not finite; 0: all are finite."""
        self._is_completing = False
        self.has_trained = False
        """True if gradients have been reduced, so that other ranks are expected to run forward in each batch."""
        # A second call of DistributedDataParallel's hook before forward would broadcast buffers again.
        if model.broadcast_buffers and any(True for _ in model.buffers()):
            hook = model.module.register_forward_pre_hook(weakly(self._note_forward))
            weakref.finalize(self, hook.remove)
        self.begin_batch()

    def begin_batch(self) -> None:
        """Begin a batch, in which no gradient has arrived yet."""
        self.arrived = 0
        """Number of gradients of the current backward that are to be reduced."""
        self.is_partial = False
        """True if this batch has accumulated gradients that are not reduced yet (`no_sync`)."""
        self._has_entered = False  # into the forward of the network
        self.is_ended = False
        """True if a backward of this batch has reduced gradients."""
        self.adds = False
        """True if the parameters had gradients before those of this batch."""

    def _note_forward(self, *_: object) -> None:
        self._has_entered = True

    def note_gradient(self) -> None:
        """Count a gradient of a parameter."""
        if self._is_completing:
            return
        if not (self.arrived or self.is_partial):
            self.adds = self._parameters[0].grad is not None
        if not self._model.require_backward_grad_sync:
            self.is_partial = True
            return
        self.arrived += 1
        if self.arrived == self._expected:
            # Runs before DistributedDataParallel's callback, which is queued after the last gradient.
            Variable._execution_engine.queue_callback(self._end_backward)

    def note_not_finite(self, name: str) -> None:
        """Note that the gradient of a parameter is not finite."""
        self.not_finite = self.not_finite or 1 + self.names.index(name)

    def _end_backward(self) -> None:
        if (listener := self.listener()) is not None:
            listener.end_backward()
        Variable._execution_engine.queue_callback(self._end_reduction)

    def _end_reduction(self) -> None:
        self.arrived, self.is_partial, self._has_entered, self.is_ended, self.has_trained = 0, False, False, True, True
        if (listener := self.listener()) is not None:
            listener.end_reduction()

    def enter_forward(self) -> None:
        """Take part in DistributedDataParallel's communication before forward, if this rank did not run forward.

        It broadcasts the model's buffers and, once in the second step, the order of buckets.
        """
        if self.is_ended or self.arrived:
            return
        if self._has_entered or self.is_partial:  # perhaps within no_sync, which skips the order of buckets
            self._model.reducer._rebuild_buckets()
        else:
            self._model._pre_forward(torch.zeros((), device="cpu"))  # type: ignore[no-untyped-call]  # an input, moved to the GPU
            self._has_entered = True

    def complete(self) -> None:
        """Take part in the reduction with a gradient of zeros, or with the partial gradient of a failed backward."""
        self.enter_forward()
        self._is_completing = True
        try:
            with torch.enable_grad():
                self._zeros().backward()
        finally:
            self._is_completing = False
            self.arrived, self.is_partial, self.is_ended = 0, False, True

    def _zeros(self) -> Any:
        """Return a tensor with zero gradients with respect to the parameters that have no gradient yet."""
        if not self.arrived:
            output = _Zeros.apply(*self._parameters)  # type: ignore[no-untyped-call]
            return self._model._post_forward(output)  # type: ignore[no-untyped-call]
        count, missing = len(self._parameters), [one for one in self._parameters if one.grad is None]
        if not missing or count - len(missing) > self.arrived:
            raise RuntimeError(
                f"backward failed after {self.arrived} of {count} gradients, and an earlier one had brought others, so "
                "it is not known which are reduced already; restart from a checkpoint"
            )
        return _Zeros.apply(*missing)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def multiply(self, factor: float) -> None:
        """Multiply the gradient."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def drop(self) -> None:
        """Remove the gradient, so that the optimizer does nothing."""
        for parameter in self._parameters:
            parameter.grad = None


class _Zeros(torch.autograd.Function):
    """A tensor with zero gradients with respect to the given parameters."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(parameter.new_zeros(()).expand_as(parameter) for parameter in ctx.saved_tensors)


def reduction_of(networks: Sequence[nn.Module]) -> Reduction | None:
    """Return the reduction of a single DistributedDataParallel network, if it can be tracked; else None."""
    model = getattr(networks[0], "_orig_mod", networks[0])  # inside torch.compile
    if len(networks) != 1 or not isinstance(model, DistributedDataParallel):
        return None
    waits_inside = any(isinstance(module, DistributedBatchNorm) for module in model.modules())
    if model.static_graph or waits_inside or model.parameters_to_ignore or model.mixed_precision is not None:
        return None
    return Reduction(model)


def weakly(method: Any) -> Callable[..., Any]:
    """Return a hook that calls a bound method through a weak reference to its object."""
    owner, function = weakref.ref(method.__self__), method.__func__

    def call(*arguments: Any) -> Any:
        found = owner()
        return None if found is None else function(found, *arguments)

    return call
