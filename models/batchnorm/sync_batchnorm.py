"""Batch normalisation over all replicas of one process: one mean and variance for the whole batch, exact both ways.

A replica's layer takes the mean and the sum of squared deviations of its own share; these are combined into those of
the whole batch (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
1979), and each replica normalises its share by them. In backward the gradients of the joint statistics are summed over
the replicas, which makes every gradient that of one network over the whole batch (Ioffe and Szegedy, "Batch
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

from gangline.models.executor.thread_barrier import ThreadBarrier

By = Literal["threads", "graph"]
Value = TypeVar("Value")


class Joined:
    """Networks, the replicas of a module, whose batch normalisation takes its statistics over all of them.

    It does so while a section is in force on a network, wherever torch's layer would use the batch's own statistics.
    What is frozen with ``.eval()`` stays as it is, and a section leaves nothing behind on the network.
    """

    def __init__(self, networks: Sequence[nn.Module], by: By = "threads") -> None:
        """Check that the networks can be joined.

        Args:
            networks: one a place, equal in structure.
            by: how gradients cross replicas. "threads": each replica's backward runs in a thread of its own, and
                there they meet; for CPU contexts and distinct GPUs. "graph": the replicas' graphs hang together, and
                ONE ``torch.autograd.backward`` from the roots of all gives all gradients; for a GPU that stands
                twice, whose replicas share one thread of autograd's. It cannot join a layer that activation
                checkpointing calls again.

        Raises:
            ValueError: a layer is of a class derived from torch's and has a forward of its own.
        """
        self.networks = list(networks)
        self.by = by
        for network in self.networks:
            _layers(network)

    def forward_section(
        self, meeting: ThreadBarrier, place: int, generator: torch.Generator | None = None
    ) -> AbstractContextManager[None]:
        """Have a network's layers meet the others'; around its forward, in the thread that runs it.

        Args:
            meeting: of the places of all networks that have samples in this batch; one for this forward alone.
            place: of the network.
            generator: see `ThreadBarrier.begin`.

        Raises:
            Aborted: another replica failed.
            RuntimeError: the replicas called different layers, or called them unequally often.
            ValueError: the whole batch has one value per channel.
        """
        return self._section(meeting, place, generator, called_again=True)

    def backward_section(
        self, meeting: ThreadBarrier, place: int, generator: torch.Generator | None = None
    ) -> AbstractContextManager[None]:
        """The same around backward: by threads each in its own thread, by graph all of them around the one call.

        Args:
            meeting: of the places that forward's had, but a meeting of its own; by graph one without turns.
            place: of the network.
            generator: see `ThreadBarrier.begin`.

        Raises:
            Aborted: another replica failed.
            RuntimeError: as in forward; by graph also where a layer is called again.
        """
        return self._section(meeting, place, generator, called_again=self.by == "threads")

    @contextmanager
    def _section(
        self, meeting: ThreadBarrier, place: int, generator: torch.Generator | None, *, called_again: bool
    ) -> Iterator[None]:
        replaced: list[_BatchNorm] = []
        try:
            meeting.begin(place, generator)
            if len(meeting.places) > 1:  # else the batch is one replica's, and torch's own layer does it all
                for name, layer in _layers(self.networks[place]):
                    kind = _JoinedForward if called_again else _RefusedForward
                    layer.forward = kind(layer, name, meeting, place, self.by)  # type: ignore[method-assign]
                    replaced.append(layer)
            yield
        except BaseException as error:
            meeting.abort(error)
            raise
        finally:
            for layer in replaced:
                del layer.forward
        meeting.leave(place)


def copy_statistics(source: nn.Module, targets: Iterable[nn.Module]) -> None:
    """Give networks that had no share of a batch the running statistics of one that had."""
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
                    "cannot be joined; expected torch's BatchNorm1d, 2d or 3d (or leave out sync_batchnorm)"
                )
            found.append((name, layer))
    return found


@dataclass
class _Share:
    """What a replica's values add to the statistics of the batch."""

    count: int
    """Values per channel."""
    mean: torch.Tensor
    """(channels,), float32 or float64."""
    squares: torch.Tensor
    """The sum of squared deviations from the mean, likewise."""


