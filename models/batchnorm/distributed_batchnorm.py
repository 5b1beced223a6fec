"""Batch normalization by the statistics of a whole batch, of which each participant holds a part; over ranks.

Each participant's layer computes the mean and the sum of squared deviations of its own part. They are combined into
those of the whole batch (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979), and each participant normalizes its part by them. In backward the gradients of the joint statistics
are summed over the participants, so that every gradient is that of one network over the whole batch (Ioffe and Szegedy,
"Batch normalization", 2015). Parts may differ in size, and may be empty.
Participants are the ranks of torch.distributed here, on CPUs and GPUs, and replicas in `sync_batchnorm`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from gangline.models.balanced_batch import batch_of_layer, weighted

Direction = Literal["forward", "backward"]
_log = logging.getLogger("gangline")
_looked_at: WeakSet[nn.Module] = WeakSet()
_EQUAL = 1.05  # loads that differ by less are measurement noise


class Moments(NamedTuple):
    """Statistics of one participant's part of the batch; in backward, gradients of the joint statistics."""

    size: int
    """Values per channel."""
    mean: torch.Tensor
    """(channels,), float32 or float64."""
    squares: torch.Tensor
    """Sum of squared deviations from the mean, likewise."""


Exchange = Callable[[Direction, Moments], list[Moments]]
"""Returns the moments, without a graph, of all participants in the same order on all of them. Collective."""


class DistributedBatchNorm(_BatchNorm):
    """Batch normalization that uses the statistics of all ranks' batches in training mode.

    Parameters, buffers and state_dict keys are those of torch's layers, and so is evaluation mode. Half precision is
    summed in float32. Without a process group, or with a single rank, it does what torch's layer does.
    """

    group: dist.ProcessGroup | None = None
    """Ranks that share the batch; None: the default group."""
    number = 0
    """Number of the layer in its network, by which ranks compare their calls."""

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 - as torch names it
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
        """Return the normalized batch. Collective in training mode."""
        if not self.training or not dist.is_initialized() or dist.get_world_size(self.group) == 1:
            return super().forward(input)
        batch = batch_of_layer(self)
        return normalize(self, input, partial(_exchange, self, batch.weight), counts=batch.samples > 0)


_SYNCHRONIZED = (nn.SyncBatchNorm, DistributedBatchNorm)


def _exchange(layer: DistributedBatchNorm, weight: float, direction: Direction, own: Moments) -> list[Moments]:
    """Exchange a layer's moments between ranks; ``weight`` is this rank's."""
    if direction == "backward":
        # The mean over ranks weights each rank's loss. Gradients of all losses with respect to this rank's samples are
        # scaled by this rank's weight at the parameters, so divide by it below.
        own = Moments(own.size, weighted(own.mean, weight), weighted(own.squares, weight))
    # float64 holds every count, and the values of float32 unchanged.
    header = torch.tensor([own.size, layer.number, direction == "backward"], dtype=torch.float64, device="cpu")
    message = torch.cat([header.to(own.mean.device), own.mean.double(), own.squares.double()])
    received = [torch.empty_like(message) for _ in range(dist.get_world_size(layer.group))]
    dist.all_gather(received, message, group=layer.group)
    headers = torch.stack([one[:3] for one in received]).tolist()
    if len({(number, is_backward) for _, number, is_backward in headers}) > 1:
        calls = ", ".join(
            f"rank {rank}: {'backward' if is_backward else 'forward'} of number {number:.0f}"
            for rank, (_, number, is_backward) in enumerate(headers)
        )
        raise RuntimeError(
            f"ranks are in different layers of batch normalization ({calls}); a network with synchronized batch "
            "statistics must call its layers in the same order on all ranks"
        )
    divisor = weight or 1.0 if direction == "backward" else 1.0
    return [
        Moments(int(header[0]), *(one[3:] / divisor).to(own.mean.dtype).chunk(2))
        for header, one in zip(headers, received, strict=True)
    ]


