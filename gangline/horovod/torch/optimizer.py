"""Horovod's `DistributedOptimizer` on gangline's, which sends gradients in buckets while backward runs."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gangline.horovod.torch.calls import (
    Average,
    Compression,
    ProcessSet,
    Sum,
    agree,
    allreduce_,
    checked_op,
    followers,
    global_process_set,
    sparse_allreduce_async,
    submit,
)
from gangline.kvstore.reducer import distributed_optimizer
from gangline.kvstore.reducer.gradient_reducer import GradientReducer
from gangline.kvstore.reducer.reducer import is_sparse
from gangline.kvstore.registry import create

_optimizers: list[weakref.ref[DistributedOptimizer]] = []


class DistributedOptimizer(distributed_optimizer.DistributedOptimizer):
    """An optimizer whose gradients are reduced over all ranks; see `gangline.DistributedOptimizer`.

    It starts with rank 0's weights. Ranks that have joined add zeros.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
        compression: Any = Compression.none,
        backward_passes_per_step: int = 1,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Wrap an optimizer. Collective: all ranks must make it.

        Args:
            optimizer: any torch optimizer but LBFGS.
            named_parameters: the parameters, whose names are checked, and not needed.
            compression: `Compression.none` or `Compression.fp16`, which sends all gradients after the backward.
            backward_passes_per_step: number of backwards whose gradients are added up before they are reduced.
            op: Average, or Sum, which is the mean times the number of ranks.
            gradient_predivide_factor: without effect: float16 is added in float32.
            num_groups: without effect: gradients are sent in buckets of 25 MB.
            groups: without effect, as ``num_groups``.
            sparse_as_dense: send sparse gradients as dense ones, as is faster if most rows are used.
            process_set: ranks that train together.

        Raises:
            ValueError: if parameters have no name or share one, or an argument has another value.
            NotImplementedError: if ``op`` is Adasum.
        """
        del gradient_predivide_factor, num_groups, groups
        checked_op(op, allowed=(Average, Sum))
        if compression not in (Compression.none, Compression.fp16):
            raise ValueError(f"compression is {compression}; expected hvd.Compression.none or fp16")
        if backward_passes_per_step < 1:
            raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}; expected 1 or more")
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if named_parameters is not None:
            _check_names(list(named_parameters), parameters)
        size = process_set.size() if process_set.included() else 1  # a rank outside of the set trains alone
        sends_halves = compression is Compression.fp16
        self.backward_passes_per_step = backward_passes_per_step
        self._op, self._factor = op, size if op == Sum else 1
        self._process_set = process_set
        self._sends_halves = sends_halves and size > 1
        self._sparse_as_dense = sparse_as_dense
        self._made_dense: set[Tensor] = set()
        self._passes = self._last_backward = 0
        self._passes_lock = threading.Lock()
        self._number = len(_optimizers)

        def split() -> Any:
            agree(process_set, ["DistributedOptimizer", len(parameters)])
            return process_set.group.split(0)

        if size == 1 or sends_halves:
            super().__init__(optimizer, "local")
        else:
            super().__init__(optimizer, create("allreduce", communicator=submit(split).result))
        _optimizers.append(weakref.ref(self))

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backwards whose gradients are added up before they are reduced."""
        self.backward_passes_per_step, self._passes = passes, 0

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Return a context without effect: `step` never reduces what `synchronize` has reduced."""
        return nullcontext()

    def synchronize(self) -> None:
        """Reduce gradients that no backward has reduced since the last step. Collective."""
        if self._reducer is not None and (self._has_local or not self._is_reduced):
            self._announce()
        if self._sends_halves and not self._is_reduced:
            self._reduce_halves()
            self._is_reduced = True
        super().synchronize()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the wrapped optimizer's step, after `synchronize`."""
        self._passes = 0
        if closure is None or not self._sends_halves:
            return super().step(closure)
        with torch.enable_grad():
            result = closure()
        super().step()
        return result

    @torch.no_grad()
    def _reduce_halves(self) -> None:
        trained = [one for group in self.param_groups for one in group["params"] if one.requires_grad]
        for one in trained:
            if is_sparse(one.grad):
                one.grad = sparse_allreduce_async(one.grad, op=self._op, process_set=self._process_set)()
        parameters = [one for one in trained if not is_sparse(one.grad)]
        if not parameters:
            return
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        flat = torch.cat([one.half().flatten() for one in gradients])
        allreduce_(flat, op=self._op, process_set=self._process_set)
        halves = torch.split(flat, [one.numel() for one in gradients])
        for one, gradient, half in zip(parameters, gradients, halves, strict=True):
            one.grad = gradient.copy_(half.view(one.shape))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as the wrapped optimizer does."""
        self._passes = 0
        super().zero_grad(set_to_none)

    def follow(self) -> None:
        """Take part in a reduction with zeros."""
        assert isinstance(self._reducer, GradientReducer)
        for key, parameter in self._trained.items():
            zeros = torch.zeros_like(parameter)
            parameter.grad = zeros.to_sparse(1) if key in self._reducer.sparse_keys else zeros
        with self._reducer.not_compared():  # its weights stay behind those of the other ranks
            super().synchronize()
        self.zero_grad()

    def _announce(self) -> None:
        """Make ranks that have joined take part in the reduction that follows."""
        submit(lambda: agree(self._process_set, ["step", self._number]))

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._sparse_as_dense and parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()
            self._made_dense.add(parameter)
        with self._passes_lock:
            number = torch._C._current_graph_task_id()
            if number != self._last_backward:
                self._last_backward = number
                self._passes += 1
                self._is_syncing = self._passes % self.backward_passes_per_step == 0
                if self._is_syncing:
                    self._announce()
        super()._on_gradient(parameter)

    def _reduce(self, weight: float | None) -> None:
        super()._reduce(1.0 if weight is None else weight)  # a rank without a backward adds zeros
        gradients = [one.grad for one in self._trained.values() if one.grad is not None]
        if self._factor > 1 and gradients:
            torch._foreach_mul_(gradients, self._factor)
        for one in self._made_dense:
            if one.grad is not None:
                one.grad = one.grad.to_sparse(1)  # as the optimizer expects it


def _follow(call: list[Any], _: list[Any]) -> None:
    optimizer = _optimizers[call[1]]()
    assert optimizer is not None, "a rank that has joined dropped an optimizer with which the others go on"
    optimizer.follow()


followers["step"] = _follow


def _check_names(named: list[Any], parameters: list[Tensor]) -> None:
    if any(not isinstance(one, tuple) for one in named):
        raise ValueError("named_parameters has entries without a name; expected model.named_parameters()")
    if repeated := [name for name, count in Counter(name for name, _ in named).items() if count > 1]:
        raise ValueError(f"named_parameters has {', '.join(repeated)} more than once; expected different names")
    if unnamed := len({*parameters} - {one for _, one in named}):
        raise ValueError(f"named_parameters lacks {unnamed} of the optimizer's parameters; expected all of them")
