"""Rank timer: the time of a rank's training steps, without its waits for other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gangline.kvstore.reducer.waits import timers
from gangline.models.batchnorm.distributed_batchnorm import DistributedBatchNorm
from gangline.models.elapsed_time import ElapsedTime, mark

_BACKWARD = 2.0  # backward's time relative to forward's, where backward cannot be measured


class RankTimer:
    """Timer of steps that pauses where this rank may wait for other ranks.

    The caller runs the timer while it loads a batch, and from handing out a batch until the next one is requested. The
    timer pauses from the end of this rank's backward to the optimizer's step, which waits for the all-reduce; without a
    step, as when gradients accumulate, it only excludes DistributedDataParallel's wait. It also pauses while
    DistributedDataParallel broadcasts buffers, while FSDP2 gathers parameters, in synchronized batch normalization, and
    in `waiting_for_ranks`, as where a DistributedOptimizer copies weights from their owners. If backward waits for
    other ranks, or the wrapper is unknown, the time from the end of forward to the optimizer's step counts as twice
    that of forward.

    On a GPU the times are between events on its current stream: host time counts only where the GPU waits for it.
    """

    _since: Any = None  # start of the running interval; None: paused
    _was_running = _is_after_backward = _is_in_backward = _is_in_forward = False

    def __init__(self, models: Sequence[nn.Module], *, has_backward: bool = True) -> None:
        """Add hooks to the modules that the loop calls, with their wrappers, and for backward to parameters."""
        parameters = [parameter for model in models for parameter in model.parameters()]
        uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        unknown = torch.device("cuda", torch.cuda.current_device()) if uses_gpu else torch.device("cpu")
        self._device = parameters[0].device if parameters else unknown
        self._has_backward = has_backward
        self._parameters = {id(parameter) for parameter in parameters}
        self._time = ElapsedTime()
        self.hooks: list[RemovableHandle] = []
        """Those on the modules and optimizers, for the caller to remove."""
        for model in models:
            self._add_hooks(model)
        self.hooks.append(register_optimizer_step_pre_hook(self._begin_step))
        timers.add(self)

    def __reduce__(self) -> tuple[Any, ...]:  # copies of networks keep copies of hooks, which do nothing
        return RankTimer.__new__, (RankTimer,)

    def _add_hooks(self, model: nn.Module) -> None:
        inner = inner_module(model)
        units = [module for module in inner.modules() if isinstance(module, FSDPModule)]
        layers = [module for module in inner.modules() if isinstance(module, (nn.SyncBatchNorm, DistributedBatchNorm))]
        wrapper = getattr(model, "_orig_mod", model)  # of torch.compile
        is_ddp = isinstance(wrapper, DistributedDataParallel)
        # The order of hooks matters: FSDP2 gathers parameters in a pre-forward hook.
        for unit in units:
            self.hooks.append(unit.register_forward_pre_hook(self._begin_wait, prepend=True))
            self.hooks.append(unit.register_forward_pre_hook(self._end_wait))
        for layer in layers:
            self.hooks.append(layer.register_forward_pre_hook(self._begin_wait, prepend=True))
            self.hooks.append(layer.register_forward_hook(self._end_wait, always_call=True))
        if units or layers or (inner is not wrapper and not is_ddp):
            self.hooks.append(inner.register_forward_pre_hook(self._begin_forward, prepend=True))
            self.hooks.append(inner.register_forward_hook(self._end_forward, always_call=True))
        else:
            for parameter in inner.parameters():
                if parameter.requires_grad and self._has_backward:
                    self.hooks.append(parameter.register_hook(self._begin_backward))  # type: ignore[no-untyped-call]
        if inner is not wrapper and (list(inner.buffers()) or not is_ddp):
            self.hooks.append(wrapper.register_forward_pre_hook(self._begin_wait, prepend=True))
            self.hooks.append(inner.register_forward_pre_hook(self._end_wait, prepend=True))

    def start(self) -> None:
        """Start counting time when a batch is handed out."""
        self._is_after_backward = self._is_in_backward = self._is_in_forward = False
        self._since = mark(self._device)

    def pause(self) -> bool:
        """Stop counting time until `resume`; return False if the timer was not running."""
        if self._since is None:
            return False
        self._time.add(self._since, mark(self._device), 1 + _BACKWARD if self._is_in_forward else 1.0)
        self._since = None
        return True

    def resume(self) -> None:
        """Count time again."""
        if self._since is None:
            self._since = mark(self._device)

    def timed(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader; the time of loading counts."""
        batches = iter(loader)
        while True:
            self.resume()
            try:
                batch = next(batches, self)
            finally:
                self.pause()
            if batch is self:
                return
            yield batch

    def take(self) -> ElapsedTime | None:
        """Return the time since the last call; None if the step was left before its end."""
        is_complete = not self.pause()
        taken, self._time = self._time, ElapsedTime()
        return taken if is_complete else None

    # torch.compile drops hooks that return at once; other hooks would break its graph.

    def _begin_wait(self, *_: object) -> None:
        if not torch.compiler.is_compiling():
            self._was_running = self.pause()

    def _end_wait(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and self._was_running:
            self.resume()

    def _begin_forward(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and (self.pause() or self._is_after_backward):
            self._is_in_forward, self._is_after_backward = True, False
            self.resume()

    def _end_forward(self, *_: object) -> None:
        if not torch.compiler.is_compiling() and self._is_in_forward:
            self.pause()
            self._is_in_forward, self._is_after_backward = False, True

    def _begin_backward(self, _: torch.Tensor) -> None:
        """Ask autograd for a call at the end of this pass, at its first gradient."""
        if not self._is_in_backward:
            self._is_in_backward, self._is_after_backward = True, False
            # Callbacks run in queueing order. DistributedDataParallel queues its wait for the all-reduce when the last
            # gradient is ready, so this callback runs first.
            Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._is_in_backward = False
        if self.pause():
            Variable._execution_engine.queue_callback(self._end_all_reduce)

    def _end_all_reduce(self) -> None:
        self._is_after_backward = True
        self.resume()

    def _begin_step(self, optimizer: Optimizer, *_: object) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if self._is_after_backward and any(id(parameter) in self._parameters for parameter in parameters):
            self._is_after_backward = False
            self._since = mark(self._device)  # excludes the time since the end of backward


def inner_module(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers that hold it as ``module``, as DistributedDataParallel and DeepSpeed do."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return getattr(model, "_orig_mod", model)