@dataclass(eq=False)
class _JoinedForward:
    """What stands for a layer's ``forward`` while a section is in force."""

    layer: _BatchNorm
    name: str
    meeting: ThreadBarrier
    place: int
    by: By

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        layer = self.layer
        if not _uses_the_batch(layer):
            return _BatchNorm.forward(layer, input)
        layer._check_input_dim(input)  # type: ignore[no-untyped-call]
        factor = _count_batch(layer)
        count = input.numel() // max(1, input.shape[1])
        mean, squares = _Statistics.apply(input)  # type: ignore[no-untyped-call]
        mean, squares, total = self._joined(_Share(count, mean, squares))
        if total == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
        if layer.training and layer.track_running_stats and total:
            _update(layer.running_mean, mean, factor)
            _update(layer.running_var, squares / (total - 1), factor)
        weight = torch.ones_like(mean) if layer.weight is None else layer.weight.to(mean.dtype)
        bias = torch.zeros_like(mean) if layer.bias is None else layer.bias.to(mean.dtype)
        variance = squares / max(1, total)
        output: torch.Tensor = _Normalised.apply(input, mean, variance, weight, bias, layer.eps)  # type: ignore[no-untyped-call]
        return output

    def exchange(self, direction: str, value: Value) -> list[Value]:
        """Meet the other replicas in this layer."""
        parameter = next(iter([*self.layer.parameters(recurse=False), *self.layer.buffers(recurse=False)]), None)
        ready = None
        if parameter is not None and parameter.is_cuda:  # others read it from threads whose streams are not ours
            ready = torch.cuda.current_stream(parameter.device).record_event()
        met = self.meeting.exchange(self.place, (f"{direction} of {self.name!r}", value, ready))
        for _, _, event in met:
            if event is not None:
                torch.cuda.current_stream(event.device).wait_event(event)
        if len({where for where, _, _ in met}) > 1:
            calls = ", ".join(f"{place}: {one[0]}" for place, one in zip(self.meeting.places, met, strict=True))
            raise RuntimeError(
                f"replicas met in different layers of batch normalisation ({calls}); a network whose batch "
                "statistics are joined must call its layers in one order on every share of a batch"
            )
        return [value for _, value, _ in met]

    def _joined(self, own: _Share) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Mean, sum of squared deviations and number of values of the whole batch."""
        if self.by == "graph":
            shares = self.exchange("forward", own)
            mean, squares = _combined(shares, own.mean.device)
        else:
            shares = self.exchange("forward", _Share(own.count, own.mean.detach(), own.squares.detach()))
            mean, squares = _Met.apply(own.mean, own.squares, shares, self)  # type: ignore[no-untyped-call]
        return mean, squares, sum(share.count for share in shares)


class _RefusedForward(_JoinedForward):
    """The same during a backward that joins by graph, where waiting for another replica would wait for ever."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        if _uses_the_batch(self.layer):
            raise RuntimeError(
                f"batch normalisation {self.name!r} was called again during backward (activation checkpointing), and "
                "its statistics cannot be joined there while one GPU stands twice among the contexts; name each GPU "
                "once, or leave the layer out of what is checkpointed"
            )
        return _BatchNorm.forward(self.layer, input)


def _uses_the_batch(layer: _BatchNorm) -> bool:
    return layer.training or (layer.running_mean is None and layer.running_var is None)


def _count_batch(layer: _BatchNorm) -> float:
    """Count the batch as torch does, and return its weight in the running statistics."""
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


def _combined(shares: Sequence[_Share], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and sum of squared deviations of all shares; the same operations in the same order on every replica."""
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
    """``(values - mean) * factor + shift`` by channel, in one pass: what batch normalisation does in evaluation."""
    nothing = torch.finfo(torch.float32).tiny  # it has to be positive, and adds nothing to 1
    return F.batch_norm(values, mean, torch.ones_like(mean), factor, shift, False, 0.0, nothing)


class _Statistics(Function):
    """(N, C, ...) -> mean (C,), sum of squared deviations (C,); in float32 for half precision."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = values.numel() // max(1, values.shape[1])
        dtype = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
        mean, variance = torch.zeros(2, values.shape[1], dtype=dtype, device=values.device).unbind()
        if count:
            # The kernel of torch's own layer, 5 times as fast on a CPU as var_mean; statistics are of the dtype of
            # the running ones, and these have weight 0.
            mean, variance = torch.batch_norm_update_stats(values, mean, torch.ones_like(variance), 0.0)
        ctx.save_for_backward(values, mean)
        return mean, variance * count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_mean: torch.Tensor, of_squares: torch.Tensor) -> torch.Tensor:
        values, mean = ctx.saved_tensors
        count = max(1, values.numel() // max(1, values.shape[1]))
        return _mapped(values, mean, 2 * of_squares, of_mean / count)


class _Met(Function):
    """Combines the shares of threads that met; in backward they meet again and add up their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        mean: torch.Tensor,
        squares: torch.Tensor,  # noqa: ARG004 - one of the shares too; gradients want it as an argument
        shares: list[_Share],
        at: _JoinedForward,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        joint, joint_squares = _combined(shares, mean.device)
        ctx.save_for_backward(mean, joint)
        ctx.layer, ctx.name, ctx.places = at.layer, at.name, at.meeting.places
        ctx.count = shares[ctx.places.index(at.place)].count
        ctx.total = max(1, sum(share.count for share in shares))
        return joint, joint_squares

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_mean: torch.Tensor, of_squares: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        at = ctx.layer.__dict__.get("forward")
        if not isinstance(at, _JoinedForward) or at.meeting.places != ctx.places:
            raise RuntimeError(
                f"batch normalisation {ctx.name!r} has joint statistics of replicas {ctx.places}; expected its "
                "backward in a backward_section, with a meeting of all of these"
            )
        met = at.exchange("backward", (of_mean, of_squares))
        of_mean = _sum([gradient.to(of_mean.device) for gradient, _ in met])
        of_squares = _sum([gradient.to(of_squares.device) for _, gradient in met])
        mean, joint = ctx.saved_tensors
        through_mean = of_mean * (ctx.count / ctx.total) + of_squares * (mean - joint) * (2 * ctx.count)
        return through_mean, of_squares, None, None


class _Normalised(Function):
    """(N, C, ...), by given statistics, weight and bias (C,) in the statistics' dtype -> (N, C, ...) in its own."""

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
        if not values.numel():  # the kernel divides by it
            return torch.zeros_like(values), *torch.zeros(4, len(mean), dtype=mean.dtype, device=mean.device), None
        of_values, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, values, weight, mean, variance, None, None, False, ctx.eps, [ctx.needs_input_grad[0], True, True]
        )
        scale = weight * (variance + ctx.eps).rsqrt()
        of_variance = of_weight * scale * -0.5 / (variance + ctx.eps).sqrt()
        return of_values, of_bias * -scale, of_variance, of_weight, of_bias, None
