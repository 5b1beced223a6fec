"""Synchronized batch normalization over the replicas of one process: statistics and gradients of the whole batch.

Each replica's layer computes the mean and the sum of squared deviations of its own share. They are combined into those
of the whole batch (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979), and each replica normalizes its share by them. In backward the gradients of the joint statistics are
summed over the replicas, so that every gradient is that of one network over the whole batch (Ioffe and Szegedy, "Batch
normalization", 2015).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from gangline.models.batchnorm.thread_barrier import ThreadBarrier

Mode = Literal["threads", "graph"]
Value = TypeVar("Value")


class JointBatchNorm:
    """Replicas of a network whose batch normalization layers share the statistics of the whole batch.

    They do so inside a section, wherever torch's layer would use batch statistics. Layers frozen with ``.eval()``
    are left alone, and a section leaves nothing behind on the network.
    """

    def __init__(self, networks: Sequence[nn.Module], mode: Mode = "threads") -> None:
        """Check that the layers can be synchronized.

        Args:
            networks: the replicas, equal in structure.
            mode: path of gradients between replicas. "threads": each replica's backward runs in a thread of its own,
                and the threads exchange gradients at a barrier; for CPU contexts and distinct GPUs. "graph": the
                autograd graphs of the replicas are connected, and ONE ``torch.autograd.backward`` over the roots of
                all replicas computes all gradients; for a GPU listed twice, whose replicas share one autograd thread.
                It does not support layers that activation checkpointing calls again.

        Raises:
            ValueError: if a layer is a subclass of torch's with a forward of its own.
        """
        self.networks = list(networks)
        self.mode = mode
        for network in self.networks:
            _layers(network)

    def forward_section(
        self, barrier: ThreadBarrier, index: int, generator: torch.Generator | None = None
    ) -> AbstractContextManager[None]:
        """Return a context manager that synchronizes a replica's layers; enter it around forward, in its thread.

        Args:
            barrier: barrier of all replicas that have samples in this batch, used for this forward alone.
            index: index of the replica.
            generator: see `ThreadBarrier.begin`.

        Raises:
            Aborted: if another replica failed.
            RuntimeError: if the replicas called different layers, or called them a different number of times.
            ValueError: if the whole batch has one value per channel.
        """
        return self._section(barrier, index, generator, may_recompute=True)

    def backward_section(
        self, barrier: ThreadBarrier, index: int, generator: torch.Generator | None = None
    ) -> AbstractContextManager[None]:
        """Return the same for backward: in "threads" mode one per thread, in "graph" mode all around the one call.

        Args:
            barrier: barrier with the participants of forward's, but another one; in "graph" mode without turns.
            index: index of the replica.
            generator: see `ThreadBarrier.begin`.

        Raises:
            Aborted: if another replica failed.
            RuntimeError: as in forward; in "graph" mode also if a layer is called again.
        """
        return self._section(barrier, index, generator, may_recompute=self.mode == "threads")

    @contextmanager
    def _section(
        self, barrier: ThreadBarrier, index: int, generator: torch.Generator | None, *, may_recompute: bool
    ) -> Iterator[None]:
        replaced: list[_BatchNorm] = []
        try:
            barrier.begin(index, generator)
            if len(barrier.participants) > 1:  # torch's own layers do for a single replica
                for name, layer in _layers(self.networks[index]):
                    kind = _JointForward if may_recompute else _RefusedForward
                    layer.forward = kind(layer, name, barrier, index, self.mode)  # type: ignore[method-assign]
                    replaced.append(layer)
            yield
        except BaseException as error:
            barrier.abort(error)
            raise
        finally:
            for layer in replaced:
                del layer.forward
        barrier.leave(index)


def copy_statistics(source: nn.Module, targets: Iterable[nn.Module]) -> None:
    """Copy running statistics to replicas that had no share of a batch from one that had."""
    for target in targets:
        for (_, layer), (_, other) in zip(_layers(source), _layers(target), strict=True):
            theirs = dict(other.named_buffers(recurse=False))
            for name, value in layer.named_buffers(recurse=False):
                theirs[name].copy_(value)


def _layers(network: nn.Module) -> list[tuple[str, _BatchNorm]]:
    found = []
    for name, layer in network.named_modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
            if getattr(layer.forward, "__func__", None) is not _BatchNorm.forward:
                raise ValueError(
                    f"layer {name!r} is a {type(layer).__name__} with a forward of its own, whose batch statistics "
                    "cannot be synchronized; expected torch's BatchNorm1d, 2d or 3d (or leave out sync_batchnorm)"
                )
            found.append((name, layer))
    return found


@dataclass
class _Moments:
    """Statistics of one replica's share of the batch."""

    count: int
    """Values per channel."""
    mean: torch.Tensor
    """(channels,), float32 or float64."""
    squares: torch.Tensor
    """Sum of squared deviations from the mean, likewise."""