def convert_sync_batchnorm(network: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Replace a network's BatchNorm layers by `DistributedBatchNorm`; call it before wrapping the network.

        model = DistributedDataParallel(gangline.convert_sync_batchnorm(network))

    The layers keep their parameters, buffers, hooks and state_dict keys. All ranks must call the layers in the same
    order. torch's SyncBatchNorm is converted too, because it needs a GPU.

    Args:
        network: network or layer, changed in place.
        group: ranks that share a batch; None: the default group.

    Returns:
        The network; a new layer if ``network`` itself is a BatchNorm layer.

    Raises:
        ValueError: if a layer overrides forward, or is lazy and has no shape yet.
    """
    converted: dict[nn.Module, DistributedBatchNorm] = {}
    for name, layer in network.named_modules():
        if isinstance(layer, _BatchNorm):
            converted[layer] = _converted(name, layer, group, len(converted))
    for module in list(network.modules()):
        for name, child in module._modules.items():  # named_children() leaves out the second of two equal layers
            if isinstance(child, _BatchNorm):
                module._modules[name] = converted[child]
    return converted[network] if isinstance(network, _BatchNorm) else network


def _converted(name: str, layer: _BatchNorm, group: dist.ProcessGroup | None, number: int) -> DistributedBatchNorm:
    if isinstance(layer, _LazyNormBase):
        raise ValueError(f"layer {name!r} is a {type(layer).__name__} without a shape; run a batch through it first")
    if not isinstance(layer, _SYNCHRONIZED):
        check_own_forward(name, layer, "or replace it by hand")
    new = DistributedBatchNorm.__new__(DistributedBatchNorm)
    new.__dict__.update(layer.__dict__)
    new.group, new.number = group, number
    return new


def smallest_share(*networks: nn.Module) -> int:
    """Return the minimum samples of a share: a BatchNorm layer cannot normalize one sample."""
    layers = [layer for network in networks for layer in network.modules() if isinstance(layer, _BatchNorm)]
    return 1 if all(isinstance(layer, _SYNCHRONIZED) for layer in layers) else 2


def warn_of_batchnorm(network: nn.Module, loads: Sequence[float], remedy: str) -> None:
    """Log a warning if unequal loads meet layers that normalize each share by itself; look once at a network."""
    if max(loads) <= min(loads) * _EQUAL or network in _looked_at:
        return
    _looked_at.add(network)
    names = [
        name
        for name, layer in network.named_modules()
        if isinstance(layer, _BatchNorm) and not isinstance(layer, _SYNCHRONIZED) and layer.training
    ]
    if not names:
        return
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    _log.warning(
        f"batch normalization {names[0]!r}{others} will take mean and variance from each rank's own share, and the "
        f"shares are unequal (loads {', '.join(f'{load:g}' for load in loads)}): small shares have noisier statistics, "
        "and the result is not that of one device, nor that of equal shares; all other layers stay exact. To use the "
        f"statistics of the whole batch, {remedy}"
    )


def normalize(layer: _BatchNorm, input: torch.Tensor, exchange: Exchange, *, counts: bool = True) -> torch.Tensor:  # noqa: A002 - as torch names it
    """Return a layer's output for a part of the batch, (N, C, ...), and update its running statistics. Collective.

    With ``counts=False`` the part does not belong to the batch: it is normalized only.
    """
    layer._check_input_dim(input)  # type: ignore[no-untyped-call]
    part = input if counts else input[:0]
    count = part.numel() // max(1, part.shape[1])
    own = _statistics(part.detach(), count)
    shares = exchange("forward", own)
    mean, squares = _JointStatistics.apply(part, own, shares, exchange)  # type: ignore[no-untyped-call]
    total = sum(share.size for share in shares)
    if total == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    update_running_statistics(layer, mean, squares, total)
    weight = torch.ones_like(mean) if layer.weight is None else layer.weight.to(mean.dtype)
    bias = torch.zeros_like(mean) if layer.bias is None else layer.bias.to(mean.dtype)
    variance = squares / max(1, total)
    output: torch.Tensor = _Normalized.apply(input, mean, variance, weight, bias, layer.eps)  # type: ignore[no-untyped-call]
    return output


def update_running_statistics(layer: _BatchNorm, mean: torch.Tensor, squares: torch.Tensor, total: int) -> None:
    """Update a layer's running statistics by those of the whole batch, as torch's layer does in training mode."""
    if not (layer.training and layer.track_running_stats):
        return
    factor = layer.momentum or 0.0
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:
            factor = 1.0 / float(layer.num_batches_tracked)
    if total > 1:
        _update(layer.running_mean, mean, factor)
        _update(layer.running_var, squares / (total - 1), factor)


def combined(shares: Sequence[Moments], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and sum of squared deviations of all parts, by the same operations in order on every participant."""
    total = max(1, sum(share.size for share in shares))
    means = [share.mean.to(device) for share in shares]
    mean = functools.reduce(torch.add, [own * (share.size / total) for own, share in zip(means, shares, strict=True)])
    between = [(own - mean).square() * share.size for own, share in zip(means, shares, strict=True)]
    return mean, functools.reduce(torch.add, [share.squares.to(device) for share in shares] + between)


def check_own_forward(name: str, layer: _BatchNorm, remedy: str) -> None:
    """Raise ValueError if a layer's class overrides forward."""
    if getattr(layer.forward, "__func__", None) is not _BatchNorm.forward:
        raise ValueError(
            f"layer {name!r} is a {type(layer).__name__} with a forward of its own, whose batch statistics cannot be "
            f"synchronized; expected torch's BatchNorm1d, 2d or 3d ({remedy})"
        )


@torch.no_grad()
def _update(running: torch.Tensor | None, value: torch.Tensor, factor: float) -> None:
    if running is not None:
        running.copy_(torch.lerp(running.to(value.dtype), value, factor))


def _mapped(values: torch.Tensor, mean: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return ``(values - mean) * factor + shift`` by channel, with the kernel of evaluation mode."""
    epsilon = torch.finfo(torch.float32).tiny  # must be positive; 1 + tiny == 1
    return F.batch_norm(values, mean, torch.ones_like(mean), factor, shift, False, 0.0, epsilon)


def _statistics(values: torch.Tensor, count: int) -> Moments:
    """Return the statistics by channel of a part of the batch, (N, C, ...); in float32 for half precision."""
    dtype = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
    mean, variance = torch.zeros(2, values.shape[1], dtype=dtype, device=values.device).unbind()
    if count:
        # The kernel of torch's own layer, 5 times as fast on a CPU as var_mean. Its results have the dtype of the
        # running statistics, which enter with weight 0.
        mean, variance = torch.batch_norm_update_stats(values, mean, torch.ones_like(variance), 0.0)
    return Moments(count, mean, variance * count)


class _JointStatistics(Function):
    """Statistics of the whole batch from those of all parts; backward sums the gradients over the participants."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, own: Moments, shares: list[Moments], exchange: Exchange
    ) -> tuple[torch.Tensor, torch.Tensor]:
        joint, joint_squares = combined(shares, values.device)
        ctx.save_for_backward(values, own.mean, joint)
        ctx.exchange, ctx.count, ctx.counts = exchange, own.size, [share.size for share in shares]
        return joint, joint_squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_mean: torch.Tensor, of_squares: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        received = ctx.exchange("backward", Moments(ctx.count, of_mean, of_squares))
        if [one.size for one in received] != ctx.counts:
            raise RuntimeError(
                f"batch normalization has joint statistics of parts with {ctx.counts} values per channel, but backward "
                f"ran on parts with {[one.size for one in received]}; expected the same parts in both"
            )
        of_mean = functools.reduce(torch.add, [one.mean.to(of_mean.device) for one in received])
        of_squares = functools.reduce(torch.add, [one.squares.to(of_squares.device) for one in received])
        values, mean, joint = ctx.saved_tensors
        total = max(1, sum(ctx.counts))
        of_own_mean = of_mean * (ctx.count / total) + of_squares * (mean - joint) * (2 * ctx.count)
        return _mapped(values, mean, 2 * of_squares, of_own_mean / max(1, ctx.count)), None, None, None


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
        deviation = (variance + ctx.eps).rsqrt()
        saved = (mean, deviation)  # required on GPUs, of what their forward would have saved
        of_values, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, values, weight, mean, variance, *saved, False, ctx.eps, [ctx.needs_input_grad[0], True, True]
        )
        scale = weight * deviation
        of_variance = of_weight * scale * -0.5 / (variance + ctx.eps).sqrt()
        return of_values, of_bias * -scale, of_variance, of_weight, of_bias, None
