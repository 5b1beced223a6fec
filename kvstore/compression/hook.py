"""Communication hook for DistributedDataParallel that compresses gradients, over any backend of torch.distributed."""

from __future__ import annotations

from operator import is_
from typing import Any, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

from gangline.kvstore.compression import Compression, compress, parse


def compress_hook(type: str, **options: Any) -> CompressHook:  # noqa: A002  the name in set_gradient_compression
    """Return a hook that sends gradients through a codec and, on every rank, sums the received ones in rank order.

        ddp.register_comm_hook(None, compress_hook("2bit", threshold=0.03))

    The hook's state is a process group, or None for the default one. The compressed value is this rank's share of the
    mean over all ranks, its gradient / size, plus the residual if there is error feedback: thresholds are in that unit.
    The hook keeps the residual by parameter when DDP rebuilds its buckets after the first step; each DDP module needs a
    hook of its own. A bucket costs every rank size times its payload: 2bit sends a sixteenth of float32.

    Args:
        type: "2bit", "fp16", "bf16", "topk", or a name given to `gangline.kvstore.compression.register`.
        options: the codec's, such as ``threshold`` (2bit) or ``ratio`` (topk), and ``error_feedback``.

    Raises:
        ValueError: if the type or an option is unknown, or a value is out of range. In backward: if a gradient holds
            NaN or infinity, or is not floating-point.
        TypeError: if a value has the wrong type.
    """
    return CompressHook(parse({"type": type, **options}))


class CompressHook:
    """Hook made by `compress_hook`, with each parameter's residual."""

    def __init__(self, compression: Compression) -> None:
        self.__name__ = self.__qualname__ = "compress_hook"  # read by DDP
        self._compression = compression
        self._buckets: dict[int, tuple[list[Tensor], Tensor]] = {}
        self._of_parameter: dict[Tensor, Tensor] = {}

    def __call__(self, state: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
        """Return a future of the mean of a bucket's gradients over all ranks, as transmitted."""
        group = dist.group.WORLD if state is None else state
        assert group is not None
        buffer: Tensor = bucket.buffer()
        part = buffer / group.size()
        residual = self._residual(bucket) if self._compression.error_feedback else None
        codec = self._compression.codec
        payload = compress(codec, part, residual, f"bucket {bucket.index()}")
        arrived = payload.new_empty((group.size(), payload.numel()))

        def summed(_: Future[Any]) -> Tensor:
            codec.decode(arrived[0], buffer)
            for row in arrived[1:]:
                codec.decode(row, part)
                buffer.add_(part)
            return buffer

        gathering = dist.all_gather(list(arrived), payload, group=group, async_op=True)
        future: Future[Tensor] = gathering.get_future().then(summed)
        return future

    def residual(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter's gradient that this rank has not sent yet, in its shape; initially zeros."""
        found = self._of_parameter.get(parameter)
        return torch.zeros_like(parameter) if found is None else found.view(parameter.shape).clone()

    def _residual(self, bucket: GradBucket) -> Tensor:
        """Return the residual of a bucket, whose parameters change when DDP rebuilds its buckets."""
        parameters: list[Tensor] = bucket.parameters()
        known, flat = self._buckets.get(bucket.index(), ([], torch.empty(0, device="cpu")))
        if len(known) == len(parameters) and all(map(is_, known, parameters)):
            return flat
        flat = torch.zeros_like(bucket.buffer())
        views = torch.split(flat, [parameter.numel() for parameter in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            if (before := self._of_parameter.get(parameter)) is not None:
                view.copy_(before)
            self._of_parameter[parameter] = view
        self._buckets[bucket.index()] = parameters, flat
        return flat


# DDP compares a hook's annotations with the classes themselves, not with their names.
CompressHook.__call__.__annotations__ = get_type_hints(CompressHook.__call__)