@dataclass(eq=False)
class _JointForward:
    """Replacement of a layer's ``forward`` inside a section."""

    layer: _BatchNorm
    name: str
    barrier: ThreadBarrier
    index: int
    mode: Mode

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        layer = self.layer
        if not _uses_the_batch(layer):
            return _BatchNorm.forward(layer, input)
        layer._check_input_dim(input)  # type: ignore[no-untyped-call]
        factor = _count_batch(layer)
        count = input.numel() // max(1, input.shape[1])
        mean, squares = _Statistics.apply(input)  # type: ignore[no-untyped-call]
        mean, squares, total = self._joint(_Moments(count, mean, squares))
        if total == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
        if layer.training and layer.track_running_stats and total:
            _update(layer.running_mean, mean, factor)
            _update(layer.running_var, squares / (total - 1), factor)
        weight = torch.ones_like(mean) if layer.weight is None else layer.weight.to(mean.dtype)
        bias = torch.zeros_like(mean) if layer.bias is None else layer.bias.to(mean.dtype)
        variance = squares / max(1, total)
        output: torch.Tensor = _Normalized.apply(input, mean, variance, weight, bias, layer.eps)  # type: ignore[no-untyped-call]
        return output

    def exchange(self, direction: str, value: Value) -> list[Value]:
        """All-gather a value over the replicas in this layer."""
        parameter = next(iter([*self.layer.parameters(recurse=False), *self.layer.buffers(recurse=False)]), None)
        ready = None
        if parameter is not None and parameter.is_cuda:  # other threads read the value on other streams
            ready = torch.cuda.current_stream(parameter.device).record_event()
        received = self.barrier.exchange(self.index, (f"{direction} of {self.name!r}", value, ready))
        for _, _, event in received:
            if event is not None:
                torch.cuda.current_stream(event.device).wait_event(event)
        if len({where for where, _, _ in received}) > 1:
            calls = ", ".join(
                f"{index}: {one[0]}" for index, one in zip(self.barrier.participants, received, strict=True)
            )
            raise RuntimeError(
                f"replicas are in different layers of batch normalization ({calls}); a network with synchronized "
                "batch statistics must call its layers in the same order on every share of a batch"
            )
        return [value for _, value, _ in received]

    def _joint(self, own: _Moments) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return mean, sum of squared deviations and number of values of the whole batch."""
        if self.mode == "graph":
            shares = self.exchange("forward", own)
            mean, squares = _combined(shares, own.mean.device)
        else:
            shares = self.exchange("forward", _Moments(own.count, own.mean.detach(), own.squares.detach()))
            mean, squares = _JointMoments.apply(own.mean, own.squares, shares, self)  # type: ignore[no-untyped-call]
        return mean, squares, sum(share.count for share in shares)


class _RefusedForward(_JointForward):
    """Replacement during a backward in "graph" mode, where waiting for another replica would deadlock."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        if _uses_the_batch(self.layer):
            raise RuntimeError(
                f"batch normalization {self.name!r} was called again during backward (activation checkpointing), and "
                "its statistics cannot be synchronized there while one GPU is listed twice among the contexts; list "
                "each GPU once, or exclude the layer from checkpointing"
            )
        return _BatchNorm.forward(self.layer, input)


def _uses_the_batch(layer: _BatchNorm) -> bool:
    return layer.training or (layer.running_mean is None and layer.running_var is None)


def _count_batch(layer: _BatchNorm) -> float:
    """Increment num_batches_tracked as torch does; return the batch's weight in the running statistics."""
    tracked = layer.num_batches_tracked
    if layer.training and layer.track_running_stats and tracked is not None:
        tracked.add_(1)
        if layer.momentum is None:
            return 1.0 / float(tracked)
    return layer.momentum or 0.0


