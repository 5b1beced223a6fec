"""Rank timer: the compute time of this rank in a training step, without the time it waits for other ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from gangline.models.batchnorm.distributed_batchnorm import DistributedBatchNorm
from gangline.models.executor.executor import ElapsedTime

_BACKWARD = 2.0  # backward's time relative to forward's, where backward cannot be measured


@dataclass
class RankTime:
    """Times of a rank's forward and backward passes; those of a GPU may not be complete yet."""

    forward: ElapsedTime = field(default_factory=lambda: ElapsedTime(0.0, []))
    waits: ElapsedTime = field(default_factory=lambda: ElapsedTime(0.0, []))
    """Time inside forward in which the rank may have waited for others."""
    backward: ElapsedTime = field(default_factory=lambda: ElapsedTime(0.0, []))
    other: ElapsedTime = field(default_factory=lambda: ElapsedTime(0.0, []))
    """Time of the optimizer, and on a CPU of loading."""
    backward_is_measured: bool = True

    def is_complete(self) -> bool:
        """Return True if the GPU has passed all events."""
        return all(part.is_complete() for part in (self.forward, self.waits, self.backward, self.other))

    def seconds(self) -> float | None:
        """Wait for the GPU and return the compute time; None if no training forward ran."""
        forward = self.forward.seconds()
        if forward is None:
            return None
        forward -= self.waits.seconds() or 0.0
        backward = self.backward.seconds() or 0.0 if self.backward_is_measured else _BACKWARD * forward
        return forward + backward + (self.other.seconds() or 0.0)


class RankTimer:
    """Measures the training forward and backward passes of a model on this rank, and its optimizer.

    Forward is the call of the module inside the wrapper: DistributedDataParallel broadcasts buffers before it. What
    waits inside is subtracted: FSDP2's gathering of parameters before each unit, and synchronized batch normalization.
    Backward begins when a gradient arrives at the outputs, and ends when autograd has no more work, before
    DistributedDataParallel waits for its all-reduce. Where other ranks are waited for inside backward, or nothing is
    known of the wrapper, backward counts as twice the time of forward.

    On a GPU times are those between events on its current stream.
    """

    def __init__(self, model: nn.Module) -> None:
        """Add hooks to the model; `close` removes them.

        Args:
            model: the module that the training loop calls, with its wrapper if it has one.
        """
        inner = inner_module(model)
        units = [module for module in inner.modules() if isinstance(module, FSDPModule)]
        waiting = [module for module in inner.modules() if isinstance(module, (nn.SyncBatchNorm, DistributedBatchNorm))]
        wrapped = inner is not model and not isinstance(model, DistributedDataParallel)
        self._measures_backward = not (units or waiting or wrapped)
        parameter = next(inner.parameters(), None)
        self._device = parameter.device if parameter is not None else torch.device("cpu")
        self._time = RankTime(backward_is_measured=self._measures_backward)
        self._forward_began: Any = None
        self._wait_began: Any = None
        self._backward_began: Any = None
        self._step_began: Any = None
        self._parameters = {id(parameter) for parameter in inner.parameters()}
        self._hooks: list[RemovableHandle] = []
        # The order of hooks matters: an FSDP2 module gathers its parameters in a pre-forward hook of its own.
        for unit in units:
            self._hooks.append(unit.register_forward_pre_hook(self._begin_wait, prepend=True))
            self._hooks.append(unit.register_forward_pre_hook(self._end_wait))
        for module in waiting:
            self._hooks.append(module.register_forward_pre_hook(self._begin_wait, prepend=True))
            self._hooks.append(module.register_forward_hook(self._end_wait, always_call=True))
        self._hooks.append(inner.register_forward_pre_hook(self._begin_forward, prepend=True))
        # Before hooks that replace the outputs: their backward may wait for other ranks' counts of labels.
        self._hooks.append(inner.register_forward_hook(self._end_forward, prepend=True))
        self._hooks.append(register_optimizer_step_pre_hook(self._begin_step))
        self._hooks.append(register_optimizer_step_post_hook(self._end_step))

    def take(self) -> RankTime:
        """Return the times since the last call."""
        self._backward_began = None  # set after a backward that failed
        taken, self._time = self._time, RankTime(backward_is_measured=self._measures_backward)
        return taken

    def add_loading(self, seconds: float) -> None:
        """Add time that this rank took to load a batch; on a GPU it overlaps with the step before."""
        if self._device.type == "cpu":
            self._time.other.on_host += seconds

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin_forward(self, module: nn.Module, *_: object) -> None:
        # Checkpointed layers may run forward again inside backward, which is timed already.
        is_training = module.training and torch.is_grad_enabled() and self._backward_began is None
        self._forward_began = self._now() if is_training else None

    def _end_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._forward_began is None:
            return
        self._add(self._time.forward, self._forward_began)
        self._forward_began = None
        if self._measures_backward:
            for leaf in _pytree.tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(partial(self._begin_backward, self._time))  # type: ignore[no-untyped-call]

    def _begin_wait(self, *_: object) -> None:
        if self._forward_began is not None:
            self._wait_began = self._now()

    def _end_wait(self, *_: object) -> None:
        if self._wait_began is not None:
            self._add(self._time.waits, self._wait_began)
            self._wait_began = None

    def _begin_backward(self, of: RankTime, *_: object) -> None:
        """Start the backward interval of the pass that a gradient belongs to, once per call of backward."""
        if self._backward_began is not None:
            return
        self._backward_began = self._now()
        # Callbacks run in the order in which they were queued, and DistributedDataParallel queues the one that waits
        # for its all-reduce when the last gradient is ready: this one comes first.
        Variable._execution_engine.queue_callback(partial(self._end_backward, of))

    def _end_backward(self, of: RankTime) -> None:
        if self._backward_began is not None:
            self._add(of.backward, self._backward_began)
            self._backward_began = None

    def _begin_step(self, optimizer: Optimizer, *_: object) -> None:
        if any(id(parameter) in self._parameters for parameter in optimizer.param_groups[0]["params"][:1]):
            self._step_began = self._now()

    def _end_step(self, *_: object) -> None:
        if self._step_began is not None:
            self._add(self._time.other, self._step_began)
            self._step_began = None

    def _now(self) -> Any:
        """Return the time on the host, or an event on the GPU's current stream."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _add(self, to: ElapsedTime, began: Any) -> None:
        if self._device.type == "cuda":
            to.events.append((began, self._now()))
        else:
            to.on_host += self._now() - began


def inner_module(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers that hold it as ``module``, as DistributedDataParallel and DeepSpeed do."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model
