"""Reduction: the sum of gradients in DistributedDataParallel, followed from step to step on this rank.

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
    """Follows the backward passes that reduce gradients, and takes part in one without a gradient.

    `note_gradient` must be called for each gradient that a backward pass brings to a parameter, before it is summed.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        """Follow a network."""
        self._model = model
        named: dict[str, Tensor] = {
            name: parameter for name, parameter in model.module.named_parameters() if parameter.requires_grad
        }
        self.names, self._parameters = list(named), list(named.values())
        # Which parameters a backward uses is not known with find_unused_parameters: its first gradient counts.
        self._expected = 1 if model.find_unused_parameters else len(named)
        self.is_exact = not model.find_unused_parameters
        """False if a gradient of zeros differs from none: parameters may be unused on all ranks."""
        self.listener: Callable[[], Any] = lambda: None
        """Returns the `Lockstep` that is called at the ends of backward passes and reductions, if it exists."""
        self.not_finite = 0
        """Number, from 1, of the first parameter whose gradient was found not to be finite; 0: all are."""
        self._is_completing = False
        self.has_trained = False
        """True if gradients have been reduced, so that in each batch other ranks are expected to run forward."""
        # A second call of DistributedDataParallel's hook before forward would broadcast buffers again.
        if model.broadcast_buffers and any(True for _ in model.buffers()):
            hook = model.module.register_forward_pre_hook(weakly(self._note_forward))
            weakref.finalize(self, hook.remove)
        self.begin_batch()

    def begin_batch(self) -> None:
        """Begin a batch, in which no gradient has arrived yet."""
        self.arrived = 0
        """Gradients that a backward pass has brought to be reduced, until it has ended."""
        self.is_partial = False
        """True if backward passes of this batch have added gradients that no reduction has taken yet (`no_sync`)."""
        self._has_entered = False  # into the forward of the network
        self.is_ended = False
        """True if a backward of this batch has reduced gradients."""
        self.adds = False
        """True if the parameters had gradients before those of this batch."""

    def _note_forward(self, *_: object) -> None:
        self._has_entered = True

    def note_gradient(self) -> None:
        """Count a gradient that a backward pass brings to a parameter."""
        if self._is_completing:
            return
        if not (self.arrived or self.is_partial):
            self.adds = self._parameters[0].grad is not None
        if not self._model.require_backward_grad_sync:
            self.is_partial = True
            return
        self.arrived += 1
        if self.arrived == self._expected:
            # DistributedDataParallel queues the call that waits for the sum after its last gradient: this comes before.
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
        """Take part in what DistributedDataParallel exchanges before forward, if this rank did not run it.

        It is the model's buffers, and once, in the second step, the order of buckets.
        """
        if self.is_ended or self.arrived:
            return
        if self._has_entered or self.is_partial:  # perhaps within no_sync, which leaves out the order of buckets
            self._model.reducer._rebuild_buckets()
        else:
            self._model._pre_forward(torch.zeros((), device="cpu"))  # type: ignore[no-untyped-call]  # an input, moved to the GPU
            self._has_entered = True

    def complete(self) -> None:
        """Take part in the sum with a gradient of zeros, or with the part that a failed backward has brought."""
        self.enter_forward()
        self._is_completing = True
        try:
            with torch.enable_grad():
                self._zeros().backward()
        finally:
            self._is_completing = False
            self.arrived, self.is_partial, self.is_ended = 0, False, True

    def _zeros(self) -> Any:
        """Return a number whose gradient with regard to the parameters that have got none yet is zero."""
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
    """A number whose gradient with regard to some parameters is zero."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(parameter.new_zeros(()).expand_as(parameter) for parameter in ctx.saved_tensors)


def reduction_of(networks: Sequence[nn.Module]) -> Reduction | None:
    """Return the reduction of the only network, if it is one of DistributedDataParallel that can be followed."""
    model = getattr(networks[0], "_orig_mod", networks[0])  # inside torch.compile
    if len(networks) != 1 or not isinstance(model, DistributedDataParallel):
        return None
    waits_inside = any(isinstance(module, DistributedBatchNorm) for module in model.modules())
    if model.static_graph or waits_inside or model.parameters_to_ignore or model.mixed_precision is not None:
        return None
    return Reduction(model)


def weakly(method: Any) -> Callable[..., Any]:
    """Return a hook that calls a bound method while its object exists, and does not keep the object alive."""
    owner, function = weakref.ref(method.__self__), method.__func__

    def call(*arguments: Any) -> Any:
        found = owner()
        return None if found is None else function(found, *arguments)

    return call