@torch.no_grad()
def _update(running: torch.Tensor | None, value: torch.Tensor, factor: float) -> None:
    if running is not None:
        running.copy_(torch.lerp(running.to(value.dtype), value, factor))


def _combined(shares: Sequence[_Moments], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and sum of squared deviations of all shares, by the same operations in order on every replica."""
    total = max(1, sum(share.count for share in shares))
    means = [share.mean.to(device) for share in shares]
    mean = _sum([own * (share.count / total) for own, share in zip(means, shares, strict=True)])
    between = [(own - mean).square() * share.count for own, share in zip(means, shares, strict=True)]
    return mean, _sum([share.squares.to(device) for share in shares] + between)


def _sum(values: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *others = values
    for other in others:
        first = first + other
    return first


def _mapped(values: torch.Tensor, mean: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return ``(values - mean) * factor + shift`` by channel, with the kernel of evaluation mode."""
    epsilon = torch.finfo(torch.float32).tiny  # must be positive; 1 + tiny == 1
    return F.batch_norm(values, mean, torch.ones_like(mean), factor, shift, False, 0.0, epsilon)


class _Statistics(Function):
    """Statistics by channel: (N, C, ...) -> mean (C,), sum of squared deviations (C,); float32 for half precision."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = values.numel() // max(1, values.shape[1])
        dtype = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
        mean, variance = torch.zeros(2, values.shape[1], dtype=dtype, device=values.device).unbind()
        if count:
            # The kernel of torch's own layer, 5 times as fast on a CPU as var_mean. Its results have the dtype of the
            # running statistics, which enter with weight 0.
            mean, variance = torch.batch_norm_update_stats(values, mean, torch.ones_like(variance), 0.0)
        ctx.save_for_backward(values, mean)
        return mean, variance * count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_mean: torch.Tensor, of_squares: torch.Tensor) -> torch.Tensor:
        values, mean = ctx.saved_tensors
        count = max(1, values.numel() // max(1, values.shape[1]))
        return _mapped(values, mean, 2 * of_squares, of_mean / count)


class _JointMoments(Function):
    """Statistics of the whole batch from those of all threads; backward sums the gradients over the threads."""

    @staticmethod
    def forward(
        ctx: Any,
        mean: torch.Tensor,
        squares: torch.Tensor,  # noqa: ARG004 - also in ``shares``; autograd needs it as an argument
        shares: list[_Moments],
        call: _JointForward,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        joint, joint_squares = _combined(shares, mean.device)
        ctx.save_for_backward(mean, joint)
        ctx.layer, ctx.name, ctx.participants = call.layer, call.name, call.barrier.participants
        ctx.count = shares[ctx.participants.index(call.index)].count
        ctx.total = max(1, sum(share.count for share in shares))
        return joint, joint_squares

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_mean: torch.Tensor, of_squares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        call = ctx.layer.__dict__.get("forward")
        if not isinstance(call, _JointForward) or call.barrier.participants != ctx.participants:
            raise RuntimeError(
                f"batch normalization {ctx.name!r} has joint statistics of replicas {ctx.participants}; expected "
                "its backward in a backward_section, with a barrier of all of these"
            )
        received = call.exchange("backward", (of_mean, of_squares))
        of_mean = _sum([gradient.to(of_mean.device) for gradient, _ in received])
        of_squares = _sum([gradient.to(of_squares.device) for _, gradient in received])
        mean, joint = ctx.saved_tensors
        through_mean = of_mean * (ctx.count / ctx.total) + of_squares * (mean - joint) * (2 * ctx.count)
        return through_mean, of_squares, None, None


class _Normalized(Function):
    """Normalization by given statistics, weight and bias (C,): (N, C, ...) -> (N, C, ...) of the input's dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(values, mean, variance, weight)
        ctx.eps = eps
        return F.batch_norm(values, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, mean, variance, weight = ctx.saved_tensors
        if not values.numel():  # the kernel divides by the count
            return torch.zeros_like(values), *torch.zeros(4, len(mean), dtype=mean.dtype, device=mean.device), None
        of_values, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, values, weight, mean, variance, None, None, False, ctx.eps, [ctx.needs_input_grad[0], True, True]
        )
        scale = weight * (variance + ctx.eps).rsqrt()
        of_variance = of_weight * scale * -0.5 / (variance + ctx.eps).sqrt()
        return of_values, of_bias * -scale, of_variance, of_weight, of_bias, None
