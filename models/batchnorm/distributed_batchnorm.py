"""Batch normalization over the ranks of torch.distributed, on CPUs and GPUs, with batches of unequal size."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from gangline.models.batchnorm.joint_statistics import Direction, Moments, check_own_forward, normalize
from gangline.models.current_batch import current_batch, weighted

_log = logging.getLogger("gangline")
_looked_at: WeakSet[nn.Module] = WeakSet()
_EQUAL = 1.05  # loads that differ by less are measurement noise


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
        batch = current_batch()
        return normalize(self, input, partial(_exchange, self, batch.weight), counts=batch.has_samples)


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
